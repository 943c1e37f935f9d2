"""What runs: sequences, the jobs they belong to, and the batch whose forward passes they share."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from concurrent.futures import Future
from typing import Any

import torch

from torchrl_ext.embedded.protocol import GenerateRequest, Output, TokenLogprobs
from torchrl_ext.embedded.sampling import pick

__all__ = ["Batch", "Job", "Sequence"]


class Job:
    """One request: its sequences, and the future of their outputs."""

    def __init__(self, request: GenerateRequest, *, end_ids: frozenset[int], room: int) -> None:
        self.request = request
        self.future: Future[list[Output]] = Future()
        self.cancelled = False
        self.sequences = [Sequence(self, i, end_ids, room) for i in range(request.sampling.n)]

    def settle(self) -> None:
        """Hand the outputs over once every sequence has one."""
        outputs = [sequence.output for sequence in self.sequences if sequence.output is not None]
        if not self.future.done() and len(outputs) == len(self.sequences):
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

    def add(self, sequences: ListLike[Sequence]) -> None:
        """Take more in; the next step computes keys and values of all of them."""
        if sequences:
            self.sequences += sequences
            self.forget()

    @torch.inference_mode()
    def step(self, version: str) -> None:
        """One forward pass, one more token for every row; finished and cancelled rows leave."""
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
        self._keep([i for i, sequence in enumerate(self.sequences) if sequence.output is None])

    def forget(self) -> None:
        """Drop the cache: the next step computes it anew, with the weights of then."""
        self._cache = None

    def _padding(self, rows: ListLike[tuple[int, ...]], width: int) -> dict[str, torch.Tensor]:
        """What tells the model of padding; nothing where no row has any, so that such a row's numbers are its own."""
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
