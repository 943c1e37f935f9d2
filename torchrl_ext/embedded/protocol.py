"""Requests to `/inference/v1/generate`, as vLLM 0.32 reads them (`vllm.entrypoints.scale_out`)."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchrl_ext.errors import ConfigError

__all__ = ["GenerateRequest", "Sampling", "is_token"]

_WITHOUT_EFFECT = {  # about text, which this engine never makes
    "detokenize",
    "include_stop_str_in_output",
    "output_kind",
    "skip_reading_prefix_cache",
    "skip_special_tokens",
    "spaces_between_special_tokens",
}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are picked: the part of vLLM's `SamplingParams` that this engine has, with its names and defaults.

    Attributes:
        n: sequences per prompt; sequence i uses ``seed + i``.
        max_tokens: most new tokens per sequence; None means what the context allows.
        min_tokens: no end of sequence before so many tokens.
        temperature: 0 takes the most probable token; so does what is below 1e-5, as in vLLM.
        top_p, top_k, min_p: restrict the candidates; 1.0, 0 (or -1) and 0.0 do not.
        seed: of a generator of its own; None draws from the engine's.
        logprobs: None for none; 0 for the sampled token's; k adds the k most probable tokens' (of the raw model
            distribution, before temperature).
        stop_token_ids: end after one of these.
        ignore_eos: go on after the model's own end of sequence.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @classmethod
    def from_json(cls, body: Any) -> Sampling:
        """Read ``sampling_params``.

        Raises:
            ConfigError: a value out of range, or a setting that would change the output and is not supported.
        """
        if not isinstance(body, Mapping):
            raise ConfigError(f"sampling_params is a {type(body).__name__}", expected="an object")
        names = {field.name for field in dataclasses.fields(cls)}
        unknown = [key for key, value in body.items() if key not in names | _WITHOUT_EFFECT and value]
        if unknown:
            raise ConfigError(
                f"sampling_params.{unknown[0]} is not supported by the embedded engine",
                expected=f"some of {', '.join(sorted(names))}",
            )
        given = {key: value for key, value in body.items() if key in names and value is not None}
        for name, value in given.items():
            _check(name, value)
        if "stop_token_ids" in given:
            given["stop_token_ids"] = tuple(given["stop_token_ids"])
        return cls(**given)


def _check(name: str, value: Any) -> None:
    """Refuse a value of ``sampling_params`` that breaks its rule in `_RULES`; None never comes here."""
    kinds, rule, expected = _RULES[name]
    if isinstance(value, bool) is not (kinds is bool) or not isinstance(value, kinds):
        raise ConfigError(f"sampling_params.{name} is of the wrong type: {value!r:.80}", expected=expected)
    if not rule(value):
        raise ConfigError(f"sampling_params.{name} cannot be {value!r:.80}", expected=expected)


_MOST_SEQUENCES = 16_384  # as vLLM's VLLM_MAX_N_SEQUENCES
_MOST = 2**31 - 1
_RULES: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "n": (int, lambda value: 1 <= value <= _MOST_SEQUENCES, f"1 to {_MOST_SEQUENCES}"),
    "max_tokens": (int, lambda value: 1 <= value <= _MOST, "a whole number from 1"),
    "min_tokens": (int, lambda value: 0 <= value <= _MOST, "a whole number from 0"),
    "temperature": ((int, float), lambda value: 0 <= value <= sys.float_info.max, "a finite number from 0"),
    "top_p": ((int, float), lambda value: 0 < value <= 1, "above 0, at most 1"),
    "top_k": (int, lambda value: -1 <= value <= _MOST, "a whole number from -1"),
    "min_p": ((int, float), lambda value: 0 <= value <= 1, "0 to 1"),
    "seed": (int, lambda value: True, "a whole number"),
    "logprobs": (int, lambda value: 0 <= value <= _MOST, "a whole number from 0"),
    "stop_token_ids": (list, lambda value: all(map(is_token, value)), "a list of token ids >= 0"),
    "ignore_eos": (bool, lambda value: True, "true or false"),
}
"""The type of each setting, the rule that its values obey, and the rule in words."""


def is_token(value: Any) -> bool:
    """Return whether a JSON value could be a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """A request to continue one prompt of token ids."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling

    @classmethod
    def from_json(cls, body: Any, default_id: str) -> GenerateRequest:
        """Read a request from the JSON of its body.

        Raises:
            ConfigError: it is not one that this engine can serve.
        """
        if not isinstance(body, Mapping):
            raise ConfigError(f"the body is a {type(body).__name__}", expected="an object")
        ids = body.get("token_ids")
        if not isinstance(ids, list) or not ids or not all(map(is_token, ids)):
            raise ConfigError(f"token_ids is {ids!r:.80}", expected="a list of at least one token id >= 0")
        if body.get("stream"):
            raise ConfigError("the embedded engine does not stream", expected="stream=false")
        if body.get("output_mode", "tokens") != "tokens":
            raise ConfigError(f"output_mode is {body['output_mode']!r}", expected="'tokens'")
        if "sampling_params" not in body:
            raise ConfigError("sampling_params is missing")
        sampling = Sampling.from_json(body["sampling_params"])
        return cls(request_id=str(body.get("request_id") or default_id), token_ids=tuple(ids), sampling=sampling)
