"""Requests to `/inference/v1/generate`, as vLLM 0.32 reads them (`vllm.entrypoints.scale_out`)."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from torchrl_ext.errors import ConfigError
from torchrl_ext.types import Info, decoded

__all__ = ["GenerateRequest", "Sampling", "Token"]

_WITHOUT_EFFECT = {  # about text, which this engine never makes
    "detokenize",
    "include_stop_str_in_output",
    "output_kind",
    "skip_reading_prefix_cache",
    "skip_special_tokens",
    "spaces_between_special_tokens",
}

Token = Annotated[int, Meta(ge=0)]
"""A token id."""

_Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Sampling(Struct, frozen=True, kw_only=True):
    """How tokens are picked: the part of vLLM's `SamplingParams` that this engine has, with its names and defaults.

    Attributes:
        n: sequences per prompt, at most as many as vLLM's VLLM_MAX_N_SEQUENCES; sequence i uses ``seed + i``.
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

    n: Annotated[int, Meta(ge=1, le=16_384)] = 1
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    min_tokens: _Count = 0
    temperature: Annotated[float, Meta(ge=0, le=sys.float_info.max)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: int | None = None
    logprobs: _Count | None = None
    stop_token_ids: tuple[Token, ...] = ()
    ignore_eos: bool = False


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """A request to continue one prompt of token ids."""

    request_id: str
    token_ids: Annotated[tuple[Token, ...], Meta(min_length=1)]
    sampling: Sampling = field(name="sampling_params")
    output_mode: Literal["tokens"] = "tokens"

    @classmethod
    def from_json(cls, body: Any, default_id: str) -> GenerateRequest:
        """Read a request from the JSON of its body.

        Raises:
            ConfigError: a field is missing or out of range, or would change the output and is not supported.
        """
        fields = decoded(body, Info, "the body")
        if fields.get("stream"):
            raise ConfigError("the embedded engine does not stream", expected="stream=false")
        sampling = fields.get("sampling_params")
        if isinstance(sampling, dict):
            names = set(Sampling.__struct_fields__)
            for name, value in sampling.items():
                if value and name not in names | _WITHOUT_EFFECT:
                    raise ConfigError(
                        f"sampling_params.{name} is not supported by the embedded engine",
                        expected=f"some of {', '.join(sorted(names))}",
                    )
            fields["sampling_params"] = {name: value for name, value in sampling.items() if value is not None}
        fields["request_id"] = str(fields.get("request_id") or default_id)
        return decoded(fields, cls, "the body")
