"""Picks the next token of a sequence, by its own settings and its own random numbers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from torchrl_ext.embedded.protocol import Sampling
from torchrl_ext.types import Info

__all__ = ["pick"]

_GREEDY_BELOW = 1e-5
"""vLLM's ``_SAMPLING_EPS``: a temperature below it divides logits into infinities."""


def pick(
    logits: Tensor, setting: Sampling, generator: torch.Generator | None = None, barred: Collection[int] = ()
) -> tuple[int, Info | None]:
    """Choose one token.

    Args:
        logits: shape ``(vocabulary,)``, any floating-point dtype, on the CPU.
        setting: how it is picked.
        generator: None draws from torch's default generator.
        barred: token ids that must not be picked (end of sequence before ``min_tokens``).

    Returns:
        The token id; and where ``setting.logprobs`` asks for it an entry of vLLM's ``logprobs.content``, whose
        ``top_logprobs`` start with the sampled token.
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
    """Draw by inversion of the cumulative distribution, from one uniform number."""
    scores = logits.double() / setting.temperature
    restrictions: tuple[tuple[bool, Any, float], ...] = (
        (setting.top_k > 0, TopKLogitsWarper, setting.top_k),
        (setting.top_p < 1, TopPLogitsWarper, setting.top_p),
        (setting.min_p > 0, MinPLogitsWarper, setting.min_p),
    )
    for wanted, restriction, bound in restrictions:
        if wanted:
            scores = restriction(bound)(None, scores)  # no history of tokens counts
    cumulative = scores.softmax(-1).cumsum(-1)
    total = cumulative[:, -1:]
    uniform = torch.rand((1, 1), dtype=torch.float64, generator=generator)
    threshold = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, threshold, right=True)  # strictly above: never p = 0
    return min(int(found), cumulative.shape[-1] - 1)  # a row of NaN finds none


def _candidate(token: int, logprob: float, rank: int) -> Info:
    return {"token_id": token, "logprob": max(logprob, -9999.0), "rank": rank}  # JSON has no -inf
