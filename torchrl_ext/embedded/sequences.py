"""What runs: sequences, the jobs they belong to, and cohorts of equally long sequences that share a forward pass."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from concurrent.futures import Future
from typing import Any

import torch

from torchrl_ext.embedded.protocol import GenerateRequest, Output, TokenLogprobs
from torchrl_ext.embedded.sampling import pick

__all__ = ["Cohort", "Job", "Sequence"]


class Job:
    """One request: its sequences, and the future of their outputs."""

    def __init__(self, request: GenerateRequest, *, end_ids: frozenset[int], room: int) -> None:
        self.request = request
        self.future: Future[list[Output]] = Future()
        self.cancelled = False
        self.sequences = [Sequence(self, i, end_ids, room) for i in range(request.sampling.n)]

    def settle(self) -> None:
        """Hand the outputs over once every sequence has one."""
        outputs = [sequence.output for sequence in self.sequences]
        if not self.future.done() and all(output is not None for output in outputs):
            self.future.set_result(outputs)

    def fail(self, error: BaseException) -> None:
        """Give up; the requester sees ``error``."""
        self.cancelled = True
        if not self.future.done():
            self.future.set_exception(error)


class Sequence:
    """One continuation of a prompt, token by token.

    Args:
        end_ids: the model's own end-of-sequence ids.
        room: tokens that the context leaves.
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
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._versions: list[tuple[str, int]] = []
        self.output: Output | None = None

    def tokens(self) -> tuple[int, ...]:
        """The prompt and what followed so far."""
        return (*self.job.request.token_ids, *self._tokens)

    def barred(self) -> tuple[int, ...]:
        """Tokens that must not come next."""
        return tuple(self._ends | self._stops) if len(self._tokens) < self.sampling.min_tokens else ()

    def take(self, token: int, logprob: TokenLogprobs | None, version: str) -> None:
        """Append a token that weights labelled ``version`` picked."""
        if not self._versions or self._versions[-1][0] != version:
            self._versions.append((version, len(self._tokens)))
        self._tokens.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
        if token in self._stops:
            self.finish("stop", token)
        elif token in self._ends:
            self.finish("stop")
        elif len(self._tokens) >= self._limit:
            self.finish("length")

    def finish(self, reason: str, stop_token: int | None = None) -> None:
        """End here, with what there is."""
        self.output = Output(
            index=self.index,
            token_ids=tuple(self._tokens),
            logprobs=None if self.sampling.logprobs is None else tuple(self._logprobs),
            finish_reason=reason,
            stop_reason=stop_token,
            versions=tuple(self._versions),
        )
        self.job.settle()


class Cohort:
    """Sequences of one length with one key/value cache: no padding, so a row's numbers are its own.

    Args:
        model: a causal LM of `transformers`.
        sequences: with prompts of one length.
    """

    def __init__(self, model: Any, sequences: ListLike[Sequence]) -> None:
        self._model = model
        self.sequences = list(sequences)
        self._cache: Any = None
        self.length = len(sequences[0].job.request.token_ids)

    @torch.inference_mode()
    def step(self, version: str) -> None:
        """One forward pass, one more token for every row; finished and cancelled rows leave."""
        self._keep([i for i, sequence in enumerate(self.sequences) if not sequence.job.cancelled])
        if not self.sequences:
            return
        rows = [sequence.tokens() for sequence in self.sequences]
        self.length = len(rows[0])
        if self._cache is not None:
            rows = [row[-1:] for row in rows]
        ids = torch.tensor(rows, device=self._model.device)
        out = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True)
        self._cache = out.past_key_values
        tokens, logprobs = pick(
            out.logits[:, -1].cpu(),
            [sequence.sampling for sequence in self.sequences],
            [sequence.generator for sequence in self.sequences],
            [sequence.barred() for sequence in self.sequences],
        )
        for sequence, token, logprob in zip(self.sequences, tokens, logprobs, strict=True):
            sequence.take(token, logprob, version)
        self._keep([i for i, sequence in enumerate(self.sequences) if sequence.output is None])

    def forget(self) -> None:
        """Drop the cache: the next step computes it anew, with the weights of then."""
        self._cache = None

    @torch.inference_mode()
    def absorb(self, other: Cohort) -> bool:
        """Take over the rows of ``other`` where both caches are of one length and plain; returns whether it did."""
        if self.length != other.length or self._cache is None or other._cache is None:
            return False
        pairs = list(zip(self._cache.layers, other._cache.layers, strict=True))
        if any(type(layer).__name__ != "DynamicLayer" for pair in pairs for layer in pair):
            return False  # sliding windows and recurrent states hold more than keys and values
        for mine, theirs in pairs:
            mine.keys = torch.cat([mine.keys, theirs.keys])
            mine.values = torch.cat([mine.values, theirs.values])
        self.sequences += other.sequences
        return True

    def _keep(self, rows: list[int]) -> None:
        if len(rows) == len(self.sequences):
            return
        self.sequences = [self.sequences[row] for row in rows]
        if self._cache is not None and rows:
            self._cache.batch_select_indices(torch.tensor(rows, device=self._model.device))
