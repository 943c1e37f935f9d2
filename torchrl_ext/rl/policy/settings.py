"""Check the settings of TorchRL's LLM wrappers, and translate sampling settings for `InferenceClient.generate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict.utils import NestedKey

from torchrl_ext.base.errors import ConfigError

__all__ = ["WrapperSettings", "sampling_settings"]

_PASSED = {
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
_WITHOUT_EFFECT = {"detokenize", "do_sample", "include_stop_str_in_output", "logprobs", "skip_special_tokens"}
_ONLY = {"num_beams": 1, "length_penalty": 1.0, "early_stopping": False}
_MODES = ("history", "text", "tokens")


@dataclass(kw_only=True)
class WrapperSettings:
    """The settings that `RemoteLLMPolicy` shares with `vLLMWrapper`, under TorchRL's names and with its defaults.

    Attributes:
        tokenizer: a `transformers` tokenizer, or its directory; optional only in tokens mode without padding.
        input_mode: ``"history"``, ``"text"`` or ``"tokens"``.
        input_key: key of the prompts; by default ``(input_mode, "prompt")``.
        attention_mask_key: mask of prompts in tokens mode, if TorchRL's ``("masks", "all_attention_mask")`` is absent.
        generate: must be True: engines generate, and the trainer's model scores given tokens.
        generate_kwargs: TorchRL's common names (``max_new_tokens``, ``temperature``, ``do_sample``, ``top_p``...),
            vLLM's, and ``stop_token_ids``.
        tokenizer_kwargs: arguments of the tokenizer in text mode.
        pad_output: pad prompts (left) and responses (right) to one length each.
        inplace: as in TorchRL: True writes into the input, False returns only new entries, ``"empty"`` an emptied
            copy of the input. By default True, or False if outputs have a dimension for samples.
        device: device of the outputs; None keeps the input's.
        num_samples: continuations per prompt, as a second dimension.
        chat_template_name, chat_template: for history mode.
        return_log_probs: whether to return log-probabilities; None means True.
        history_key, text_key, tokens_key, masks_key, log_probs_key: keys of the outputs.
        prefer_tokens: in history mode, use tokens that the input already has instead of applying the template.

    Raises:
        ConfigError: invalid settings.
    """

    tokenizer: Any = None
    input_mode: str = "history"
    input_key: NestedKey | None = None
    attention_mask_key: str = "attention_mask"
    generate: bool = True
    generate_kwargs: Mapping[str, Any] | None = None
    tokenizer_kwargs: Mapping[str, Any] | None = None
    pad_output: bool = False
    inplace: bool | str | None = None
    device: torch.device | None = None
    num_samples: int | None = None
    chat_template_name: str | None = None
    chat_template: str | None = None
    return_log_probs: bool | None = None
    history_key: NestedKey = "history"
    text_key: NestedKey = "text"
    tokens_key: NestedKey = "tokens"
    masks_key: NestedKey = "masks"
    log_probs_key: NestedKey = "log_probs"
    prefer_tokens: bool = False

    def __post_init__(self) -> None:
        if not self.generate:
            scored = "; and return_log_probs must be True where a wrapper does not"
            raise ConfigError(
                f"a remote policy generates only{scored if self.return_log_probs is False else ''}",
                hint="score given tokens with TransformersWrapper(model, generate=False) on the trainer's model",
            )
        if self.input_mode not in _MODES:
            raise ConfigError(f"input_mode must be one of {', '.join(_MODES)}, and it is {self.input_mode!r}")
        if isinstance(self.tokenizer, str):
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        if self.tokenizer is None and (self.pad_output or self.input_mode != "tokens"):
            what = "pad_output, for the padding token," if self.pad_output else f"input_mode {self.input_mode!r}"
            raise ConfigError(f"{what} needs a tokenizer", hint="pass tokenizer=")
        if self.input_key is None:
            self.input_key = (self.input_mode, "prompt")

    @property
    def padding_value(self) -> int | None:
        """The padding token id; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        pad = self.tokenizer.pad_token_id
        return self.tokenizer.eos_token_id if pad is None else pad

    @property
    def keys(self) -> dict[str, NestedKey]:
        """The keys of the outputs by name (``tokens``, ``masks``, ...), in TorchRL's order."""
        keys = {"text": self.text_key} if self.input_mode != "tokens" else {}
        keys |= {"masks": self.masks_key, "tokens": self.tokens_key}
        keys |= {"log_probs": self.log_probs_key} if self.return_log_probs is not False else {}
        return keys | ({"history": self.history_key} if self.input_mode == "history" else {})


def sampling_settings(given: Mapping[str, Any], num_samples: int | None) -> tuple[dict[str, Any], int | None]:
    """Translate TorchRL's standardised generation settings.

    Args:
        given: ``generate_kwargs`` as `LLMWrapperBase` standardises them.
        num_samples: continuations per prompt from the policy's settings; None if they set none.

    Returns:
        Arguments of `InferenceClient.generate`, and continuations per prompt; None for one without its own dimension.

    Raises:
        ConfigError: a setting that engines cannot honour over token ids, or two numbers of samples.
    """
    settings = {"max_tokens" if name == "max_new_tokens" else name: value for name, value in given.items()}
    returned = settings.pop("num_return_sequences", None)
    if returned not in (None, 1) and num_samples not in (None, returned):
        what = f"num_samples is {num_samples}, and generate_kwargs ask for {returned}"
        raise ConfigError(what, expected="one number")
    samples = returned if num_samples is None and returned != 1 else num_samples
    if settings.get("do_sample") is False:
        settings["temperature"] = 0.0
    for name, value in _ONLY.items():
        if settings.pop(name, value) != value:
            raise ConfigError(f"{name} does not apply to engines that sample", expected=f"{name}={value}")
    unknown = sorted(set(settings) - _PASSED - _WITHOUT_EFFECT)
    if unknown:
        raise ConfigError(
            f"generate_kwargs has {', '.join(unknown)}, which engines cannot honour over token ids",
            expected=f"some of {', '.join(sorted(_PASSED))}",
            hint="use stop_token_ids instead of stop strings" if "stop_sequences" in unknown else None,
        )
    return {name: value for name, value in settings.items() if name in _PASSED and value is not None}, samples
