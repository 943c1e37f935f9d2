"""Picks the next token of every row of a batch, each by its own settings and its own random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
    drawn = [row for row, setting in enumerate(settings) if setting.temperature >= _GREEDY_BELOW]
    if drawn:
        tokens[drawn] = _draw(logits[drawn], [settings[row] for row in drawn], [generators[row] for row in drawn])
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


def _draw(logits: Tensor, settings: Sequence[Sampling], generators: Sequence[torch.Generator | None]) -> Tensor:
    """Draw by inversion of the cumulative distribution: one uniform number per row, whatever the other rows do."""
    temperature = torch.tensor([row.temperature for row in settings], dtype=torch.float64)
    probabilities = (logits.double() / temperature[:, None]).softmax(-1)
    if any(row.top_p < 1 or row.top_k > 0 or row.min_p > 0 for row in settings):
        probabilities = _restrict(probabilities, settings)
    cumulative = probabilities.cumsum(-1)
    uniform = torch.stack([torch.rand((), dtype=torch.float64, generator=generator) for generator in generators])
    total = cumulative[:, -1]
    threshold = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0]  # strictly above: never p = 0
    return found.clamp(max=logits.shape[-1] - 1)  # a row of NaN finds none


def _restrict(probabilities: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Return the probabilities with zeros where top_k, top_p or min_p leave a token out."""
    ordered, order = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    size = ordered.shape[-1]
    top_k = torch.tensor([row.top_k if row.top_k > 0 else size for row in settings])[:, None]
    top_p = torch.tensor([row.top_p for row in settings], dtype=torch.float64)[:, None]
    min_p = torch.tensor([row.min_p for row in settings], dtype=torch.float64)[:, None]
    keep = torch.arange(size) < top_k
    kept = ordered * keep
    before = (kept.cumsum(-1) - kept) / kept.sum(-1, keepdim=True)
    keep &= (before < top_p) & (ordered >= min_p * ordered[:, :1])
    return torch.zeros_like(probabilities).scatter(-1, order, ordered * keep)
