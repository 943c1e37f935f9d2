"""`RemoteLLMPolicy`: a TorchRL policy whose tokens come from running engines over HTTP."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    lazy_stack,
    set_list_to_stack,
)
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, LogProbs, Masks, Text, Tokens

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.base.types import Info
from torchrl_ext.control.requests.client import InferenceClient
from torchrl_ext.control.requests.generation import UNKNOWN_VERSION, Generation
from torchrl_ext.rl.versions import TokenVersions

__all__ = ["RemoteLLMPolicy"]

_OUTPUTS = {
    "tokens": ["tokens", "masks", "log_probs"],
    "text": ["text", "tokens", "masks", "log_probs"],
    "history": ["history", "text", "tokens", "masks", "log_probs"],
}
_OURS = ["token_versions", "response_truncated"]
_SAMPLING = {
    "frequency_penalty",
    "ignore_eos",
    "max_tokens",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "stop_token_ids",
    "temperature",
    "top_k",
    "top_p",
}
_CONVERSATIONS = 1 << 16  # that are remembered


class RemoteLLMPolicy(TensorDictModuleBase):  # type: ignore[misc]  # tensordict has no types
    """Generates with vLLM, SGLang or embedded engines; a policy for `LLMCollector` with external engines.

    It reads prompts and writes answers where TorchRL's `vLLMWrapper` and `TransformersWrapper` do. For each sequence of
    P prompt tokens and R response tokens it writes

    * ``tokens``: `Tokens` with ``prompt`` (P), ``response`` (R) and ``full`` (P + R), int64;
    * ``masks``: `Masks` with ``all_attention_mask`` and ``all_assistant_mask`` (P + R), bool;
    * ``log_probs``: `LogProbs` with ``response`` (R) and ``full`` (P + R, NaN over the prompt), float32;
    * ``text`` in text and history modes, ``history`` in history mode;
    * ``token_versions``: `TokenVersions`, the weights that sampled each token, from the engine's ``weight_versions``;
    * ``response_truncated``, bool: the token limit ended the response, not the model. (If an engine aborts a response,
      it continues until one of the two ends it.)

    Sequences keep their lengths; `TensorDict.get` pads where a program needs it (``as_padded_tensor=True``). Several
    engines share the requests, see `InferenceClient`. Servers batch their requests, so this class does not; it is
    thread-safe.

    Args:
        model: addresses of engines or of a router, or an `InferenceClient`.
        tokenizer: a `transformers` tokenizer; optional only in tokens mode, where its padding token tells padding of
            prompts that come without ``("masks", "all_attention_mask")``.
        input_mode: ``"history"``, ``"text"`` or ``"tokens"``; prompts are under ``(input_mode, "prompt")``.
        generate_kwargs: sampling settings under vLLM's names, or TorchRL's ``max_new_tokens`` and ``do_sample``.
        num_samples: continuations per prompt, as a second dimension of the output; None for one, without a dimension.
        chat_template_name, chat_template: for history mode, as in `History.apply_chat_template`.
        seed: sequence k of this policy is sampled with ``seed + k``; None leaves it to the engine.
        version: returns the trainer's newest version, like ``lambda: sender.version``; picklable where the policy is.
            With it, engines reuse keys and values by version, as ``cache_versions`` of `InferenceClient.generate` says,
            and later turns of a conversation (history mode) keep the version of its first turn.
        run: names the run that numbers the engines' versions, for `TokenVersions.run`.
        timeout_s: deadline of one call, in seconds; None takes the client's.

    Raises:
        ConfigError: invalid settings.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.modules.llm.policies import Tokens
        >>> policy = tx.RemoteLLMPolicy(address, input_mode="tokens", generate_kwargs={"max_new_tokens": 4})
        >>> prompt = Tokens(prompt=torch.tensor([[1, 2, 3]]), batch_size=1)
        >>> answer = policy(TensorDict({"tokens": prompt}, batch_size=1))
        >>> answer["tokens", "response"].shape, answer["token_versions", "response"].tolist()
        (torch.Size([1, 4]), [[0, 0, 0, 0]])
    """

    def __init__(
        self,
        model: InferenceClient | str | Sequence[str],
        *,
        tokenizer: Any = None,
        input_mode: str = "history",
        generate_kwargs: Mapping[str, Any] | None = None,
        num_samples: int | None = None,
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        seed: int | None = None,
        version: Callable[[], int] | None = None,
        run: str = "",
        timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        if input_mode not in _OUTPUTS:
            raise ConfigError(f"input_mode must be one of {', '.join(_OUTPUTS)}, and it is {input_mode!r}")
        if tokenizer is None and input_mode != "tokens":
            raise ConfigError(f"input_mode {input_mode!r} needs a tokenizer", hint="pass tokenizer=")
        self._template = {"chat_template_name": chat_template_name, "chat_template": chat_template}
        self._given = {
            **{"tokenizer": tokenizer, "input_mode": input_mode, "num_samples": num_samples, **self._template},
            **{"generate_kwargs": generate_kwargs, "seed": seed, "version": version, "run": run},
            "timeout_s": timeout_s,
        }
        self._sampling, self._samples = _sampling(generate_kwargs or {}), num_samples
        if not isinstance(model, InferenceClient):
            model = InferenceClient(model)
        self.model, self.tokenizer, self.input_mode = model, tokenizer, input_mode
        self.in_keys: list[NestedKey] = [(input_mode, "prompt")]
        self.out_keys: list[NestedKey] = [*_OUTPUTS[input_mode], *_OURS]
        self._seed, self._newest, self._run, self._timeout_s = seed, version, run, timeout_s
        self._made, self._counting = 0, threading.Lock()
        self._first: dict[int, int] = {}  # version at the first turn, by what a conversation said until its last answer

    def __reduce__(self) -> tuple[Any, ...]:
        """Make a policy in another process that uses the same engines and counts its seeds from the start."""
        return functools.partial(type(self), self.model, **self._given), ()

    @set_list_to_stack(True)  # type: ignore[untyped-decorator]  # tensordict leaves it so
    def forward(self, tensordict: TensorDictBase, **sampling: Any) -> TensorDictBase:
        """Continue the prompts of ``tensordict``, and write the answers into it; with ``num_samples``, into a new one.

        Args:
            tensordict: any batch size; prompts under the input key.
            sampling: sampling settings that override the constructor's.

        Raises:
            ConfigError: the prompts are missing, or a sampling setting is invalid.
            EngineUnreachableError, EngineRefusedError: no engine took a prompt.
            DeadlineError: the engines did not answer in time.
        """
        if tensordict.ndim == 0:
            return self.forward(lazy_stack([tensordict]), **sampling)[0]
        if tensordict.ndim > 1:
            out = self.forward(tensordict.reshape(-1), **sampling)
            return out.view(*tensordict.shape, *out.shape[1:])
        found = self._answered(tensordict, {**self._sampling, **_sampling(sampling)})
        if tensordict.device:
            found = found.to(tensordict.device)
        if self._samples is not None:
            return found
        return tensordict.exclude(*self.out_keys, inplace=True).update(found, keys_to_update=self.out_keys)

    def _answered(self, tensordict: TensorDictBase, sampling: Info) -> LazyStackedTensorDict:
        prompts, each = self._prompts(tensordict), self._samples or 1
        count = len(prompts.tokens) * each
        if self._seed is not None:
            with self._counting:
                sampling["seed"], self._made = self._seed + self._made, self._made + count
        versions = None if self._newest is None else self._first_versions(prompts, self._newest())
        found = self.model.generate(
            prompts.tokens, n=each, cache_versions=versions, timeout_s=self._timeout_s, **sampling
        )
        rows = [self._row(prompts, i // each, generation) for i, generation in enumerate(found)]
        if versions is not None and prompts.history is not None:
            self._remember([row["history"].full for row in rows], [one for one in versions for _ in range(each)])
        if self._samples is None:
            return lazy_stack(rows, 0)
        return lazy_stack([lazy_stack(rows[i : i + each], 0) for i in range(0, count, each)], 0)

    def _prompts(self, tensordict: TensorDictBase) -> Prompts:
        """Find the prompts in a batch of shape (B,), and tokenize them."""
        (key,) = self.in_keys
        if key not in tensordict.keys(include_nested=True):
            raise ConfigError(
                f"there is no {key!r} in the input of {self.input_mode} mode",
                expected=f"one of its keys {list(tensordict.keys(include_nested=True, leaves_only=True))}",
            )
        if self.input_mode == "tokens":
            return Prompts(tokens=self._without_padding(tensordict))
        value = tensordict.get(key)
        if self.input_mode == "text":
            several = value.tolist() if isinstance(value, NonTensorStack) else value
            text = [value] * len(tensordict) if isinstance(value, str) else list(several)
            return Prompts(tokens=self.tokenizer(text)["input_ids"], text=text)
        if not isinstance(value, History):
            raise ConfigError(
                f"the input has a {type(value).__name__} under {key!r}",
                expected="a History",
                hint="make one with torchrl.data.llm.History.from_chats",
            )
        template: Info = {"tokenizer": self.tokenizer, "add_generation_prompt": True, **self._template}
        made = value.apply_chat_template(**template, tokenize=True, return_dict=True)
        text = value.apply_chat_template(**template)
        return Prompts(tokens=made.get("input_ids", as_list=True), text=text, history=value)

    def _without_padding(self, tensordict: TensorDictBase) -> list[Tensor]:
        given = _rows(tensordict, self.in_keys[0])
        masks = _rows(tensordict, ("masks", "all_attention_mask"))
        if [mask.shape for mask in masks] == [ids.shape for ids in given]:  # it may be an earlier turn's
            return [ids[mask.bool()] for ids, mask in zip(given, masks, strict=True)]
        if self.tokenizer is None:
            return given
        padding = self.tokenizer.pad_token_id
        padding = self.tokenizer.eos_token_id if padding is None else padding
        return [_unpadded(ids, padding) for ids in given]

    def _row(self, prompts: Prompts, i: int, generation: Generation) -> TensorDict:
        """Return the entries of one continuation of prompt ``i``."""
        prompt, response = (torch.as_tensor(ids).cpu().long() for ids in (prompts.tokens[i], generation.token_ids))
        scored = torch.tensor(generation.logprobs, dtype=torch.float32)
        versions = torch.tensor(generation.token_versions(), dtype=torch.long)
        said = torch.cat([torch.zeros_like(prompt), torch.ones_like(response)]).bool()
        # NaN over the prompt, as in TorchRL: 0 would mean probability 1
        unscored, unknown = (torch.full(prompt.shape, value) for value in (torch.nan, UNKNOWN_VERSION))
        ragged, full = MetaData(False), torch.cat([prompt, response])
        row: Info = {
            "tokens": Tokens(prompt=prompt, response=response, full=full, padded=ragged),
            "masks": Masks(all_attention_mask=torch.ones_like(said), all_assistant_mask=said, padded=ragged),
            "log_probs": LogProbs(response=scored, full=torch.cat([unscored, scored]), padded=ragged),
            "token_versions": TokenVersions(
                response=versions, full=torch.cat([unknown, versions]), run=MetaData(self._run)
            ),
            "response_truncated": torch.tensor(generation.finish_reason != "stop"),
        }
        if prompts.text:
            before, after = prompts.text[i], self._text(generation.token_ids)
            row["text"] = Text(prompt=before, response=after, full=before + after)
        if prompts.history is not None:
            ended = generation.finish_reason == "stop"  # the token that ended it is no part of the message
            message = self._text(generation.token_ids[:-1] if ended else generation.token_ids)
            history, answer = prompts.history[i], lazy_stack([History(role="assistant", content=message)], 0)
            whole = history.extend(answer, inplace=False, dim=0)
            row["history"] = ChatHistory(prompt=history, response=answer, full=whole)
        return TensorDict(row, batch_size=[])

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def _first_versions(self, prompts: Prompts, newest: int) -> list[int]:
        """Return the version at the first turn of each prompt's conversation; ``newest`` where it begins now."""
        if prompts.history is None:
            return [newest] * len(prompts.tokens)
        return [self._first.get(_said(history), newest) for history in prompts.history.unbind(0)]

    def _remember(self, histories: Iterable[Any], versions: Iterable[int]) -> None:
        with self._counting:
            for said, version in zip(map(_said, histories), versions, strict=True):
                self._first[said] = max(version, self._first.pop(said, version))  # two conversations may say the same
            while len(self._first) > _CONVERSATIONS:
                del self._first[next(iter(self._first))]


