"""Running sequences, their requests, and the batches that share forward passes."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from torchrl_ext.base.types import Info
from torchrl_ext.engines.embedded.protocol import GenerateRequest
from torchrl_ext.engines.embedded.sampling import pick

__all__ = ["Batch", "Job", "RunningSequence", "cache_name"]


class Job:
    """One request, its sequences, and the future of their outputs.

    Args:
        end_ids: the model's end-of-sequence ids.
        room: number of new tokens that fit the context.
    """

    def __init__(self, request: GenerateRequest, *, end_ids: frozenset[int], room: int) -> None:
        self.request = request
        self.future: Future[list[RunningSequence]] = Future()
        self.cancelled = False
        self.sequences = [RunningSequence(self, i, end_ids, room) for i in range(request.sampling.n)]

    def fail(self, error: BaseException) -> None:
        """Abandon the request; its future raises ``error``."""
        self.cancelled = True
        if not self.future.done():
            self.future.set_exception(error)

    def to_json(self, model: str) -> Info:
        """Return the response body, once every sequence has finished."""
        prompt, new = len(self.request.token_ids), sum(len(sequence.token_ids) for sequence in self.sequences)
        return {
            "request_id": self.request.request_id,
            "created": int(time.time()),
            "model": model,
            "output_mode": "tokens",
            "choices": [sequence.to_json() for sequence in self.sequences],
            "usage": {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new},
        }


class RunningSequence:
    """One continuation of a prompt.

    Attributes:
        token_ids: new tokens only.
        finish_reason: ``"stop"``, ``"length"`` or ``"abort"``; None while running.
        stop_reason: the id in `stop_token_ids` that ended the sequence; None for other ends.
        spans: contiguous ``{version, start, end}`` spans over the new tokens.
    """

    def __init__(self, job: Job, index: int, end_ids: frozenset[int], room: int) -> None:
        sampling = job.request.sampling
        self.job, self.sampling, self._index = job, sampling, index
        self._generator: torch.Generator | None = None
        if sampling.seed is not None and sampling.temperature > 0:
            self._generator = torch.Generator().manual_seed((sampling.seed + index) % 2**63)
        self._limit = min(room, sampling.max_tokens or room)
        self._ends = frozenset() if sampling.ignore_eos else end_ids
        self._stops = frozenset(sampling.stop_token_ids)
        self.token_ids: list[int] = []
        self._logprobs: list[Info] = []
        self.spans: list[Info] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | None = None

    def tokens(self) -> tuple[int, ...]:
        """Return the token ids of the prompt and the new tokens."""
        return (*self.job.request.token_ids, *self.token_ids)

    def extend(self, logits: torch.Tensor, version: str) -> None:
        """Sample and append a token from ``logits``, shape ``(vocabulary,)``, of the weights labelled ``version``."""
        barred = self._ends | self._stops if len(self.token_ids) < self.sampling.min_tokens else ()
        token, logprob = pick(logits, self.sampling, self._generator, barred)
        if not self.spans or self.spans[-1]["version"] != version:
            self.spans.append({"version": version, "start": len(self.token_ids)})
        self.token_ids.append(token)
        self.spans[-1]["end"] = len(self.token_ids)
        if logprob is not None:
            self._logprobs.append(logprob)
        if token in self._stops:
            self.finish("stop", token)
        elif token in self._ends:
            self.finish("stop")
        elif len(self.token_ids) >= self._limit:
            self.finish("length")

    def finish(self, reason: str, stop_token: int | None = None) -> None:
        """End the sequence with its tokens so far, and end the job if this was its last running sequence."""
        self.finish_reason, self.stop_reason = reason, stop_token
        job = self.job
        if not job.future.done() and all(sequence.finish_reason for sequence in job.sequences):
            job.future.set_result(job.sequences)

    def to_json(self) -> Info:
        """Return the finished sequence as an entry of ``choices``."""
        return {
            "index": self._index,
            "token_ids": self.token_ids,
            "logprobs": None if self.sampling.logprobs is None else {"content": self._logprobs},
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "weight_versions": self.spans,
        }


class Batch:
    """Sequences that share forward passes and one key/value cache, padded on the left.

    Args:
        model: a causal LM of `transformers`.
        sequences: the initial sequences.
    """

    def __init__(self, model: Any, sequences: Sequence[RunningSequence] = ()) -> None:
        self._model, self.sequences = model, list(sequences)
        self._cache_name = cache_name(model)
        self._cache: Any = None
        self._widest = 0  # positions in the cache, padding included

    @property
    def holds_keys(self) -> bool:
        """Whether the batch holds keys and values that the next step builds on."""
        return self._cache is not None

    def add(self, sequences: Sequence[RunningSequence]) -> None:
        """Add sequences; the next step recomputes the keys and values of all rows."""
        if sequences:
            self.sequences += sequences
            self._cache = None

    @torch.inference_mode()
    def step(self, version: str) -> None:
        """Run one forward pass and append a token to every row; finished and cancelled rows leave the batch."""
        self._keep([i for i, sequence in enumerate(self.sequences) if not sequence.job.cancelled])
        if not self.sequences:
            return
        rows = [sequence.tokens() for sequence in self.sequences]
        self._widest = max(map(len, rows)) if self._cache is None else self._widest + 1
        fed = rows if self._cache is None else [row[-1:] for row in rows]
        width = max(map(len, fed))
        ids = torch.tensor([(0,) * (width - len(row)) + row for row in fed], device=self._model.device)
        settings = {self._cache_name: self._cache, **self._padding(rows, width)}
        out = self._model(input_ids=ids, use_cache=True, **settings)
        self._cache = out[self._cache_name]
        for sequence, logits in zip(self.sequences, out.logits[:, -1].cpu(), strict=True):
            sequence.extend(logits, version)
        self._keep([i for i, sequence in enumerate(self.sequences) if sequence.finish_reason is None])

    def _padding(self, rows: Sequence[tuple[int, ...]], width: int) -> dict[str, torch.Tensor]:
        """Return attention_mask and position_ids; {} for an unpadded batch, whose rows compute as they would alone."""
        lengths = torch.tensor([len(row) for row in rows], device=self._model.device)
        if bool((lengths == self._widest).all()):
            return {}
        places = torch.arange(self._widest, device=lengths.device) - (self._widest - lengths)[:, None]
        return {"attention_mask": (places >= 0).long(), "position_ids": places[:, -width:].clamp(min=0)}

    def _keep(self, rows: list[int]) -> None:
        if len(rows) == len(self.sequences):
            return
        self.sequences = [self.sequences[row] for row in rows]
        if not rows:
            self._cache = None
        elif self._cache is not None:
            self._cache.batch_select_indices(torch.tensor(rows, device=self._model.device))


def cache_name(model: Any) -> str:
    """Return the name under which the installed `transformers` takes and returns keys and values."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
