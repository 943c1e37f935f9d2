"""Generations as TorchRL's LLM wrappers hand them on: `Tokens`, `Masks`, `LogProbs`, `Text`, `ChatHistory`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, MetaData, TensorDict, lazy_stack
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, LogProbs, Masks, Text, Tokens

from torchrl_ext.rollout.generation import UNKNOWN_VERSION, Generation
from torchrl_ext.rollout.prompts import Prompts

__all__ = ["RecordWriter"]


@dataclass(frozen=True, kw_only=True)
class _Widths:
    """Lengths of padded prompts and responses; 0 where nothing is padded, since no sequence is shorter."""

    prompt: int = 0
    response: int = 0


class RecordWriter:
    """Writes one entry per generation.

    Args:
        keys: names of the entries by what they are: ``tokens``, ``masks``, ``log_probs``, ``versions``, ``truncated``,
            and where wanted ``text`` and ``history``.
        tokenizer: turns responses into text; None where neither text nor history is wanted.
        pad_output: bring prompts (on the left) and responses (on the right) to one length.
        padding_value: token id for that.
    """

    def __init__(
        self, keys: Mapping[str, NestedKey], *, tokenizer: Any, pad_output: bool, padding_value: int | None
    ) -> None:
        self._keys, self._tokenizer = dict(keys), tokenizer
        self._pad_output, self._padding_value = pad_output, padding_value

    def __call__(
        self, prompts: Prompts, generations: Sequence[Generation], samples: int | None
    ) -> LazyStackedTensorDict:
        """The entries of a batch.

        Args:
            prompts: B of them.
            generations: ``samples`` (1 where that is None) per prompt, those of one prompt together.
            samples: continuations per prompt; None leaves the dimension out.

        Returns:
            Shape ``(B,)``, or ``(B, samples)``.
        """
        each = samples or 1
        longest = max(len(generation.token_ids) for generation in generations)
        widths = _Widths(prompt=prompts.width, response=longest) if self._pad_output else _Widths()
        texts = self._texts(generations)
        rows = [self._row(prompts, i // each, one, texts[i], widths) for i, one in enumerate(generations)]
        if samples is None:
            return lazy_stack(rows, 0)
        return lazy_stack([lazy_stack(rows[i : i + each], 0) for i in range(0, len(rows), each)], 0)

    def _texts(self, generations: Sequence[Generation]) -> list[tuple[str, str]]:
        """What each response says, with all its tokens, and as a message: without the token that ends it."""
        if "text" not in self._keys:
            return [("", "")] * len(generations)
        ids = [list(one.token_ids) for one in generations]
        ended = [one[:-1] if kind.finish_reason == "stop" else one for one, kind in zip(ids, generations, strict=True)]
        decode = self._tokenizer.batch_decode
        return list(zip(decode(ids, skip_special_tokens=False), decode(ended, skip_special_tokens=False), strict=True))

    def _row(
        self, prompts: Prompts, i: int, generation: Generation, texts: tuple[str, str], widths: _Widths
    ) -> TensorDict:
        """One entry; every tensor called full has the prompt's length plus the response's."""
        prompt = prompts.tokens[i]
        response = torch.tensor(generation.token_ids, dtype=torch.long)
        before, after = max(0, widths.prompt - prompt.numel()), max(0, widths.response - response.numel())
        padding = 0 if self._padding_value is None else self._padding_value
        padded_prompt, padded_response = _pad(prompt, padding, left=before), _pad(response, padding, right=after)
        heard = _pad(torch.ones_like(prompt, dtype=torch.bool), False, left=before)
        said = _pad(torch.ones_like(response, dtype=torch.bool), False, right=after)
        made: dict[str, Any] = {
            "tokens": Tokens(
                prompt=padded_prompt,
                response=padded_response,
                full=torch.cat([padded_prompt, padded_response]),
                padded=MetaData(self._pad_output),
            ),
            "masks": Masks(
                all_attention_mask=torch.cat([heard, said]),
                all_assistant_mask=torch.cat([torch.zeros_like(heard), said]),
                padded=MetaData(self._pad_output),
            ),
            "versions": _versions(generation, padded_prompt.numel(), after),
            "truncated": torch.tensor(generation.finish_reason != "stop"),
        }
        if "log_probs" in self._keys:
            made["log_probs"] = self._log_probs(generation, padded_prompt.numel(), after)
        if "text" in self._keys:
            full = prompts.text[i] + texts[0]
            made["text"] = Text(prompt=prompts.text[i], response=texts[0], full=full)
        if "history" in self._keys:
            history = prompts.history[i]
            answer = lazy_stack([History(role="assistant", content=texts[1])], 0)
            full = history.extend(answer, inplace=False, dim=0)
            made["history"] = ChatHistory(prompt=history, response=answer, full=full)
        return TensorDict({self._keys[name]: made[name] for name in self._keys}, batch_size=[])

    def _log_probs(self, generation: Generation, prompt: int, after: int) -> LogProbs:
        response = torch.tensor(generation.logprobs, dtype=torch.float32)
        padded = _pad(response, 0.0, right=after)
        unscored = torch.full((prompt,), torch.nan)  # NaN, as TorchRL fills it: 0 would say that a token was certain
        return LogProbs(response=padded, full=torch.cat([unscored, padded]), padded=MetaData(self._pad_output))


def _versions(generation: Generation, prompt: int, after: int) -> TensorDict:
    response = _pad(torch.tensor(generation.token_versions(), dtype=torch.long), UNKNOWN_VERSION, right=after)
    full = torch.cat([torch.full((prompt,), UNKNOWN_VERSION), response])
    return TensorDict({"response": response, "full": full}, batch_size=[])


def _pad(values: Tensor, value: float, *, left: int = 0, right: int = 0) -> Tensor:
    return torch.nn.functional.pad(values, (left, right), value=value) if left or right else values
