"""Generates in one thread; pauses and weight updates happen between its forward passes."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Literal

import torch

from torchrl_ext.base.errors import ConfigError, DeadlineError
from torchrl_ext.base.types import Info
from torchrl_ext.engines.embedded.sampling import GenerateRequest, pick

__all__ = ["Job", "RunningSequence", "Scheduler", "cache_name"]

log = logging.getLogger("torchrl_ext")

_MAX_ROWS = 64  # sequences that run at once


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


class Scheduler:
    """Generates one token per round for every running sequence, in one forward pass, padded on the left.

    All sequences share one key/value cache, which is computed again when a sequence joins, and by `forget`.

    Two locks: ``_changed`` guards the queues and the state; ``weights`` is held during each round, of a forward pass
    and its tokens, and each change of the weights, so weights never change inside a round.

    Args:
        model: a causal LM of `transformers`, in evaluation mode.
        end_ids: the model's end-of-sequence ids.
        vocabulary: number of token ids that the model knows.
        context: most tokens of a sequence, prompt included.

    Attributes:
        version: the label of the weights (vLLM's "weight version").
    """

    def __init__(self, model: Any, *, end_ids: frozenset[int], vocabulary: int, context: int) -> None:
        self._llm, self._end_ids = model, end_ids
        self._vocabulary, self._context = vocabulary, context
        self._cache_name = cache_name(model)
        self._changed = threading.Condition()
        self.weights = threading.Lock()
        self._held: list[RunningSequence] = []  # arrived while not serving; start after the resume
        self._waiting: list[RunningSequence] = []
        self._running: list[RunningSequence] = []
        self._cache: Any = None
        self._widest = 0  # positions in the cache, padding included
        self._switches = 0  # changes of the weights that wait for the running round, and that the next one waits for
        self._state: Literal["serving", "draining", "paused", "stopped"] = "serving"
        self.version = "default"
        self._thread = threading.Thread(target=self._run, name="generate", daemon=True)
        self._thread.start()

    @property
    def paused(self) -> bool:
        """Whether generation is paused or stopped."""
        return self._state in ("paused", "stopped")

    @property
    def alive(self) -> bool:
        """Whether the generation thread runs."""
        return self._thread.is_alive()

    @property
    def running(self) -> int:
        """Number of sequences that have started and not finished."""
        return len(self._running)

    def check(self, tokens: Sequence[int]) -> None:
        """Check that the model knows all ``tokens``.

        Raises:
            ConfigError: names a token that it does not know.
        """
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < self._vocabulary:
                raise ConfigError(f"the model has no token {token}", expected=f"< {self._vocabulary}")

    def submit(self, request: GenerateRequest) -> Job:
        """Queue a request; if the engine is paused, the request waits for the resume.

        Raises:
            ConfigError: the prompt does not fit the context, or the model does not know a token.
        """
        prompt = request.token_ids
        self.check((*prompt, *request.sampling.stop_token_ids))
        room = self._context - len(prompt)
        if room < 1:
            raise ConfigError(f"the prompt has {len(prompt)} tokens", expected=f"at most {self._context - 1}")
        job = Job(request, end_ids=self._end_ids, room=room)
        with self._changed:
            queue = self._waiting if self._state == "serving" else self._held
            queue += job.sequences
            self._changed.notify_all()
        return job

    def pause(self, mode: str, timeout_s: float = 600.0) -> None:
        """Stop generating, and return when no forward pass runs.

        Args:
            mode: ``keep`` freezes running requests, ``wait`` lets them finish first, ``abort`` ends them with the
                tokens so far.
            timeout_s: deadline of ``wait``, in seconds.

        Raises:
            ConfigError: there is no such mode.
            DeadlineError: requests were still running; they are now frozen.
        """
        if mode not in ("abort", "wait", "keep"):
            raise ConfigError(f"there is no pause mode {mode!r}", expected="one of abort, wait, keep")
        late = False
        with self._changed:
            if mode == "wait" and self._state in ("serving", "draining"):
                self._state = "draining"
                late = not self._changed.wait_for(lambda: not self._has_work() or self._state != "draining", timeout_s)
            if self._state == "stopped":
                return
            frozen, self._state = self._state == "paused", "paused"
            self._changed.notify_all()
        if not frozen:
            with self.weights:  # wait for the running pass to end
                pass
        if mode == "abort":
            self._abort()
        if late:
            raise DeadlineError(
                f"requests were still running {timeout_s:g} s after pause?mode=wait",
                state="the engine is paused and the requests are frozen",
                hint="resume to continue them, or pause with mode=abort",
            )

    def resume(self) -> None:
        """Continue frozen sequences and start waiting requests."""
        with self._changed:
            if self._state != "stopped":
                self._state = "serving"
            self._waiting, self._held = self._waiting + self._held, []
            self._changed.notify_all()

    @contextmanager
    def between_rounds(self) -> Iterator[None]:
        """Hold ``weights`` from the end of the running round to the end of the block; no request is stopped."""
        with self._changed:
            self._switches += 1
        with self.weights:
            try:
                yield
            finally:
                with self._changed:
                    self._switches -= 1
                    self._changed.notify_all()

    def halt(self) -> None:
        """Begin no other round until `resume`; running requests stay frozen."""
        with self._changed:
            if self._state != "stopped":
                self._state = "paused"

    def stop(self) -> None:
        """End the thread and every request. May be called twice."""
        with self._changed:
            self._state = "stopped"
            self._changed.notify_all()
        self._thread.join(timeout=10)
        self._abort()

    def forget(self) -> None:
        """Drop running sequences' keys and values, which old weights computed; the next step recomputes them."""
        with self.weights:
            self._cache = None

    def _has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._state == "stopped"
                        or (self._state != "paused" and self._has_work() and not self._switches)
                    )
                )
            with self.weights:
                with self._changed:
                    if self._state == "stopped":
                        return
                    if self._state == "paused":
                        continue
                    room = _MAX_ROWS - len(self._running)
                    if joining := self._waiting[:room]:
                        self._running, self._waiting, self._cache = self._running + joining, self._waiting[room:], None
                try:
                    self._step()
                except Exception as error:
                    log.exception("generation failed")
                    for sequence in self._running:
                        sequence.job.fail(error)  # the next step drops its row
            with self._changed:
                self._changed.notify_all()

    @torch.inference_mode()
    def _step(self) -> None:
        """Run one forward pass and append a token to every row; finished and cancelled rows leave."""
        self._keep([i for i, sequence in enumerate(self._running) if not sequence.job.cancelled])
        if not self._running:
            return
        rows = [sequence.tokens() for sequence in self._running]
        self._widest = max(map(len, rows)) if self._cache is None else self._widest + 1
        fed = rows if self._cache is None else [row[-1:] for row in rows]
        width = max(map(len, fed))
        ids = torch.tensor([(0,) * (width - len(row)) + row for row in fed], device=self._llm.device)
        settings = {self._cache_name: self._cache, **self._padding(rows, width)}
        out = self._llm(input_ids=ids, use_cache=True, **settings)
        self._cache = out[self._cache_name]
        for sequence, logits in zip(self._running, out.logits[:, -1].cpu(), strict=True):
            sequence.extend(logits, self.version)
        self._keep([i for i, sequence in enumerate(self._running) if sequence.finish_reason is None])

    def _padding(self, rows: Sequence[tuple[int, ...]], width: int) -> dict[str, torch.Tensor]:
        """Return attention_mask and position_ids; {} without padding, so that rows compute as they would alone."""
        lengths = torch.tensor([len(row) for row in rows], device=self._llm.device)
        if bool((lengths == self._widest).all()):
            return {}
        places = torch.arange(self._widest, device=lengths.device) - (self._widest - lengths)[:, None]
        return {"attention_mask": (places >= 0).long(), "position_ids": places[:, -width:].clamp(min=0)}

    def _keep(self, rows: list[int]) -> None:
        if len(rows) == len(self._running):
            return
        self._running = [self._running[row] for row in rows]
        if not rows:
            self._cache = None
        elif self._cache is not None:
            self._cache.batch_select_indices(torch.tensor(rows, device=self._llm.device))

    def _abort(self) -> None:
        with self.weights, self._changed:
            ended = self._running + self._waiting + self._held
            self._running, self._waiting, self._held, self._cache = [], [], [], None
        for sequence in ended:
            sequence.finish("abort")


def cache_name(model: Any) -> str:
    """Return the name under which the installed `transformers` takes and returns keys and values."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
