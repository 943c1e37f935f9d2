"""Chat and text completions that an engine aborted go on with what was said: OpenAI's bodies, asked again for the rest.

Source of the fields: vLLM's `ChatCompletionRequest` and `CompletionRequest` (``continue_final_message``,
``return_token_ids``).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any

from torchrl_ext.types import Info

__all__ = ["ChatContinuation", "Continuation", "TextContinuation"]


class Continuation(ABC):
    """One request and what has been answered to it so far.

    Args:
        body: of the first request; not changed.
    """

    def __init__(self, body: Info) -> None:
        self._body = copy.deepcopy(body)
        self._text = ""
        self._choice: Info | None = None
        self._tokens = 0

    @property
    def carries(self) -> bool:
        """Whether an aborted answer can be taken up again: of one choice, not streamed."""
        return self._body.get("n") in (None, 1) and not self._body.get("stream")

    def body(self) -> Info:
        """What to ask now."""
        body = copy.deepcopy(self._body)
        if self._tokens:
            for name in ("max_tokens", "max_completion_tokens"):
                if body.get(name) is not None:
                    body[name] -= self._tokens
            if body.get("min_tokens"):
                body["min_tokens"] = max(0, body["min_tokens"] - self._tokens)
            if body.get("seed") is not None:
                body["seed"] += self._tokens
            self._go_on(body)
        return body

    def take(self, answer: Info) -> Info | None:
        """The whole answer, or None where the engine aborted and the rest is to be asked for.

        Raises:
            KeyError, TypeError, IndexError: the answer is not of this form.
        """
        choice = answer["choices"][0]
        made = int((answer.get("usage") or {}).get("completion_tokens") or 0)
        self._text += self._said(choice)
        self._choice = choice if self._choice is None else self._merged(self._choice, choice)
        self._tokens += made
        limits = [self._body.get(name) for name in ("max_tokens", "max_completion_tokens")]
        if choice["finish_reason"] == "abort":
            if not any(limit is not None and self._tokens >= limit for limit in limits):
                return None
            self._choice["finish_reason"] = "length"
        usage = dict(answer.get("usage") or {})
        if usage:
            prompt = usage.get("prompt_tokens", 0) - (self._tokens - made)
            usage |= {"completion_tokens": self._tokens, "prompt_tokens": prompt, "total_tokens": prompt + self._tokens}
        return {**answer, "choices": [self._choice], "usage": usage}

    def _merged(self, before: Info, after: Info) -> Info:
        merged = {**before, **after}
        if before.get("token_ids") is not None and after.get("token_ids") is not None:
            merged["token_ids"] = [*before["token_ids"], *after["token_ids"]]
        if isinstance(before.get("logprobs"), dict) and isinstance(after.get("logprobs"), dict):
            merged["logprobs"] = {
                name: [*(before["logprobs"].get(name) or ()), *(rows or ())] if isinstance(rows, list) else rows
                for name, rows in after["logprobs"].items()
            }
        return self._with_text(merged)

    @abstractmethod
    def _said(self, choice: Info) -> str:
        """The text of a choice."""

    @abstractmethod
    def _with_text(self, choice: Info) -> Info:
        """``choice`` with everything that was said."""

    @abstractmethod
    def _go_on(self, body: Any) -> None:
        """Put what was said into the prompt."""


class ChatContinuation(Continuation):
    """``/v1/chat/completions``: what was said is the message to be continued."""

    def _said(self, choice: Info) -> str:
        return choice["message"].get("content") or ""

    def _with_text(self, choice: Info) -> Info:
        return {**choice, "message": {**choice["message"], "content": self._text}}

    def _go_on(self, body: Any) -> None:
        body["messages"] = [*body["messages"], {"role": "assistant", "content": self._text}]
        body |= {"continue_final_message": True, "add_generation_prompt": False}


class TextContinuation(Continuation):
    """``/v1/completions`` with one prompt: text, or token ids (answers then have to come with theirs)."""

    def __init__(self, body: Info) -> None:
        super().__init__(body)
        self._ids = isinstance(body.get("prompt"), list) and all(isinstance(one, int) for one in body["prompt"])
        if self._ids:
            self._body["return_token_ids"] = True

    @property
    def carries(self) -> bool:
        return super().carries and (self._ids or isinstance(self._body.get("prompt"), str))

    def _said(self, choice: Info) -> str:
        return choice.get("text") or ""

    def _with_text(self, choice: Info) -> Info:
        return {**choice, "text": self._text}

    def _go_on(self, body: Any) -> None:
        said = (self._choice or {}).get("token_ids") or [] if self._ids else self._text
        body["prompt"] = body["prompt"] + said
