"""Requests and answers of `/inference/v1/generate`, as vLLM 0.32 writes them (`vllm.entrypoints.scale_out`)."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_ext.errors import ConfigError
from torchrl_ext.types import Info

__all__ = ["GenerateRequest", "Output", "Sampling", "TokenLogprobs", "answer", "is_token"]

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
    """One value of ``sampling_params``, None aside."""
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
"""Of each setting: its type, the rule that its values obey, and the rule in words."""


def is_token(value: Any) -> bool:
    """Whether a JSON value could be a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One prompt, as token ids."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling

    @classmethod
    def from_json(cls, body: Any, default_id: str) -> GenerateRequest:
        """Read the body of a request.

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


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position: the sampled token's, its rank (1 is best), and the best candidates'."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()

    def to_json(self, asked: int) -> Info:
        """The entry of ``logprobs.content``; candidates start with the sampled token and are ``asked`` in all."""
        entries = [(self.token_id, self.logprob, self.rank)]
        entries += [(token, value, i + 1) for i, (token, value) in enumerate(self.top) if token != self.token_id]
        rows = [_entry(*entry) for entry in entries]
        return rows[0] | {"top_logprobs": rows[: max(asked, 1)]}


def _entry(token_id: int, logprob: float, rank: int) -> Info:
    return {"token_id": token_id, "logprob": max(logprob, -9999.0), "rank": rank}  # JSON has no -inf


@dataclass(frozen=True, kw_only=True)
class Output:
    """One finished sequence.

    Attributes:
        token_ids: new tokens only.
        logprobs: one entry per token, or None where none were asked for.
        finish_reason: ``"stop"``, ``"length"`` or ``"abort"``.
        stop_reason: the stop token of the request that ended it; None for end of sequence, length and abort.
        versions: `(weight version, first token)` wherever the version changed.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: str
    stop_reason: int | None = None
    versions: tuple[tuple[str, int], ...] = ()

    def spans(self) -> list[Info]:
        """Contiguous ``{version, start, end}`` over the output's tokens."""
        ends = [start for _, start in self.versions[1:]] + [len(self.token_ids)]
        return [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(self.versions, ends, strict=True)
        ]

    def to_json(self, asked: int | None) -> Info:
        """The output as an entry of ``choices``."""
        content = None if self.logprobs is None else [entry.to_json(asked or 0) for entry in self.logprobs]
        return {
            "index": self.index,
            "token_ids": list(self.token_ids),
            "logprobs": None if content is None else {"content": content},
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "weight_versions": self.spans(),
        }


def answer(request: GenerateRequest, outputs: Sequence[Output], model: str) -> Info:
    """The body of a response."""
    new = sum(len(output.token_ids) for output in outputs)
    return {
        "request_id": request.request_id,
        "created": int(time.time()),
        "model": model,
        "output_mode": "tokens",
        "choices": [output.to_json(request.sampling.logprobs) for output in outputs],
        "usage": {
            "prompt_tokens": len(request.token_ids),
            "completion_tokens": new,
            "total_tokens": len(request.token_ids) + new,
        },
    }
