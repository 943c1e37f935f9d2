"""One thread owns generation; pausing and weight updates happen between its tokens."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, Literal

from torchrl_ext.embedded.protocol import GenerateRequest
from torchrl_ext.embedded.sequences import Batch, Job, RunningSequence
from torchrl_ext.errors import ConfigError, DeadlineError

__all__ = ["Scheduler"]

log = logging.getLogger("torchrl_ext")


class Scheduler:
    """Steps every running sequence token by token.

    Two locks: ``_changed`` guards the queues and the state; ``weights`` is held during a round of forward passes and by
    whoever changes weights, so that weights never change inside a forward pass.

    Args:
        model: a causal LM of `transformers`, in evaluation mode.
        end_ids: its end-of-sequence ids.
        vocabulary: number of token ids that the model knows.
        context: most tokens of a sequence, prompt included.
        max_rows: most sequences in one forward pass.

    Attributes:
        version: vLLM's label of the weights.
    """

    def __init__(
        self, model: Any, *, end_ids: frozenset[int], vocabulary: int, context: int, max_rows: int = 64
    ) -> None:
        self._llm, self._end_ids, self._max_rows = model, end_ids, max_rows
        self._vocabulary, self._context = vocabulary, context
        self._changed = threading.Condition()
        self.weights = threading.Lock()
        self._held: list[RunningSequence] = []  # came while the engine did not serve: they begin after the resume
        self._waiting: list[RunningSequence] = []
        self._batches = [Batch(model)]  # requests begin in the last one; those before it have keys of older weights
        self._state: Literal["serving", "draining", "paused", "stopped"] = "serving"
        self.version = "default"
        self._thread = threading.Thread(target=self._run, name="generate", daemon=True)
        self._thread.start()

    @property
    def paused(self) -> bool:
        """Whether no token is made."""
        return self._state in ("paused", "stopped")

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def running(self) -> int:
        """The number of sequences that have begun and not ended."""
        return len(self._sequences())

    def check(self, tokens: Sequence[int]) -> None:
        """Refuse tokens that the model does not know.

        Raises:
            ConfigError: names one of them.
        """
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < self._vocabulary:
                raise ConfigError(f"the model has no token {token}", expected=f"< {self._vocabulary}")

    def submit(self, request: GenerateRequest) -> Job:
        """Queue a request; while paused it waits for the resume.

        Raises:
            ConfigError: the prompt does not fit the context, or there is a token that the model does not know.
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
        """Make no more tokens, and return when none is being made.

        Args:
            mode: ``keep`` freezes what runs, ``wait`` lets it finish first, ``abort`` ends it with what there is.
            timeout_s: deadline of ``wait``.

        Raises:
            ConfigError: there is no such mode.
            DeadlineError: requests were still running; they are frozen.
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
            with self.weights:  # wait until the round that was under way is over
                pass
        if mode == "abort":
            self._abort()
        if late:
            raise DeadlineError(
                f"requests were still running {timeout_s:g} s after pause?mode=wait",
                state="the engine is paused and they are frozen",
                hint="resume to let them go on, or pause with mode=abort",
            )

    def resume(self) -> None:
        """Let sequences go on, and requests that wait begin."""
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
        """Drop the keys and values of what runs: old weights made them. The next step computes them anew."""
        with self.weights:
            self._batches = [Batch(self._llm, self._sequences())]

    def changed(self, label: str | None) -> None:
        """Take note that the weights are others now, called ``label`` if it is not None; the caller holds `weights`.

        Keys and values stay, until `forget`: requests that begin from now on get a batch of their own, since rows that
        join a batch have those of all its rows computed anew.
        """
        self.version = self.version if label is None else label
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
                    room = self._max_rows - len(self._sequences())
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
