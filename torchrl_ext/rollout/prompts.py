"""The prompts in a TensorDict, by input mode: history, text or tokens. The keys and forms are those of TorchRL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.llm import History

from torchrl_ext.errors import ConfigError

__all__ = ["PromptReader", "Prompts"]


class _OtherType(ConfigError, TypeError):
    """A `TypeError` as well, which is what TorchRL's wrappers raise."""


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """What a batch of B prompts holds.

    Attributes:
        tokens: B tensors of token ids, int64, without padding.
        width: length to which padded prompts go; the longest prompt, or that of a padded input.
        text: B strings; None in tokens mode.
        history: shape ``(B, turns)``; None but in history mode.
    """

    tokens: Sequence[Tensor]
    width: int
    text: Sequence[str] | None = None
    history: History | None = None


class PromptReader:
    """Finds and tokenizes prompts.

    Args:
        mode: ``"history"``, ``"text"`` or ``"tokens"``.
        key: where the input is.
        tokenizer: of `transformers`; needed by history and text modes.
        padding_value: token id that fills up padded prompts.
        template: ``chat_template_name`` and ``chat_template`` where given.
        tokenizer_kwargs: for the tokenizer, in text mode.
        tokens_key: where history mode with ``prefer_tokens`` looks for tokens.
        attention_mask_keys: where tokens mode looks for a mask, before it takes ``padding_value`` for padding.
        prefer_tokens: take tokens that are there already in place of those of the chat template.

    Raises:
        ConfigError: no such mode, or a mode without its tokenizer.
    """

    def __init__(
        self,
        mode: str,
        key: NestedKey,
        *,
        tokenizer: Any,
        padding_value: int | None,
        template: Mapping[str, Any],
        tokenizer_kwargs: Mapping[str, Any],
        tokens_key: NestedKey,
        attention_mask_keys: Sequence[NestedKey],
        prefer_tokens: bool,
    ) -> None:
        readers = {"history": self._history, "text": self._text, "tokens": self._tokens}
        if mode not in readers:
            raise ConfigError(f"input_mode must be one of {', '.join(readers)}, and it is {mode!r}")
        if tokenizer is None and mode != "tokens":
            raise ConfigError(f"input_mode {mode!r} needs a tokenizer", hint="pass tokenizer=")
        self._read, self._mode, self._key = readers[mode], mode, key
        self._tokenizer, self._padding_value = tokenizer, padding_value
        self._template, self._tokenizer_kwargs = dict(template), dict(tokenizer_kwargs)
        self._tokens_key, self._mask_keys, self._prefer_tokens = tokens_key, attention_mask_keys, prefer_tokens

    def __call__(self, tensordict: LazyStackedTensorDict) -> Prompts:
        """The prompts of a lazy stack of shape ``(B,)``.

        Raises:
            ConfigError: the input key is missing, or holds something else.
        """
        if self._key not in tensordict.keys(include_nested=True):
            raise ConfigError(
                f"Expected {self._key!r} key: there is no {self._key!r} in the input of {self._mode} mode",
                expected=f"one of its keys {list(tensordict.keys(include_nested=True, leaves_only=True))}",
            )
        return self._read(tensordict)

    def _tokens(self, tensordict: LazyStackedTensorDict) -> Prompts:
        given = _as_list(tensordict, self._key)
        masks = next((found for key in self._mask_keys if (found := _as_list(tensordict, key)) is not None), None)
        if masks is None or any(mask.shape != ids.shape for mask, ids in zip(masks, given, strict=True)):
            masks = [torch.ones_like(ids) if self._padding_value is None else ids != self._padding_value
                     for ids in given]  # fmt: skip
        tokens = [ids[mask.bool()].long() for ids, mask in zip(given, masks, strict=True)]
        return Prompts(tokens=tokens, width=max(ids.numel() for ids in given))

    def _text(self, tensordict: LazyStackedTensorDict) -> Prompts:
        text = _strings(tensordict.get(self._key), tensordict.batch_size[0])
        settings = {**self._tokenizer_kwargs, "padding": False}
        for name in ("return_tensors", "padding_side"):
            settings.pop(name, None)
        tokens = [torch.tensor(ids, dtype=torch.long) for ids in self._tokenizer(text, **settings)["input_ids"]]
        return Prompts(tokens=tokens, width=_longest(tokens), text=text)

    def _history(self, tensordict: LazyStackedTensorDict) -> Prompts:
        history = tensordict.get(self._key)
        if not isinstance(history, History):
            raise _OtherType(
                f"Expected History object in {self._key!r}, and it has a {type(history).__name__}",
                hint="make one with torchrl.data.llm.History.from_chats",
            )
        tokens = self._existing(tensordict)
        if tokens is not None:
            text = self._tokenizer.batch_decode(tokens, skip_special_tokens=False)
            return Prompts(tokens=tokens, width=_longest(tokens), text=text, history=history)
        template = {**self._template, "tokenizer": self._tokenizer, "add_generation_prompt": True}
        text = history.apply_chat_template(**template)
        struct = history.apply_chat_template(
            **template, return_assistant_tokens_mask=False, tokenize=True, padding=False, return_dict=True
        )
        tokens = [ids.long() for ids in struct.get("input_ids", as_list=True)]
        return Prompts(tokens=tokens, width=_longest(tokens), text=text, history=history)

    def _existing(self, tensordict: LazyStackedTensorDict) -> list[Tensor] | None:
        """Tokens that an earlier turn or `IncrementalTokenizer` left, so that an engine's prefix cache still fits."""
        if not self._prefer_tokens:
            return None
        for part in ("prompt", "full"):
            found = _as_list(tensordict, (self._tokens_key, part))
            if found is not None:
                return [ids[ids != self._padding_value].long() for ids in found]
        return None


def _as_list(tensordict: LazyStackedTensorDict, key: NestedKey) -> list[Tensor] | None:
    if key not in tensordict.keys(include_nested=True):
        return None
    found = [row.get(key) for row in tensordict.unbind(0)]
    return None if any(value is None for value in found) else found


def _strings(value: Any, count: int) -> list[str]:
    if isinstance(value, str):
        return [value] * count
    return value.tolist() if isinstance(value, NonTensorStack) else list(value)


def _longest(tokens: Sequence[Tensor]) -> int:
    return max(ids.numel() for ids in tokens)
