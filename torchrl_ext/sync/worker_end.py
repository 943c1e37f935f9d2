"""`WorkerEnd` is one worker of an engine, driven by messages that all workers of the engine get at the same point.

What waits for others (joining a transport, staging a version) runs in a thread of its own, so that the engine goes on
generating, and a trainer that never comes blocks nobody; `Poll` says whether it is over. Workers agree after each step:
where any of them failed, all raise, in the words of all. A pull changes files alone, and goes on beside all of that.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from torchrl_ext.deadline import in_thread
from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, NotConnectedError
from torchrl_ext.landing.loader import WeightLoader
from torchrl_ext.messages import Inspect, Join, Load, Message, Poll, Prefetch, Pull, Rehearse, State
from torchrl_ext.routes import merged
from torchrl_ext.sync.inspection import inspect
from torchrl_ext.sync.receiver import WeightReceiver
from torchrl_ext.types import Info
from torchrl_ext.versions.hooks import PRE_READ_HOOK, read_hook
from torchrl_ext.versions.local_checkpoint import LocalCheckpoint

__all__ = ["WorkerEnd", "joined", "pull", "words_of"]

log = logging.getLogger("torchrl_ext")

_SETTLE_TIMEOUT_S = 120.0


_WORKING = "working"  # what a worker says to the others while it is at work
_OVER: Future[None] = Future()  # stands for a job that came to a good end on every worker
_OVER.set_result(None)


class WorkerEnd:
    """A `WeightReceiver` for one worker's model, in step with the other workers of its engine.

    Args:
        loader: lands weights in this worker's model.
        rank: this worker's rank among all workers of the engine that receive weights.
        workers: how many these are.
        agree: takes this worker's words; returns those of all workers that get the same messages, in order of rank.
        mode: makes the context that is entered around what runs in a thread of its own.
        base: the checkpoint directory that the engine was started with.
    """

    def __init__(
        self,
        loader: WeightLoader,
        *,
        rank: int,
        workers: int,
        agree: Callable[[str], list[str]],
        mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
        base: str | None = None,
    ) -> None:
        self._base, self._rank, self._workers, self._agree, self._mode = base, rank, workers, agree, mode
        self.receiver = WeightReceiver(loader, rank=rank)
        self._staging: Future[None] | None = None  # which may also be joining
        self._pulling: Future[None] | None = None
        self._pulled: Pull | None = None

    def handle(self, message: Message) -> Info:
        """Do what a message says, or begin it.

        Returns:
            The answer, JSON-safe; empty where there is nothing to say.

        Raises:
            EngineError: it failed on a worker; in the words of all, on every one of them.
            EngineRefusedError: another sender has joined since; every worker knows that by itself.
        """
        self.receiver.refuse_replaced(message)
        match message:
            case Inspect():
                return {"worker": self._rank, "workers": self._workers, **inspect(message)}
            case State():
                return self.receiver.handle(message)
            case Join():
                self.together(self._stop, lambda: self._check(message))
                self.receiver.connection = message.connection  # at once: joining goes on in a thread
                self._staging = self._begin(lambda: self.receiver.connect(message))
            case Prefetch():
                self.settle()
                self._staging = self._begin(lambda: self.receiver.prefetch(message))
            case Pull():
                self._pull(message)
            case Poll():
                return {"working": True} if self._is_working(pull=message.pull) else {}
            case Rehearse():
                return self._rehearse(message)
            case Load():
                self.together(lambda: self.receiver.load(message), on_failure=self.receiver.abort)
            case _:
                self.together(self._stop, lambda: self.receiver.handle(message))
        return {}

    def together(self, *steps: Callable[[], Any], on_failure: Callable[[], None] = lambda: None) -> None:
        """Run ``steps``, one after the other, on every worker of this engine.

        Raises:
            EngineError: on every worker, when it failed on any.
        """
        words = ""
        try:
            for step in steps:
                step()
        except Exception as error:
            words = words_of(error)
            log.error("weight update failed on worker %d", self._rank, exc_info=error)
            on_failure()
        failures = self._agree(words)
        if any(failures):
            raise EngineError(joined(failures))

    def settle(self) -> None:
        """End what was begun, but for a pull, on every worker: no thread of ours touches the model any more."""
        self.together(self._stop)

    def close(self) -> None:
        """Leave the transport; a wait in it ends."""
        self.receiver.abort()
        try:
            self._stop()
        finally:
            self.receiver.close()

    def _check(self, message: Join) -> None:
        """Check everything that can be known before a transport is joined, or a weight touched."""
        first, size = message.rank_offset, message.world_size
        if size is not None and not 1 <= first <= size - self._workers:
            raise ConfigError(
                f"this engine's {self._workers} workers from rank {first} on do not fit into a world of {size}",
                expected="a world size of 1 (the trainer) + the workers of all engines, as each engine counts its own",
                state="nothing was joined",
            )
        self.receiver.check(message)

    def _rehearse(self, message: Rehearse) -> Info:
        """Rehearse an update on this worker's part of the model; return an answer that holds for all workers."""
        found: Info = {}
        self.settle()
        self.together(lambda: found.update(self.receiver.rehearse(message)))
        shared = json.dumps({"needed": found["needed"], "proof": found["proof"]})
        return {"worker": self._rank, **found, **merged([*map(json.loads, self._agree(shared))])}

    def _pull(self, message: Pull) -> None:
        """Begin a pull; whoever asks for the same one while it goes on hears of that one.

        Raises:
            EngineError: another one goes on, here or on another worker.
        """
        going = self._pulling is not None and not self._pulling.done()
        if not any(self._agree(_WORKING if going else "")):
            self._pulling = self._begin(lambda: pull(message, self._base))
            self._pulled = message
        elif self._pulled != message:
            raise EngineError(
                f"another pull goes on: {self._pulled}",
                expected="one at a time, or the same one once more",
                state="that one goes on",
                hint="ask again when it is over",
            )

    def _begin(self, work: Callable[[], None]) -> Future[None]:
        """Start ``work`` in a thread of its own."""
        device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

        def aside() -> None:
            if device is not None:  # a new thread begins with the first device
                torch.accelerator.set_device_index(device)
            with self._mode():
                work()

        return in_thread(aside, "torchrl_ext")

    def _is_working(self, *, pull: bool) -> bool:
        """Return whether any worker is still at what was begun last: a pull, or staging (or joining).

        Raises:
            EngineError: it failed on a worker.
        """
        job = self._pulling if pull else self._staging
        if job is _OVER:
            return False  # another replica of a data-parallel server is still at it, and all are asked
        words, error = _WORKING, None
        if job is None:
            words = words_of(NotConnectedError("nothing was begun", hint="connect or prefetch first"))
        elif job.done():
            error = job.exception()
            words = "" if error is None else words_of(error)
        told = self._agree(words)
        failures = ["" if said == _WORKING else said for said in told]
        if any(failures):
            if not pull:
                self.receiver.abort()  # others may wait for those that failed
            if error is not None:
                log.error("what was begun failed on worker %d", self._rank, exc_info=error)
            raise EngineError(joined(failures))
        if any(told):
            return True
        if pull:
            self._pulling = _OVER
        else:
            self._staging = None
            self.together(self.receiver.confirm)
            self._staging = _OVER
        return False

    def _stop(self) -> None:
        job = self._staging
        if job is None or job is _OVER:
            return
        self._staging = None
        if not job.done():
            self.receiver.abort()
            if not wait([job], _SETTLE_TIMEOUT_S).done:
                raise DeadlineError(f"staging did not end within {_SETTLE_TIMEOUT_S:g} s", hint="restart the engine")


def pull(message: Pull, base: str | None) -> None:
    """Bring a checkpoint on this host to a version, after the engine's own hook, where its environment names one.

    Args:
        message: which version of what, and where to.
        base: the checkpoint directory that the engine was started with.

    Raises:
        WeightSyncError: as `LocalCheckpoint.pull`; or there is no such hook.
    """
    before = read_hook(os.environ.get(PRE_READ_HOOK))
    LocalCheckpoint(message.directory, base).pull(message.source, message.version, before=before)


def words_of(error: BaseException) -> str:
    """Return the words in which a worker reports an error."""
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"


def joined(failures: list[str]) -> str:
    """Join the failures of workers into one line; workers that failed in the same words are named together."""
    if len(failures) == 1:
        return failures[0]
    ranks: dict[str, list[str]] = {}
    for rank, words in enumerate(failures):
        if words:
            ranks.setdefault(words, []).append(str(rank))
    return "; ".join(f"worker {', '.join(numbers)}: {words}" for words, numbers in ranks.items())
