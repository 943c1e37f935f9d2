"""Sequences that run, the requests that they belong to, and the batch whose forward passes they share.

Every row of a batch has its own settings and its own random numbers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as ListLike
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchrl_ext.embedded.protocol import GenerateRequest, Sampling
from torchrl_ext.types import Info

__all__ = ["Batch", "Job", "Sequence", "answer", "pick"]


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position: the sampled token's, its rank (1 is best), and the best candidates'."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()

    def to_json(self, asked: int) -> Info:
        """Return an entry of ``logprobs.content``: its ``asked`` candidates start with the sampled token."""
        entries = [(self.token_id, self.logprob, self.rank)]
        entries += [(token, value, i + 1) for i, (token, value) in enumerate(self.top) if token != self.token_id]
        rows = [  # JSON has no -inf
            {"token_id": token, "logprob": max(value, -9999.0), "rank": rank} for token, value, rank in entries
        ]
        return rows[0] | {"top_logprobs": rows[: max(asked, 1)]}


class Job:
    """One request, with its sequences and the future of their outputs."""

    def __init__(self, request: GenerateRequest, *, end_ids: frozenset[int], room: int) -> None:
        self.request = request
        self.future: Future[list[Sequence]] = Future()
        self.cancelled = False
        self.sequences = [Sequence(self, i, end_ids, room) for i in range(request.sampling.n)]

    def settle(self) -> None:
        """Hand the sequences to the future once every one of them is finished."""
        if not self.future.done() and all(sequence.finish_reason for sequence in self.sequences):
            self.future.set_result(self.sequences)

    def fail(self, error: BaseException) -> None:
        """Give the request up: its future raises ``error``."""
        self.cancelled = True
        if not self.future.done():
            self.future.set_exception(error)


class Sequence:
    """One continuation of a prompt, token by token.

    Args:
        end_ids: the model's own end-of-sequence ids.
        room: tokens that the context leaves.

    Attributes:
        token_ids: new tokens only.
        finish_reason: ``"stop"``, ``"length"`` or ``"abort"``; None while it runs.
        stop_reason: the stop token of the request that ended it; None for end of sequence, length and abort.
    """

    def __init__(self, job: Job, index: int, end_ids: frozenset[int], room: int) -> None:
        sampling = job.request.sampling
        self.job, self.index, self.sampling = job, index, sampling
        self.generator: torch.Generator | None = None
        if sampling.seed is not None and sampling.temperature > 0:
            self.generator = torch.Generator().manual_seed((sampling.seed + index) % 2**63)
        self._limit = min(room, sampling.max_tokens or room)
        self._ends = frozenset() if sampling.ignore_eos else end_ids
        self._stops = frozenset(sampling.stop_token_ids)
        self.token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._versions: list[tuple[str, int]] = []  # weight version, and the first token that it made
        self.finish_reason: str | None = None
        self.stop_reason: int | None = None

    def tokens(self) -> tuple[int, ...]:
        """Return the token ids of the prompt and of what followed so far."""
        return (*self.job.request.token_ids, *self.token_ids)

    def barred(self) -> tuple[int, ...]:
        """Return the tokens that must not come next."""
        return tuple(self._ends | self._stops) if len(self.token_ids) < self.sampling.min_tokens else ()

    def take(self, token: int, logprob: TokenLogprobs | None, version: str) -> None:
        """Append a token that weights labelled ``version`` picked."""
        if not self._versions or self._versions[-1][0] != version:
            self._versions.append((version, len(self.token_ids)))
        self.token_ids.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
        if token in self._stops:
            self.finish("stop", token)
        elif token in self._ends:
            self.finish("stop")
        elif len(self.token_ids) >= self._limit:
            self.finish("length")

    def finish(self, reason: str, stop_token: int | None = None) -> None:
        """End the sequence with the tokens that it has."""
        self.finish_reason, self.stop_reason = reason, stop_token
        self.job.settle()

    def spans(self) -> list[Info]:
        """Return contiguous ``{version, start, end}`` over the new tokens."""
        ends = [start for _, start in self._versions[1:]] + [len(self.token_ids)]
        return [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(self._versions, ends, strict=True)
        ]

    def to_json(self) -> Info:
        """Return the finished sequence as an entry of ``choices``."""
        asked = self.sampling.logprobs
        content = None if asked is None else {"content": [entry.to_json(asked) for entry in self._logprobs]}
        return {
            "index": self.index,
            "token_ids": self.token_ids,
            "logprobs": content,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "weight_versions": self.spans(),
        }


def answer(request: GenerateRequest, sequences: ListLike[Sequence], model: str) -> Info:
    """Return the body of a response."""
    new = sum(len(sequence.token_ids) for sequence in sequences)
    return {
        "request_id": request.request_id,
        "created": int(time.time()),
        "model": model,
        "output_mode": "tokens",
        "choices": [sequence.to_json() for sequence in sequences],
        "usage": {
            "prompt_tokens": len(request.token_ids),
            "completion_tokens": new,
            "total_tokens": len(request.token_ids) + new,
        },
    }


class Batch:
    """Sequences that share forward passes and one key/value cache; shorter ones are padded on the left.

    Args:
        model: a causal LM of `transformers`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache: Any = None
        self._widest = 0  # positions that the cache has, padding included
        self.sequences: list[Sequence] = []

    @property
    def holds_keys(self) -> bool:
        """Whether there are keys and values, for the next step to build upon."""
        return self._cache is not None

    def add(self, sequences: ListLike[Sequence]) -> None:
        """Add sequences; the next step computes keys and values of all of them."""
        if sequences:
            self.sequences += sequences
            self.forget()

    @torch.inference_mode()
    def step(self, version: str) -> None:
        """Run one forward pass, and add a token to every row; finished and cancelled rows leave."""
        self._keep([i for i, sequence in enumerate(self.sequences) if not sequence.job.cancelled])
        if not self.sequences:
            return
        rows = [sequence.tokens() for sequence in self.sequences]
        self._widest = max(map(len, rows)) if self._cache is None else self._widest + 1
        fed = rows if self._cache is None else [row[-1:] for row in rows]
        width = max(map(len, fed))
        ids = torch.tensor([(0,) * (width - len(row)) + row for row in fed], device=self._model.device)
        out = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, **self._padding(rows, width))
        self._cache = out.past_key_values
        tokens, logprobs = pick(
            out.logits[:, -1].cpu(),
            [sequence.sampling for sequence in self.sequences],
            [sequence.generator for sequence in self.sequences],
            [sequence.barred() for sequence in self.sequences],
        )
        for sequence, token, logprob in zip(self.sequences, tokens, logprobs, strict=True):
            sequence.take(token, logprob, version)
        self._keep([i for i, sequence in enumerate(self.sequences) if sequence.finish_reason is None])

    def forget(self) -> None:
        """Drop the cache: the next step computes it anew, with the weights that it finds."""
        self._cache = None

    def clear(self) -> None:
        """Drop the sequences and the cache."""
        self.sequences = []
        self.forget()

    def _padding(self, rows: ListLike[tuple[int, ...]], width: int) -> dict[str, torch.Tensor]:
        """Return what tells the model of padding; nothing without any, so that a row computes as it would alone."""
        lengths = torch.tensor([len(row) for row in rows], device=self._model.device)
        if bool((lengths == self._widest).all()):
            return {}
        places = torch.arange(self._widest, device=lengths.device) - (self._widest - lengths)[:, None]
        return {"attention_mask": (places >= 0).long(), "position_ids": places[:, -width:].clamp(min=0)}

    def _keep(self, rows: list[int]) -> None:
        if len(rows) == len(self.sequences):
            return
        self.sequences = [self.sequences[row] for row in rows]
        if self._cache is not None and rows:
            self._cache.batch_select_indices(torch.tensor(rows, device=self._model.device))
        if not rows:
            self.forget()


