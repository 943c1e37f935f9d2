"""Generates in one thread; pauses and weight updates happen between its forward passes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, Literal

from torchrl_ext.base.errors import ConfigError, DeadlineError
from torchrl_ext.engines.embedded.protocol import GenerateRequest
from torchrl_ext.engines.embedded.sequences import Batch, Job, RunningSequence

__all__ = ["Scheduler"]

log = logging.getLogger("torchrl_ext")

_MAX_ROWS = 64  # sequences that run at once


class Scheduler:
    """Generates one token per round for every running sequence.

    Two locks: ``_changed`` guards the queues and the state; ``weights`` is held during each round of forward passes and
    during each change of the weights, so weights never change inside a forward pass.

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
        self._changed = threading.Condition()
        self.weights = threading.Lock()
        self._held: list[RunningSequence] = []  # arrived while not serving; start after the resume
        self._waiting: list[RunningSequence] = []
        self._batches = [Batch(model)]  # new requests join the last; others hold older weights' keys
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
        return len(self._sequences())

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
            with self.weights:  # wait for the running round to end
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
            self._batches = [Batch(self._llm, self._sequences())]

    def changed(self) -> None:
        """Note that the weights have changed. The caller holds `weights`.

        Keys and values stay until `forget`. New requests get a batch of their own, because adding rows to a batch
        recomputes the keys and values of all its rows.
        """
        if self._batches[-1].holds_keys:
            self._batches.append(Batch(self._llm))

    def _sequences(self) -> list[RunningSequence]:
        return [sequence for batch in self._batches for sequence in batch.sequences]

    def _has_work(self) -> bool:
        return bool(self._sequences() or self._waiting)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._state == "stopped" or (self._state != "paused" and self._has_work())
                )
            with self.weights:
                with self._changed:
                    if self._state == "stopped":
                        return
                    if self._state == "paused":
                        continue
                    room = _MAX_ROWS - len(self._sequences())
                    self._batches[-1].add(self._waiting[:room])
                    self._waiting = self._waiting[room:]
                for batch in self._batches:
                    self._step(batch)
                self._batches = [batch for batch in self._batches[:-1] if batch.sequences] + self._batches[-1:]
            with self._changed:
                self._changed.notify_all()

    def _step(self, batch: Batch) -> None:
        try:
            batch.step(self.version)
        except Exception as error:
            log.exception("generation failed")
            for sequence in batch.sequences:
                sequence.job.fail(error)  # the next step drops its rows

    def _abort(self) -> None:
        with self.weights, self._changed:
            ended = self._sequences() + self._waiting + self._held
            self._batches, self._waiting, self._held = [Batch(self._llm)], [], []
        for sequence in ended:
            sequence.finish("abort")
