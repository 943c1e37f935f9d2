"""Picking the next token of each row of a batch; every row has its own settings and its own random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrl_ext.embedded.protocol import Sampling, TokenLogprobs

__all__ = ["pick"]

_GREEDY_BELOW = 1e-5
"""vLLM's ``_SAMPLING_EPS``: a temperature below it divides logits into infinities."""


def pick(
    logits: Tensor,
    settings: Sequence[Sampling],
    generators: Sequence[torch.Generator | None],
    barred: Sequence[tuple[int, ...]],
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Choose one token per row.

    Args:
        logits: shape ``(rows, vocabulary)``, any floating-point dtype.
        settings: one per row.
        generators: one per row; None draws from torch's default generator.
        barred: token ids that each row must not pick (end of sequence before ``min_tokens``).

    Returns:
        Token ids, and log-probabilities where the row's ``logprobs`` asks for them.
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
        picked = _draw(logits[drawn], [settings[row] for row in drawn], [generators[row] for row in drawn])
        tokens[drawn] = picked
    chosen = tokens.tolist()
    return chosen, [None] * len(chosen) if raw is None else _logprobs(raw, tokens, settings)


def _draw(logits: Tensor, settings: Sequence[Sampling], generators: Sequence[torch.Generator | None]) -> Tensor:
    """By inversion of the cumulative distribution: one uniform number per row, whatever the other rows do."""
    temperature = torch.tensor([row.temperature for row in settings], dtype=torch.float64)
    probabilities = (logits.double() / temperature[:, None]).softmax(-1)
    if any(row.top_p < 1 or row.top_k > 0 or row.min_p > 0 for row in settings):
        probabilities = _restrict(probabilities, settings)
    cumulative = probabilities.cumsum(-1)
    uniform = torch.stack([torch.rand((), dtype=torch.float64, generator=generator) for generator in generators])
    total = cumulative[:, -1]
    threshold = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0]  # strictly above: never p = 0
    return found.clamp(max=logits.shape[-1] - 1)  # what is no number is above nothing


def _restrict(probabilities: Tensor, settings: Sequence[Sampling]) -> Tensor:
    ordered, order = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    size = ordered.shape[-1]
    top_k = torch.tensor([row.top_k if row.top_k > 0 else size for row in settings])
    keep = torch.arange(size) < top_k[:, None]
    kept = ordered * keep
    before = (kept.cumsum(-1) - kept) / kept.sum(-1, keepdim=True)
    keep &= before < torch.tensor([row.top_p for row in settings], dtype=torch.float64)[:, None]
    keep &= ordered >= torch.tensor([row.min_p for row in settings], dtype=torch.float64)[:, None] * ordered[:, :1]
    return torch.zeros_like(probabilities).scatter(-1, order, ordered * keep)


def _logprobs(raw: Tensor, tokens: Tensor, settings: Sequence[Sampling]) -> list[TokenLogprobs | None]:
    sampled = raw.gather(-1, tokens[:, None])
    ranks = (raw >= sampled).sum(-1).tolist()
    most = min(max(row.logprobs or 0 for row in settings), raw.shape[-1])
    best = raw.topk(most, dim=-1) if most else None
    entries: list[TokenLogprobs | None] = []
    for row, (token, value) in enumerate(zip(tokens.tolist(), sampled[:, 0].tolist(), strict=True)):
        asked = settings[row].logprobs
        if asked is None:
            entries.append(None)
            continue
        asked = min(asked, most)
        found = [] if best is None else [best.indices[row, :asked].tolist(), best.values[row, :asked].tolist()]
        entries.append(TokenLogprobs(token, value, ranks[row], tuple(zip(*found, strict=True))))
    return entries
