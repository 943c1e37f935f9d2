"""Read prompts from a TensorDict and write generations into one, in the form of TorchRL's LLM wrappers.

Keys and forms are TorchRL's: `Tokens`, `Masks`, `LogProbs`, `Text`, `ChatHistory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, MetaData, NonTensorStack, TensorDict, lazy_stack
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, LogProbs, Masks, Text, Tokens

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.base.types import Info
from torchrl_ext.control.requests.generation import UNKNOWN_VERSION, Generation
from torchrl_ext.rl.policy.settings import WrapperSettings

__all__ = ["Prompts", "read_prompts", "write_records"]


class _OtherType(ConfigError, TypeError):
    """An input of the wrong type; also a `TypeError`, which TorchRL's wrappers raise."""


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """A batch of B tokenized prompts.

    Attributes:
        tokens: B tensors of token ids, int64, without padding.
        width: minimum length of padded prompts: the width of a padded input.
        text: B strings; empty in tokens mode.
        history: a `History` of shape ``(B, turns)`` in history mode, else None.
    """

    tokens: Sequence[Tensor]
    width: int = 0
    text: Sequence[str] = ()
    history: Any = None


def read_prompts(tensordict: LazyStackedTensorDict, settings: WrapperSettings) -> Prompts:
    """Find the prompts in a lazy stack of shape ``(B,)``, and tokenize them.

    Raises:
        ConfigError: the input key is missing or holds another type.
    """
    key, mode = settings.input_key, settings.input_mode
    if key not in tensordict.keys(include_nested=True):
        raise ConfigError(
            f"Expected {key!r} key: there is no {key!r} in the input of {mode} mode",
            expected=f"one of its keys {list(tensordict.keys(include_nested=True, leaves_only=True))}",
        )
    return {"history": _history, "text": _text, "tokens": _tokens}[mode](tensordict, settings)


def _tokens(tensordict: LazyStackedTensorDict, settings: WrapperSettings) -> Prompts:
    padding, given = settings.padding_value, tensordict.get(settings.input_key, as_list=True)
    keys = ((settings.masks_key, "all_attention_mask"), settings.attention_mask_key)
    masks = next((found for key in keys if (found := _as_list(tensordict, key)) is not None), None)
    if masks is None or any(mask.shape != ids.shape for mask, ids in zip(masks, given, strict=True)):
        tokens = [_unpadded(ids, padding) for ids in given]
    else:
        tokens = [ids[mask.bool()].long() for ids, mask in zip(given, masks, strict=True)]
    return Prompts(tokens=tokens, width=max(ids.numel() for ids in given))


def _text(tensordict: LazyStackedTensorDict, settings: WrapperSettings) -> Prompts:
    value = tensordict.get(settings.input_key)
    if isinstance(value, str):
        text = [value] * tensordict.batch_size[0]
    else:
        text = value.tolist() if isinstance(value, NonTensorStack) else list(value)
    given = (settings.tokenizer_kwargs or {}).items()
    how = {name: one for name, one in given if name not in ("padding", "padding_side", "return_tensors")}
    tokens = [torch.tensor(ids, dtype=torch.long) for ids in settings.tokenizer(text, **how)["input_ids"]]
    return Prompts(tokens=tokens, text=text)


def _history(tensordict: LazyStackedTensorDict, settings: WrapperSettings) -> Prompts:
    tokenizer, history = settings.tokenizer, tensordict.get(settings.input_key)
    if not isinstance(history, History):
        raise _OtherType(
            f"Expected History object in {settings.input_key!r}, and it has a {type(history).__name__}",
            hint="make one with torchrl.data.llm.History.from_chats",
        )
    tokens = _existing(tensordict, settings) if settings.prefer_tokens else None
    if tokens is not None:
        text = tokenizer.batch_decode(tokens, skip_special_tokens=False)
    else:
        template: Info = {"chat_template": settings.chat_template, "chat_template_name": settings.chat_template_name}
        template |= {"tokenizer": tokenizer, "add_generation_prompt": True}
        text = history.apply_chat_template(**template)
        found = history.apply_chat_template(**template, tokenize=True, return_dict=True)
        rows = found.get("input_ids", as_list=True)
        tokens = [ids.long() for ids in rows]
    return Prompts(tokens=tokens, text=text, history=history)


def _existing(tensordict: LazyStackedTensorDict, settings: WrapperSettings) -> list[Tensor] | None:
    """Return tokens from an earlier turn or `IncrementalTokenizer`, which match an engine's prefix cache, or None."""
    for part in ("prompt", "full"):
        found = _as_list(tensordict, (settings.tokens_key, part))
        if found is not None:
            return [_unpadded(ids, settings.padding_value) for ids in found]
    return None


def _unpadded(ids: Tensor, padding: int | None) -> Tensor:
    """Drop the padding at both ends; between other tokens it is one itself, such as the end of a turn."""
    if padding is None:
        return ids.long()
    first, last = (ids != padding).nonzero().flatten()[[0, -1]].tolist() if (ids != padding).any() else (0, -1)
    return ids[first : last + 1].long()


