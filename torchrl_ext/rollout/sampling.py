"""TorchRL's generation settings as `InferenceClient.generate` takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_ext.errors import ConfigError

__all__ = ["sampling_settings"]

_RENAMED = {"max_new_tokens": "max_tokens"}
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


def sampling_settings(given: Mapping[str, Any], num_samples: int | None) -> tuple[dict[str, Any], int | None]:
    """Translate standardised settings.

    Args:
        given: what `LLMWrapperBase` makes of ``generate_kwargs``.
        num_samples: continuations per prompt, where the policy was told.

    Returns:
        Arguments of `InferenceClient.generate`, and the number of continuations per prompt; None for one, without a
        dimension of its own.

    Raises:
        ConfigError: a setting that engines cannot honour over token ids, or two numbers of samples.
    """
    settings = {_RENAMED.get(name, name): value for name, value in given.items()}
    returned = settings.pop("num_return_sequences", None)
    if returned not in (None, 1) and num_samples not in (None, returned):
        raise ConfigError(
            f"num_samples is {num_samples}, and generate_kwargs ask for {returned}", expected="one number"
        )
    samples = returned if num_samples is None and returned not in (None, 1) else num_samples
    if settings.get("do_sample") is False:
        settings["temperature"] = 0.0
    for name, value in _ONLY.items():
        if settings.pop(name, value) != value:
            raise ConfigError(f"{name} is not for engines that sample", expected=f"{name}={value}")
    unknown = sorted(set(settings) - _PASSED - _WITHOUT_EFFECT)
    if unknown:
        raise ConfigError(
            f"generate_kwargs has {', '.join(unknown)}, which engines cannot honour over token ids",
            expected=f"some of {', '.join(sorted(_PASSED))}",
            hint="end on tokens with stop_token_ids in place of stop strings" if "stop_sequences" in unknown else None,
        )
    return {name: value for name, value in settings.items() if name in _PASSED and value is not None}, samples