_GREEDY_BELOW = 1e-5
"""vLLM's ``_SAMPLING_EPS``: a temperature below it divides logits into infinities."""


def pick(
    logits: Tensor,
    settings: ListLike[Sampling],
    generators: ListLike[torch.Generator | None],
    barred: ListLike[tuple[int, ...]],
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


def _draw(logits: Tensor, settings: ListLike[Sampling], generators: ListLike[torch.Generator | None]) -> Tensor:
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


def _restrict(probabilities: Tensor, settings: ListLike[Sampling]) -> Tensor:
    ordered, order = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    size = ordered.shape[-1]
    top_k = torch.tensor([row.top_k if row.top_k > 0 else size for row in settings])
    keep = torch.arange(size) < top_k[:, None]
    kept = ordered * keep
    before = (kept.cumsum(-1) - kept) / kept.sum(-1, keepdim=True)
    keep &= before < torch.tensor([row.top_p for row in settings], dtype=torch.float64)[:, None]
    keep &= ordered >= torch.tensor([row.min_p for row in settings], dtype=torch.float64)[:, None] * ordered[:, :1]
    return torch.zeros_like(probabilities).scatter(-1, order, ordered * keep)


def _logprobs(raw: Tensor, tokens: Tensor, settings: ListLike[Sampling]) -> list[TokenLogprobs | None]:
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
