"""Samples the next token of a sequence, with the sequence's own settings and random numbers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from torchrl_ext.base.types import Info
from torchrl_ext.engines.embedded.protocol import Sampling

__all__ = ["pick"]

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
