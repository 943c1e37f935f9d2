"""Read prompts from a TensorDict and write generations into one, as TorchRL's LLM wrappers do.

The keys and the forms are TorchRL's: `Tokens`, `Masks`, `LogProbs`, `Text`, `ChatHistory`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, MetaData, NonTensorStack, TensorDict, lazy_stack
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, LogProbs, Masks, Text, Tokens

from torchrl_ext.errors import ConfigError
from torchrl_ext.rollout.generation import UNKNOWN_VERSION, Generation
from torchrl_ext.rollout.torchrl.settings import WrapperSettings

__all__ = ["PromptReader", "Prompts", "RecordWriter"]


class _OtherType(ConfigError, TypeError):
    """An input of the wrong type; a `TypeError` as well, which is what TorchRL's wrappers raise."""


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """A batch of B prompts, tokenized.

    Attributes:
        tokens: B tensors of token ids, int64, without padding.
        width: length to which prompts are padded, at least; that of a padded input.
        text: B strings; none in tokens mode.
        history: a `History` of shape ``(B, turns)``; None but in history mode.
    """

    tokens: Sequence[Tensor]
    width: int = 0
    text: Sequence[str] = ()
    history: Any = None


class PromptReader:
    """Finds the prompts in a TensorDict and tokenizes them.

    Args:
        settings: the mode, where its prompts are, and the tokenizer.
    """

    def __init__(self, settings: WrapperSettings) -> None:
        readers = {"history": self._history, "text": self._text, "tokens": self._tokens}
        self._settings, self._read = settings, readers[settings.input_mode]

    def __call__(self, tensordict: LazyStackedTensorDict) -> Prompts:
        """Return the prompts of a lazy stack of shape ``(B,)``.

        Raises:
            ConfigError: the input key is missing, or holds something else.
        """
        key, mode = self._settings.input_key, self._settings.input_mode
        if key not in tensordict.keys(include_nested=True):
            raise ConfigError(
                f"Expected {key!r} key: there is no {key!r} in the input of {mode} mode",
                expected=f"one of its keys {list(tensordict.keys(include_nested=True, leaves_only=True))}",
            )
        return self._read(tensordict)

    def _tokens(self, tensordict: LazyStackedTensorDict) -> Prompts:
        settings, padding = self._settings, self._settings.padding_value
        given = tensordict.get(settings.input_key, as_list=True)
        keys = ((settings.masks_key, "all_attention_mask"), settings.attention_mask_key)
        masks = next((found for key in keys if (found := _as_list(tensordict, key)) is not None), None)
        if masks is None or any(mask.shape != ids.shape for mask, ids in zip(masks, given, strict=True)):
            masks = [torch.ones_like(ids) if padding is None else ids != padding for ids in given]
        tokens = [ids[mask.bool()].long() for ids, mask in zip(given, masks, strict=True)]
        return Prompts(tokens=tokens, width=max(ids.numel() for ids in given))

    def _text(self, tensordict: LazyStackedTensorDict) -> Prompts:
        text = _strings(tensordict.get(self._settings.input_key), tensordict.batch_size[0])
        given = (self._settings.tokenizer_kwargs or {}).items()
        how = {name: value for name, value in given if name not in ("padding", "padding_side", "return_tensors")}
        tokens = [torch.tensor(ids, dtype=torch.long) for ids in self._settings.tokenizer(text, **how)["input_ids"]]
        return Prompts(tokens=tokens, text=text)

    def _history(self, tensordict: LazyStackedTensorDict) -> Prompts:
        key, tokenizer = self._settings.input_key, self._settings.tokenizer
        history = tensordict.get(key)
        if not isinstance(history, History):
            raise _OtherType(
                f"Expected History object in {key!r}, and it has a {type(history).__name__}",
                hint="make one with torchrl.data.llm.History.from_chats",
            )
        tokens = self._existing(tensordict)
        if tokens is not None:
            text = tokenizer.batch_decode(tokens, skip_special_tokens=False)
        else:
            template = {**self._settings.template, "tokenizer": tokenizer, "add_generation_prompt": True}
            text = history.apply_chat_template(**template)
            how = {"return_assistant_tokens_mask": False, "tokenize": True, "padding": False, "return_dict": True}
            rows = history.apply_chat_template(**template, **how).get("input_ids", as_list=True)
            tokens = [ids.long() for ids in rows]
        return Prompts(tokens=tokens, text=text, history=history)

    def _existing(self, tensordict: LazyStackedTensorDict) -> list[Tensor] | None:
        """Return tokens that an earlier turn or `IncrementalTokenizer` left, with which an engine's prefix cache still
        fits; None where there are none, or they are not wanted."""
        if not self._settings.prefer_tokens:
            return None
        for part in ("prompt", "full"):
            found = _as_list(tensordict, (self._settings.tokens_key, part))
            if found is not None:
                return [ids[ids != self._settings.padding_value].long() for ids in found]
        return None


def _as_list(tensordict: LazyStackedTensorDict, key: NestedKey) -> list[Tensor] | None:
    if key not in tensordict.keys(include_nested=True):
        return None
    found = tensordict.get(key, as_list=True)
    return None if any(value is None for value in found) else found