def _as_list(tensordict: LazyStackedTensorDict, key: NestedKey) -> list[Tensor] | None:
    if key not in tensordict.keys(include_nested=True):
        return None
    found = tensordict.get(key, as_list=True)
    return None if any(value is None for value in found) else found


def write_records(
    prompts: Prompts,
    generations: Sequence[Generation],
    samples: int | None,
    settings: WrapperSettings,
    keys: Mapping[str, NestedKey],
) -> LazyStackedTensorDict:
    """Return a batch with one entry per generation.

    Args:
        prompts: a batch of B.
        generations: ``samples`` (1 if None) per prompt, grouped by prompt.
        samples: continuations per prompt; None omits the dimension.
        settings: the tokenizer, whether to pad prompts (left) and responses (right), and the padding token.
        keys: output key by name: ``tokens``, ``masks``, ``log_probs``, ``versions``, ``truncated``, and optionally
            ``text`` and ``history``.

    Returns:
        Shape ``(B,)``, or ``(B, samples)``.
    """
    each, lengths = samples or 1, (0, 0)  # minimum lengths of 0 pad nothing
    if settings.pad_output:
        width = max([prompts.width, *(ids.numel() for ids in prompts.tokens)])
        lengths = width, max(len(one.token_ids) for one in generations)
    made = [_tensors(prompts.tokens[i // each], one, lengths, settings) for i, one in enumerate(generations)]
    if prompts.text:
        for i, texts in enumerate(_texts(generations, settings.tokenizer)):
            made[i] |= _words(prompts, i // each, *texts)
    rows = [TensorDict({keys[name]: one[name] for name in keys}, batch_size=[]) for one in made]
    if samples is None:
        return lazy_stack(rows, 0)
    return lazy_stack([lazy_stack(rows[i : i + each], 0) for i in range(0, len(rows), each)], 0)


def _tensors(ids: Tensor, generation: Generation, lengths: tuple[int, int], settings: WrapperSettings) -> Info:
    """Return the tensor entries of one prompt and response, padded to ``lengths``; "full" tensors hold both."""
    count, flag, padding = len(generation.token_ids), MetaData(settings.pad_output), settings.padding_value or 0
    before, after = max(0, lengths[0] - ids.numel()), max(0, lengths[1] - count)
    prompt = _pad(ids, padding, left=before)
    response = _pad(torch.tensor(generation.token_ids, dtype=torch.long), padding, right=after)
    heard = _pad(torch.ones_like(ids, dtype=torch.bool), False, left=before)
    said = _pad(torch.ones(count, dtype=torch.bool), False, right=after)
    versions = _pad(torch.tensor(generation.token_versions(), dtype=torch.long), UNKNOWN_VERSION, right=after)
    unknown = torch.full((prompt.numel(),), UNKNOWN_VERSION)
    scored = _pad(torch.tensor(generation.logprobs, dtype=torch.float32), 0.0, right=after)
    # NaN over the prompt, as in TorchRL: 0 would mean probability 1
    unscored = torch.full((prompt.numel(),), torch.nan)
    return {
        "tokens": Tokens(prompt=prompt, response=response, full=torch.cat([prompt, response]), padded=flag),
        "masks": Masks(
            all_attention_mask=torch.cat([heard, said]),
            all_assistant_mask=torch.cat([torch.zeros_like(heard), said]),
            padded=flag,
        ),
        "log_probs": LogProbs(response=scored, full=torch.cat([unscored, scored]), padded=flag),
        "versions": TensorDict({"response": versions, "full": torch.cat([unknown, versions])}, batch_size=[]),
        "truncated": torch.tensor(generation.finish_reason != "stop"),
    }


def _texts(generations: Sequence[Generation], tokenizer: Any) -> Iterable[tuple[str, str]]:
    """Decode each response twice: with all its tokens, and as a message without the token that ends it."""
    ids = [list(one.token_ids) for one in generations]
    ended = [one[:-1] if kind.finish_reason == "stop" else one for one, kind in zip(ids, generations, strict=True)]
    decode = tokenizer.batch_decode
    return zip(decode(ids, skip_special_tokens=False), decode(ended, skip_special_tokens=False), strict=True)


def _words(prompts: Prompts, i: int, response: str, message: str) -> Info:
    """Return the text entries of prompt ``i``: strings, and messages in history mode."""
    prompt = prompts.text[i]
    made: Info = {"text": Text(prompt=prompt, response=response, full=prompt + response)}
    if prompts.history is not None:
        history, answer = prompts.history[i], lazy_stack([History(role="assistant", content=message)], 0)
        full = history.extend(answer, inplace=False, dim=0)
        made["history"] = ChatHistory(prompt=history, response=answer, full=full)
    return made


def _pad(values: Tensor, value: float, *, left: int = 0, right: int = 0) -> Tensor:
    return torch.nn.functional.pad(values, (left, right), value=value) if left or right else values