class Prompts(NamedTuple):
    """B prompts: token ids without padding; text but in tokens mode; a `History` (B, turns) in history mode."""

    tokens: Sequence[Any]
    text: Sequence[str] = ()
    history: Any = None


def _sampling(given: Mapping[str, Any]) -> Info:
    """Return the arguments of `InferenceClient.generate` for sampling settings."""
    found = {"max_tokens" if name == "max_new_tokens" else name: value for name, value in given.items()}
    if found.pop("do_sample", True) is False:
        found["temperature"] = 0.0
    if unknown := sorted(found.keys() - _SAMPLING):
        raise ConfigError(
            f"engines know no sampling setting {', '.join(unknown)} over token ids",
            expected=f"max_new_tokens, do_sample, or some of {', '.join(sorted(_SAMPLING))}",
            hint="use num_samples= for n, and stop_token_ids instead of stop strings",
        )
    return {name: value for name, value in found.items() if value is not None}


def _rows(tensordict: TensorDictBase, key: NestedKey) -> list[Tensor]:
    """Return the tensors of a batch under a key, one per sequence; none if some have no value."""
    if key not in tensordict.keys(include_nested=True):
        return []
    found = [row.get(key) for row in tensordict.unbind(0)]
    return [] if any(value is None for value in found) else found


def _unpadded(ids: Tensor, padding: int) -> Tensor:
    """Drop padding on the left, where TorchRL pads prompts; further on it is a token, such as the end of a turn."""
    kept = (ids != padding).nonzero()
    return ids[int(kept[0]) :] if len(kept) else ids[:0]


def _said(history: Any) -> int:
    """Return a hash of a conversation's messages up to its last answer; before the first answer, of none."""
    messages = [(str(one.role), str(one.content)) for one in history.unbind(0)]
    answers = [i for i, (role, _) in enumerate(messages, start=1) if role == "assistant"]
    return hash(tuple(messages[: answers[-1]])) if answers else hash(())
