"""`RemoteLLMPolicy`: a TorchRL policy whose tokens come from running engines over HTTP."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, lazy_stack, set_list_to_stack
from tensordict.utils import NestedKey
from torchrl.modules.llm.policies import LLMWrapperBase

from torchrl_ext.errors import ConfigError
from torchrl_ext.rollout.client import InferenceClient
from torchrl_ext.rollout.lag import Pacer
from torchrl_ext.rollout.records import PromptReader, RecordWriter
from torchrl_ext.rollout.sampling import sampling_settings

__all__ = ["RemoteLLMPolicy"]


class RemoteLLMPolicy(LLMWrapperBase):
    """Generates with vLLM, SGLang or embedded engines; the policy of an `LLMCollector` with external engines.

    Takes and gives what TorchRL's own wrappers do, key by key (`vLLMWrapper`, `TransformersWrapper`): per sequence of a
    prompt of P and a response of R tokens

    * ``tokens``: `Tokens` with ``prompt`` (P), ``response`` (R) and ``full`` (P + R), int64;
    * ``masks``: `Masks` with ``all_attention_mask`` and ``all_assistant_mask`` (P + R), bool;
    * ``log_probs``: `LogProbs` with ``response`` (R) and ``full`` (P + R, NaN over the prompt), float32;
    * ``text`` in text and history modes, ``history`` in history mode;

    and, beside its ``out_keys``, which are those of the wrappers in their order,

    * ``token_versions``, ours: ``response`` (R) and ``full`` (P + R), int64: the version of the weights that sampled
      each token, from the engine's ``weight_versions``; 0 for the weights an engine started with, -1 over the prompt,
      over padding and where an engine does not say;
    * ``response_truncated``, ours: bool: the token limit ended the response, and the model did not. (What an engine
      aborted has gone on until one of the two.)

    Several engines share the work, see `InferenceClient`. Servers batch by themselves, so this class does not:
    it may be called from many threads at once.

    Args:
        model: addresses of engines, or an `InferenceClient`.
        tokenizer: of `transformers`, or the directory of one; only tokens mode without padding works without.
        input_mode: ``"history"``, ``"text"`` or ``"tokens"``.
        input_key: where the prompts are; by default ``(input_mode, "prompt")``.
        attention_mask_key: a mask of prompts in tokens mode, next to TorchRL's ``("masks", "all_attention_mask")``.
        generate: must be True: engines are asked for tokens, and the trainer's model for log-probabilities of given
            ones.
        generate_kwargs: TorchRL's common names (``max_new_tokens``, ``temperature``, ``do_sample``, ``top_p``...),
            vLLM's, and ``stop_token_ids``.
        tokenizer_kwargs: for the tokenizer, in text mode.
        pad_output: bring prompts (left) and responses (right) to one length.
        inplace: as in TorchRL: True writes into the input, False returns new entries only, ``"empty"`` an emptied
            copy of the input. By default True, and False with several samples.
        device: where outputs go; None leaves them where the input is.
        num_samples: continuations per prompt, as a second dimension.
        chat_template_name, chat_template: for history mode.
        return_log_probs: whether to ask for log-probabilities.
        history_key, text_key, tokens_key, masks_key, log_probs_key, versions_key, truncated_key: names of the outputs.
        batching, min_batch_size, max_batch_size, batching_timeout: as TorchRL's wrappers take and check them; without
            effect, since servers batch what is in work.
        prefer_tokens: history mode takes tokens that the input has already in place of the template's.
        seed: sequence k of this policy's life is sampled with ``seed + k``; None leaves it to the engines.
        pacer: makes each call wait while rollouts are too far ahead of training.
        timeout_s: deadline of one call, in seconds; None takes the client's.

    Raises:
        ConfigError: settings that cannot work.
    """

    def __init__(
        self,
        model: InferenceClient | str | Sequence[str],
        *,
        tokenizer: Any = None,
        input_mode: str = "history",
        input_key: NestedKey | None = None,
        attention_mask_key: str = "attention_mask",
        generate: bool = True,
        generate_kwargs: Mapping[str, Any] | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        pad_output: bool = False,
        inplace: bool | str | None = None,
        device: torch.device | None = None,
        num_samples: int | None = None,
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        return_log_probs: bool | None = None,
        history_key: NestedKey = "history",
        text_key: NestedKey = "text",
        tokens_key: NestedKey = "tokens",
        masks_key: NestedKey = "masks",
        log_probs_key: NestedKey = "log_probs",
        versions_key: NestedKey = "token_versions",
        truncated_key: NestedKey = "response_truncated",
        batching: bool | None = None,
        min_batch_size: int | None = None,
        max_batch_size: int | None = None,
        batching_timeout: float = 10.0,
        prefer_tokens: bool = False,
        seed: int | None = None,
        pacer: Pacer | None = None,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        self._settings = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        if not generate:
            raise ConfigError(
                "a remote policy generates only"
                + ("; and return_log_probs must be True where a wrapper does not" if return_log_probs is False else ""),
                hint="score given tokens with TransformersWrapper(model, generate=False) on the trainer's model",
            )
        if isinstance(tokenizer, str):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        client = model if isinstance(model, InferenceClient) else InferenceClient.connect(*_listed(model))
        self.model, self.tokenizer = client, tokenizer
        self.generate, self.input_mode, self.pad_output = generate, input_mode, pad_output
        self.return_log_probs = return_log_probs is not False
        self.history_key, self.text_key, self.tokens_key = history_key, text_key, tokens_key
        self.masks_key, self.log_probs_key, self.versions_key = masks_key, log_probs_key, versions_key
        self.padding_value = _padding_value(tokenizer, pad_output)
        self.input_key = input_key if input_key is not None else (input_mode, "prompt")
        self.layout, self._device = None, device
        self._min_batch_size, self._max_batch_size = _batch_sizes(batching, min_batch_size, max_batch_size)
        self._batching_timeout, self._batching_lock = batching_timeout, threading.Lock()
        self._batch_queue, self._futures = [], []  # always empty: TorchRL's queue is for engines that do not batch
        self.generate_kwargs = dict(generate_kwargs or {})
        sampling, samples = sampling_settings(self._standardize_generate_kwargs(self.generate_kwargs), num_samples)
        self._sampling, self.num_samples = sampling, samples
        if samples is not None and inplace in (True, "empty"):
            raise ConfigError(f"inplace={inplace!r} cannot hold several samples per prompt", expected="False or None")
        self.inplace = inplace if inplace is not None else samples is None
        self.return_tokens = self.return_masks = True
        self.return_text, self.return_history = input_mode in ("text", "history"), input_mode == "history"
        self.prefer_tokens = prefer_tokens
        keys = {"text": text_key} if self.return_text else {}
        keys |= {"masks": masks_key, "tokens": tokens_key}
        keys |= {"log_probs": log_probs_key} if self.return_log_probs else {}
        keys |= {"history": history_key} if self.return_history else {}
        ours = {"versions": versions_key, "truncated": truncated_key}
        template = {"chat_template_name": chat_template_name, "chat_template": chat_template}
        self._read = PromptReader(
            input_mode,
            self.input_key,
            tokenizer=tokenizer,
            padding_value=self.padding_value,
            template={name: value for name, value in template.items() if value is not None},
            tokenizer_kwargs=tokenizer_kwargs or {},
            tokens_key=tokens_key,
            attention_mask_keys=[(masks_key, "all_attention_mask"), attention_mask_key],
            prefer_tokens=prefer_tokens,
        )
        settings = {"tokenizer": tokenizer, "pad_output": pad_output, "padding_value": self.padding_value}
        self._write = RecordWriter(keys | ours, **settings)
        self.in_keys, self.out_keys = [self.input_key], list(keys.values())
        self._written = list((keys | ours).values())
        self._seed, self._pacer, self._timeout_s = seed, pacer, timeout_s
        self._made, self._counting = 0, threading.Lock()

    @property
    def sampling_params(self) -> SimpleNamespace:
        """What engines are asked for, under vLLM's names; ``n`` continuations per prompt."""
        return SimpleNamespace(n=self.num_samples or 1, **self._sampling)

    def get_new_version(self, **kwargs: Any) -> RemoteLLMPolicy:
        """A policy with other settings on the same engines."""
        return type(self)(**{**self._settings, "model": self.model, **kwargs})

    def __reduce__(self) -> tuple[Any, ...]:
        """A policy in another process asks the same engines, and counts its seeds from the start."""
        return functools.partial(type(self), **{**self._settings, "model": self.model}), ()

    @set_list_to_stack(True)
    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        tensordict_out: TensorDictBase | None = None,
        logits_only: bool = False,
        **kwargs: Any,
    ) -> TensorDictBase:
        """Continue the prompts of ``tensordict``.

        Args:
            tensordict: any batch size; prompts under the input key.
            tensordict_out: where to write; decided by ``inplace`` if omitted.
            logits_only: must be False; engines give none.
            kwargs: sampling settings in place of those of the constructor.

        Raises:
            ConfigError: no prompt where it should be.
            EngineUnreachableError, EngineRefusedError: no engine took a prompt.
            DeadlineError: the engines did not answer in time, or the pacer did not let the call go on.
        """
        if logits_only:
            raise ConfigError("engines give tokens and their log-probabilities, no logits")
        if tensordict.ndim == 0:
            return self.forward(lazy_stack([tensordict]), **kwargs)[0]
        if tensordict.ndim > 1:
            out = self.forward(tensordict.reshape(-1), **kwargs)
            return out.view(*tensordict.shape, *out.shape[1:])
        source = tensordict if isinstance(tensordict, LazyStackedTensorDict) else tensordict.to_lazystack(0)
        found = self._generate(source.copy().clear_device_() if source.device else source, kwargs)
        if self._device or tensordict.device:
            found = found.to(self._device or tensordict.device)
        if tensordict_out is None and self.inplace is False:
            return found
        target = tensordict_out
        if target is None:
            target = tensordict.empty() if self.inplace == "empty" else tensordict
        return target.exclude(*self._written, inplace=True).update(found, keys_to_update=self._written)

    def _generate(self, tensordict: LazyStackedTensorDict, changes: Mapping[str, Any]) -> LazyStackedTensorDict:
        prompts = self._read(tensordict)
        sampling, samples = self._sampling, self.num_samples
        if changes:
            standard = self._standardize_generate_kwargs({**self.generate_kwargs, **changes})
            sampling, samples = sampling_settings(standard, self.num_samples)
        count = len(prompts.tokens) * (samples or 1)
        seed = self._next_seed(count)
        with nullcontext() if self._pacer is None else self._pacer.admitted(count):
            generations = self.model.generate(
                prompts.tokens,
                n=samples or 1,
                logprobs=self.return_log_probs,
                timeout_s=self._timeout_s,
                **({"seed": seed} if seed is not None else {}),
                **sampling,
            )
        return self._write(prompts, generations, samples)

    def _next_seed(self, count: int) -> int | None:
        if self._seed is None:
            return None
        with self._counting:
            seed, self._made = self._seed + self._made, self._made + count
        return seed


def _listed(model: str | Sequence[str]) -> list[str]:
    return [model] if isinstance(model, str) else list(model)


def _batch_sizes(batching: bool | None, least: int | None, most: int | None) -> tuple[int | None, int | None]:
    """TorchRL's rules for the two sizes."""
    if batching is False and (least, most) != (None, None):
        raise ConfigError(f"batching is False, and min_batch_size is {least}, max_batch_size {most}", expected="None")
    if least is not None and most is not None and least > most:
        raise ConfigError(f"min_batch_size ({least}) must be <= max_batch_size ({most})")
    return 1 if batching and least is None else least, most


def _padding_value(tokenizer: Any, pad_output: bool) -> int | None:
    if tokenizer is None:
        if pad_output:
            raise ConfigError("pad_output needs a tokenizer, which knows the padding token", hint="pass tokenizer=")
        return None
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