def _strings(value: Any, count: int) -> list[str]:
    if isinstance(value, str):
        return [value] * count
    return value.tolist() if isinstance(value, NonTensorStack) else list(value)


class RecordWriter:
    """Writes generations into a TensorDict, one entry per generation.

    Args:
        settings: the tokenizer, whether prompts (on the left) and responses (on the right) are brought to one length,
            and with which token id.
        keys: names of the entries by what they are: ``tokens``, ``masks``, ``log_probs``, ``versions``, ``truncated``,
            and where wanted ``text`` and ``history``.
    """

    def __init__(self, settings: WrapperSettings, keys: Mapping[str, NestedKey]) -> None:
        self._keys, self._tokenizer = dict(keys), settings.tokenizer
        self._pad_output, self._padding_value = settings.pad_output, settings.padding_value

    def __call__(
        self, prompts: Prompts, generations: Sequence[Generation], samples: int | None
    ) -> LazyStackedTensorDict:
        """Return the entries of a batch.

        Args:
            prompts: a batch of B.
            generations: ``samples`` (1 where that is None) per prompt, those of one prompt together.
            samples: continuations per prompt; None leaves the dimension out.

        Returns:
            Shape ``(B,)``, or ``(B, samples)``.
        """
        each = samples or 1
        width = max([prompts.width, *(ids.numel() for ids in prompts.tokens)])
        longest = max(len(generation.token_ids) for generation in generations)
        padded = (width, longest) if self._pad_output else (0, 0)  # no sequence is shorter than 0
        texts = self._texts(generations)
        rows = [self._row(prompts, i // each, one, texts[i], padded) for i, one in enumerate(generations)]
        if samples is None:
            return lazy_stack(rows, 0)
        return lazy_stack([lazy_stack(rows[i : i + each], 0) for i in range(0, len(rows), each)], 0)

    def _texts(self, generations: Sequence[Generation]) -> list[tuple[str, str]]:
        """Decode each response twice: with all its tokens, and as a message, without the token that ends it."""
        if "text" not in self._keys:
            return [("", "")] * len(generations)
        ids = [list(one.token_ids) for one in generations]
        ended = [one[:-1] if kind.finish_reason == "stop" else one for one, kind in zip(ids, generations, strict=True)]
        decode = self._tokenizer.batch_decode
        return list(zip(decode(ids, skip_special_tokens=False), decode(ended, skip_special_tokens=False), strict=True))

    def _row(
        self, prompts: Prompts, i: int, generation: Generation, texts: tuple[str, str], padded: tuple[int, int]
    ) -> TensorDict:
        """Return one entry, padded to the lengths of a prompt and of a response; tensors called full have both."""
        count, flag = len(generation.token_ids), MetaData(self._pad_output)
        before, after = max(0, padded[0] - prompts.tokens[i].numel()), max(0, padded[1] - count)
        padding = 0 if self._padding_value is None else self._padding_value
        prompt = _pad(prompts.tokens[i], padding, left=before)
        response = _pad(torch.tensor(generation.token_ids, dtype=torch.long), padding, right=after)
        heard = _pad(torch.ones_like(prompts.tokens[i], dtype=torch.bool), False, left=before)
        said = _pad(torch.ones(count, dtype=torch.bool), False, right=after)
        versions = _pad(torch.tensor(generation.token_versions(), dtype=torch.long), UNKNOWN_VERSION, right=after)
        unknown = torch.full((prompt.numel(),), UNKNOWN_VERSION)
        both = {"response": versions, "full": torch.cat([unknown, versions])}
        made: dict[str, Any] = {
            "tokens": Tokens(prompt=prompt, response=response, full=torch.cat([prompt, response]), padded=flag),
            "masks": Masks(
                all_attention_mask=torch.cat([heard, said]),
                all_assistant_mask=torch.cat([torch.zeros_like(heard), said]),
                padded=flag,
            ),
            "versions": TensorDict(both, batch_size=[]),
            "truncated": torch.tensor(generation.finish_reason != "stop"),
        }
        if "log_probs" in self._keys:
            scored = _pad(torch.tensor(generation.logprobs, dtype=torch.float32), 0.0, right=after)
            # NaN over the prompt, as TorchRL fills it: 0 would say that a token was certain
            unscored = torch.full((prompt.numel(),), torch.nan)
            made["log_probs"] = LogProbs(response=scored, full=torch.cat([unscored, scored]), padded=flag)
        if "text" in self._keys:
            full = prompts.text[i] + texts[0]
            made["text"] = Text(prompt=prompts.text[i], response=texts[0], full=full)
        if "history" in self._keys:
            history = prompts.history[i]
            answer = lazy_stack([History(role="assistant", content=texts[1])], 0)
            full = history.extend(answer, inplace=False, dim=0)
            made["history"] = ChatHistory(prompt=history, response=answer, full=full)
        return TensorDict({self._keys[name]: made[name] for name in self._keys}, batch_size=[])


def _pad(values: Tensor, value: float, *, left: int = 0, right: int = 0) -> Tensor:
    return torch.nn.functional.pad(values, (left, right), value=value) if left or right else values
