"""Continue chat and text completions that an engine aborted: send OpenAI's bodies again, for the rest of the answer.

What cannot be put into a prompt (thoughts, calls of tools, several choices) is asked for again from the start: a
chat template drops such parts, so a continuation would be of another text than the one that was sampled.

Source of the fields: vLLM's `ChatCompletionRequest` and `CompletionRequest` (``continue_final_message``, ``echo``,
``return_token_ids``).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torchrl_ext.types import Info

__all__ = ["ChatContinuation", "Continuation", "TextContinuation"]

_OF_THE_PROMPT = ("prompt_token_ids", "prompt_logprobs", "prompt_text")  # taken from the first answer
_HALF_A_CHARACTER = "\ufffd"


class Continuation(ABC):
    """Holds one request and the answers to it so far, and joins them into a whole one.

    Args:
        body: of the first request; not changed.
    """

    _CARRIED: ClassVar[frozenset[str]] = frozenset(
        {"index", "finish_reason", "stop_reason", "matched_stop", "logprobs", "token_ids", *_OF_THE_PROMPT}
    )

    def __init__(self, body: Info) -> None:
        self._body = copy.deepcopy(body)
        self._first: Info | None = None
        self._choice: Info = {}
        self._text, self._tokens = "", 0

    @property
    def carries(self) -> bool:
        """Whether the text of an aborted answer can be kept: that of one choice, which does not repeat the prompt."""
        return self._body.get("n") in (None, 1) and not self._body.get("stream") and not self._body.get("echo")

    def body(self) -> Info:
        """Return the body of the next request: the first one, or one for the rest of the answer."""
        body = copy.deepcopy(self._body)
        if self._first is not None:
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
        """Add an answer; return the whole, or None where the engine aborted and the rest, or all, is to be asked for.

        Raises:
            KeyError, TypeError, IndexError, ValueError, AttributeError: the answer is not of this form.
        """
        aborted = any(choice.get("finish_reason") == "abort" for choice in answer["choices"])
        if self._first is None and not aborted:
            return answer
        if not self.carries or not self._joins(answer) or (aborted and self._cut(answer)):
            self._forget()
            return None
        choice, said = answer["choices"][0], self._said(answer["choices"][0])
        self._choice = choice if self._first is None else self._merged(self._choice, choice)
        self._first = self._first or answer
        self._text += said
        self._tokens += int(answer["usage"]["completion_tokens"])
        if aborted:
            limits = [self._body.get(name) for name in ("max_tokens", "max_completion_tokens")]
            if not any(limit is not None and self._tokens >= limit for limit in limits):
                return None
            self._choice["finish_reason"] = "length"
        prompt = self._first["usage"].get("prompt_tokens", 0)
        usage = {"completion_tokens": self._tokens, "prompt_tokens": prompt, "total_tokens": prompt + self._tokens}
        of_prompt = {name: self._first[name] for name in _OF_THE_PROMPT if name in self._first}
        choices = [self._with_text(self._choice)]
        return {**answer, **of_prompt, "choices": choices, "usage": {**answer["usage"], **usage}}

    def _forget(self) -> None:
        """Drop all answers so far, so that the next request asks from the start."""
        self._first, self._choice, self._text, self._tokens = None, {}, "", 0

    def _joins(self, answer: Info) -> bool:
        """Return whether every part of an answer can be joined with the earlier ones."""
        (choice,) = answer["choices"]
        counted = "completion_tokens" in (answer.get("usage") or {})
        return counted and not _filled(choice, but=self._CARRIED) and not self._straddled(self._said(choice))

    def _cut(self, answer: Info) -> bool:
        """Return whether the text of an aborted answer lacks a part of its last tokens, such as half a character."""
        said = self._said(answer["choices"][0])
        return said.endswith(_HALF_A_CHARACTER) or (not said and answer["usage"]["completion_tokens"] > 0)

    def _straddled(self, said: str) -> bool:
        """Return whether a stop string began in the text so far and ended in ``said``, where no engine saw it whole."""
        stops = self._body.get("stop") or ()
        reaches = {stop: len(stop) - 1 for stop in ([stops] if isinstance(stops, str) else stops)}
        return any(reach and stop in self._text[-reach:] + said[:reach] for stop, reach in reaches.items())

    def _merged(self, before: Info, after: Info) -> Info:
        merged = {**before, **after, **{name: before[name] for name in _OF_THE_PROMPT if name in before}}
        if before.get("token_ids") is not None and after.get("token_ids") is not None:
            merged["token_ids"] = [*before["token_ids"], *after["token_ids"]]
        if isinstance(before.get("logprobs"), dict) and isinstance(after.get("logprobs"), dict):
            merged["logprobs"] = {
                name: [*(before["logprobs"].get(name) or ()), *self._moved(name, rows or ())]
                if isinstance(rows, list)
                else rows
                for name, rows in after["logprobs"].items()
            }
        return merged

    def _moved(self, name: str, rows: Any) -> Any:
        return [row + len(self._text) for row in rows] if name == "text_offset" else rows

    @abstractmethod
    def _said(self, choice: Info) -> str:
        """Return the text of a choice."""

    @abstractmethod
    def _with_text(self, choice: Info) -> Info:
        """Return ``choice`` with the text of all answers so far."""

    @abstractmethod
    def _go_on(self, body: Any) -> None:
        """Put the text so far into the prompt of ``body``."""


class ChatContinuation(Continuation):
    """Continues answers of ``/v1/chat/completions``: the text so far is sent as the message to be continued."""

    _CARRIED: ClassVar[frozenset[str]] = Continuation._CARRIED | {"message"}

    def _joins(self, answer: Info) -> bool:
        return super()._joins(answer) and not _filled(answer["choices"][0]["message"], but={"role", "content"})

    def _said(self, choice: Info) -> str:
        return choice["message"].get("content") or ""

    def _with_text(self, choice: Info) -> Info:
        return {**choice, "message": {**choice["message"], "content": self._text}}

    def _go_on(self, body: Any) -> None:
        if not self._text:
            return
        if body.get("continue_final_message"):  # the caller's own last message is being continued: make it longer
            *before, last = body["messages"]
            body["messages"] = [*before, {**last, "content": _longer(last["content"], self._text)}]
            return
        body["messages"] = [*body["messages"], {"role": "assistant", "content": self._text}]
        body |= {"continue_final_message": True, "add_generation_prompt": False}


class TextContinuation(Continuation):
    """Continues answers of ``/v1/completions`` with one prompt: text, or token ids (answers must have theirs then)."""

    _CARRIED: ClassVar[frozenset[str]] = Continuation._CARRIED | {"text"}

    def __init__(self, body: Info) -> None:
        super().__init__(body)
        self._ids = isinstance(body.get("prompt"), list) and all(isinstance(one, int) for one in body["prompt"])
        if self._ids:
            self._body["return_token_ids"] = True

    @property
    def carries(self) -> bool:
        return super().carries and (self._ids or isinstance(self._body.get("prompt"), str))

    def _joins(self, answer: Info) -> bool:
        return super()._joins(answer) and not (self._ids and answer["choices"][0].get("token_ids") is None)

    def _cut(self, answer: Info) -> bool:
        return not self._ids and super()._cut(answer)

    def _said(self, choice: Info) -> str:
        return choice.get("text") or ""

    def _with_text(self, choice: Info) -> Info:
        return {**choice, "text": self._text}

    def _go_on(self, body: Any) -> None:
        body["prompt"] = body["prompt"] + (self._choice["token_ids"] if self._ids else self._text)


def _filled(told: Mapping[str, Any], *, but: Any) -> list[str]:
    """Return the names of the fields that have a value, without those in ``but``."""
    return [name for name, value in told.items() if name not in but and value not in (None, [], {}, "")]


def _longer(content: Any, text: str) -> Any:
    """Return a message's content, a string or a list of parts, with ``text`` at its end."""
    return content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
