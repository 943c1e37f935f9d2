"""Requests to `/inference/v1/generate` as vLLM 0.32 reads them (`vllm.entrypoints.scale_out`), and draws of tokens."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta, Struct, field
from torch import Tensor
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.base.types import Info, decoded

__all__ = ["GenerateRequest", "Sampling", "Token", "pick"]

_WITHOUT_EFFECT = {  # this engine makes no text and has no prefix cache
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
    """The fields of vLLM's `SamplingParams` that this engine supports, with vLLM's names and defaults.

    Attributes:
        n: sequences per prompt, bounded like vLLM's VLLM_MAX_N_SEQUENCES; sequence i uses ``seed + i``.
        max_tokens: most new tokens per sequence; None for as many as the context allows.
        min_tokens: number of new tokens before which no end-of-sequence or stop token is sampled.
        temperature: 0, or anything below 1e-5 as in vLLM, picks the most probable token.
        top_p, top_k, min_p: restrict the candidates; 1.0, 0 (or -1) and 0.0 do not.
        seed: seed of the sequence's own generator; None uses torch's default generator.
        logprobs: None for none; 0 for the sampled token's; k for the sampled token's and those of the k - 1 most
            probable others (of the raw model distribution, before temperature).
        stop_token_ids: tokens after which a sequence ends.
        ignore_eos: whether to continue after the model's end of sequence.
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
        """Read a request from its JSON body.

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


_GREEDY_BELOW = 1e-5
"""vLLM's ``_SAMPLING_EPS``: dividing logits by a lower temperature gives infinities."""


def pick(
    logits: Tensor, setting: Sampling, generator: torch.Generator | None = None, barred: Collection[int] = ()
) -> tuple[int, Info | None]:
    """Sample one token.

    Args:
        logits: shape ``(vocabulary,)``, any floating-point dtype, on the CPU.
        generator: None draws from torch's default generator.
        barred: token ids that must not be sampled (stop tokens before ``min_tokens``).

    Returns:
        The token id, and an entry of vLLM's ``logprobs.content`` whose ``top_logprobs`` start with the sampled token,
        or None if ``setting.logprobs`` is None.
    """
    scores = logits = logits.float()
    if barred:
        scores = logits.clone()
        scores[list(barred)] = -torch.inf
    token = int(scores.argmax()) if setting.temperature < _GREEDY_BELOW else _draw(scores[None], setting, generator)
    if setting.logprobs is None:
        return token, None
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(min(setting.logprobs, len(logprobs)))
    pairs = enumerate(zip(best.indices.tolist(), best.values.tolist(), strict=True), start=1)  # rank 1 is best
    first = _candidate(token, float(logprobs[token]), int((logprobs >= logprobs[token]).sum()))
    others = [_candidate(*pair, rank) for rank, pair in pairs if pair[0] != token]
    return token, {**first, "top_logprobs": [first, *others][: max(setting.logprobs, 1)]}


def _draw(logits: Tensor, setting: Sampling, generator: torch.Generator | None) -> int:
    """Draw by inverting the cumulative distribution at one uniform number."""
    scores = logits.double() / setting.temperature
    restrictions: tuple[tuple[bool, Any, float], ...] = (
        (setting.top_k > 0, TopKLogitsWarper, setting.top_k),
        (setting.top_p < 1, TopPLogitsWarper, setting.top_p),
        (setting.min_p > 0, MinPLogitsWarper, setting.min_p),
    )
    for wanted, restriction, bound in restrictions:
        if wanted:
            scores = restriction(bound)(None, scores)  # these warpers ignore the token history
    cumulative = scores.softmax(-1).cumsum(-1)
    total = cumulative[:, -1:]
    uniform = torch.rand((1, 1), dtype=torch.float64, generator=generator)
    threshold = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, threshold, right=True)  # strictly above, so never a token with p = 0
    return min(int(found), cumulative.shape[-1] - 1)  # for NaN the search ends past the row


def _candidate(token: int, logprob: float, rank: int) -> Info:
    return {"token_id": token, "logprob": max(logprob, -9999.0), "rank": rank}  # JSON has no -inf
