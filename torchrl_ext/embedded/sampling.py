"""Picks the next token of every row of a batch, each by its own settings and its own random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from torchrl_ext.embedded.protocol import Sampling
from torchrl_ext.types import Info

__all__ = ["pick"]

_GREEDY_BELOW = 1e-5
"""vLLM's ``_SAMPLING_EPS``: a temperature below it divides logits into infinities."""


def pick(
    logits: Tensor,
    settings: Sequence[Sampling],
    generators: Sequence[torch.Generator | None],
    barred: Sequence[tuple[int, ...]],
) -> tuple[list[int], list[Info | None]]:
    """Choose one token per row.

    Args:
        logits: shape ``(rows, vocabulary)``, any floating-point dtype.
        settings: one per row.
        generators: one per row; None draws from torch's default generator.
        barred: token ids that each row must not pick (end of sequence before ``min_tokens``).

    Returns:
        Token ids; and where the row's ``logprobs`` asks for them an entry of vLLM's ``logprobs.content``, whose
        ``top_logprobs`` start with the sampled token.
    """
    logits = logits.float()
    raw = logits.log_softmax(-1) if any(row.logprobs is not None for row in settings) else None
    if any(barred):
        logits = logits.clone()
        for row, ids in enumerate(barred):
            logits[row, list(ids)] = -torch.inf
    tokens = logits.argmax(-1)
    for row, setting in enumerate(settings):
        if setting.temperature >= _GREEDY_BELOW:
            tokens[row] = _draw(logits[row : row + 1], setting, generators[row])
    chosen = tokens.tolist()
    entries: list[Info | None] = [None] * len(chosen)
    if raw is not None:
        sampled = raw.gather(-1, tokens[:, None])
        values, ranks = sampled[:, 0].tolist(), (raw >= sampled).sum(-1).tolist()  # rank 1 is best
        for row, setting in enumerate(settings):
            if setting.logprobs is not None:
                first = _candidate(chosen[row], values[row], ranks[row])
                best = raw[row].topk(min(setting.logprobs, raw.shape[-1]))
                pairs = enumerate(zip(best.indices.tolist(), best.values.tolist(), strict=True), start=1)
                others = [_candidate(*pair, rank) for rank, pair in pairs if pair[0] != chosen[row]]
                entries[row] = {**first, "top_logprobs": [first, *others][: max(setting.logprobs, 1)]}
    return chosen, entries


def _candidate(token: int, logprob: float, rank: int) -> Info:
    return {"token_id": token, "logprob": max(logprob, -9999.0), "rank": rank}  # JSON has no -inf


def _draw(logits: Tensor, setting: Sampling, generator: torch.Generator | None) -> int:
    """Draw a token of one row, shape ``(1, vocabulary)``, whatever the other rows do."""
    scores = logits.double() / setting.temperature
    if setting.top_k > 0:
        scores = TopKLogitsWarper(setting.top_k)(None, scores)
    if setting.top_p < 1:
        scores = TopPLogitsWarper(setting.top_p)(None, scores)
    if setting.min_p > 0:
        scores = MinPLogitsWarper(setting.min_p)(None, scores)
    return int(scores.softmax(-1).multinomial(1, generator=generator))
