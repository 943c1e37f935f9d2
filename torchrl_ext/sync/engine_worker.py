"""`EngineWorker` handles messages in one worker of an engine; all workers get each message at the same point.

Joining a transport and staging a version wait for other processes, so they run in a thread: the engine keeps
generating, and a missing trainer blocks nothing. `Poll` reports whether the thread is done. Workers agree after each
step: if any of them failed, all raise the errors of all. Only around a commit they do not, as each handles it between
two steps of its own: whoever called them all hears each. What leaves a worker is an answer, never an exception
(`torchrl_ext.base.messages.answered`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torchrl_ext.base.deadline import in_thread
from torchrl_ext.base.devices import current, recorded, settle, wait_for
from torchrl_ext.base.errors import (
    ConfigError,
    DeadlineError,
    EngineRefusedError,
    NotConnectedError,
    error_from,
    error_info,
)
from torchrl_ext.base.messages import (
    Commit,
    Finish,
    Inspect,
    Join,
    Keep,
    Load,
    Message,
    Poll,
    Prefetch,
    Rehearse,
    State,
    Undo,
)
from torchrl_ext.base.routes import merged
from torchrl_ext.base.types import Info
from torchrl_ext.data.landing.loader import WeightLoader
from torchrl_ext.sync.inspection import inspect
from torchrl_ext.sync.receiver import WeightReceiver

__all__ = ["EngineWorker", "together"]

log = logging.getLogger("torchrl_ext")

_SETTLE_TIMEOUT_S = 120.0


_WORKING = "working"  # what a worker reports to the others while its job runs
_OVER: Future[None] = Future()  # stands for a job that succeeded on every worker
_OVER.set_result(None)


class EngineWorker:
    """A `WeightReceiver` for one worker's model, in step with the other workers of its engine.

    Args:
        loader: loads weights into this worker's model.
        rank: this worker's rank among the engine's workers that receive weights.
        workers: number of these workers.
        agree: takes this worker's text; returns the texts of all workers that get the same messages, in order of rank.
        mode: returns the context manager to enter in background threads.
        obstacle: returns why this engine cannot take a version between two steps; "" if it can.

    Attributes:
        together: `together` on the workers of this engine.
    """

    def __init__(
        self,
        loader: WeightLoader,
        *,
        rank: int,
        workers: int,
        agree: Callable[[str], list[str]],
        mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
        obstacle: Callable[[], str] = str,
    ) -> None:
        self._rank, self._workers, self._agree, self._mode = rank, workers, agree, mode
        self.together = partial(together, agree)
        self.receiver = WeightReceiver(loader, rank=rank)
        self._staging: Future[None] | None = None  # or joining
        self._own_obstacle, self._obstacle, self._agreeing = obstacle, "", 1  # the latter two as of the last `Poll`

    def handle(self, message: Message) -> Info:
        """Handle a message; for `Join` and `Prefetch`, only begin the work.

        Returns:
            The answer, JSON-safe and possibly empty.

        Raises:
            EngineRefusedError, DeadlineError: a worker failed; every worker raises it, with the errors of all.
            EngineRefusedError: another sender has joined since; workers check this without `agree`.
        """
        self.receiver.refuse_replaced(message)
        with current(self.receiver.device):
            return self._answer(message)

    def _answer(self, message: Message) -> Info:
        match message:
            case Inspect():
                version = self.receiver.version
                return {"worker": self._rank, "workers": self._workers, "version": version, **inspect(message)}
            case State():
                return self.receiver.handle(message)
            case Join():
                self.together(self.stop, lambda: self._check(message))
                self.receiver.connection = message.connection  # set now, because the thread joins later
                self._staging = self._begin(lambda: self.receiver.connect(message))
            case Prefetch():
                self.together(self.stop)
                self._staging = self._begin(lambda: self.receiver.prefetch(message))
            case Poll():
                return {"working": True} if self._is_working() else {"obstacle": self._obstacle}
            case Commit():
                return self._commit(message)
            case Undo():
                self.stop()
                return self.receiver.handle(message)
            case Keep():
                return self.receiver.handle(message)
            case Rehearse():
                return self._rehearse(message)
            case Load():
                self.together(lambda: self.receiver.load(message), on_failure=self.receiver.abort)
            case Finish():
                self.together(self.stop, lambda: self.receiver.due(message))  # on all, before one notes the version
                return self._of_all(self.receiver.handle(message))
            case _:
                self.together(self.stop, lambda: self.receiver.handle(message))
        return {}

    def close(self) -> None:
        """Leave the transport, and end any wait in it."""
        self.receiver.abort()
        try:
            self.stop()
        finally:
            self.receiver.close()

    def _check(self, message: Join) -> None:
        """Check the ranks and the parameters before the receiver joins a transport or changes a weight."""
        first, size = message.rank_offset, message.world_size
        if size is not None and not 1 <= first <= size - self._workers:
            raise ConfigError(
                f"this engine's {self._workers} workers from rank {first} on do not fit into a world size of {size}",
                expected="a world size of 1 (the trainer) + the workers of all engines",
                state="the engine joined nothing",
            )
        self.receiver.check(message)

    def _rehearse(self, message: Rehearse) -> Info:
        """Rehearse an update on this worker's part of the model; return the answer merged over all workers."""
        found: Info = {}
        self.together(self.stop, lambda: found.update(self.receiver.rehearse(message)))
        shared = json.dumps({"needed": found["needed"], "proof": found["proof"]})
        return {"worker": self._rank, **found, **merged([*map(json.loads, self._agree(shared))])}

    def _commit(self, message: Commit) -> Info:
        if self._staging is not _OVER or self._obstacle:
            why = self._obstacle or "it is not staged"
            raise EngineRefusedError(f"version {message.version} needs a pause: {why}", state="nothing was changed")
        return {**self.receiver.handle(message), "workers": self._agreeing}

    def _of_all(self, answer: Info) -> Info:
        """Return an answer that every worker of this engine gives, with their number."""
        answers = self._agree(json.dumps(answer))
        if len(set(answers)) > 1:
            what = f"the engine's workers hold different weights: {_by_worker(answers)}"
            raise EngineRefusedError(what, hint="call update_weights again, which sends the whole model")
        return {**answer, "workers": len(answers)}

    def _begin(self, work: Callable[[], None]) -> Future[None]:
        device = self.receiver.device
        before = recorded([device])  # the engine may still be writing what ``work`` reads

        def aside() -> None:
            with current(device), self._mode():
                wait_for(before)
                work()
                settle([device])

        return in_thread(aside, "torchrl_ext")

    def _is_working(self) -> bool:
        """Return whether any worker's staging (or joining) still runs; raise EngineError if one failed."""
        job = self._staging
        if job is _OVER:
            return False  # polled again only because another replica of a data-parallel server is still working
        said, error = _WORKING, None
        if job is None:
            said = _said(NotConnectedError("no step has been started", hint="connect or prefetch first"))
        elif job.done():
            error = job.exception()
            said = "" if error is None else _said(error)
        answers = self._agree(said)
        failures = ["" if one == _WORKING else one for one in answers]
        if any(failures):
            self.receiver.abort()  # this worker may wait for the failed ones
            if error is not None:
                log.error("a background step failed on worker %d", self._rank, exc_info=error)
            raise _joined(failures)
        if any(answers):
            return True
        self._staging = None
        self.together(self.receiver.confirm)
        obstacles = self._agree(self.receiver.obstacle() or self._own_obstacle())
        self._obstacle, self._agreeing = next(filter(None, obstacles), ""), len(obstacles)
        self._staging = _OVER
        return False

    def stop(self) -> None:
        """Stop joining or staging on this worker; then no thread of it touches the model.

        Raises:
            DeadlineError: the background thread does not end.
        """
        job = self._staging
        if job is None or job is _OVER:
            return
        self._staging = None
        if not job.done():
            self.receiver.abort()
            if not wait([job], _SETTLE_TIMEOUT_S).done:
                raise DeadlineError(f"staging did not end within {_SETTLE_TIMEOUT_S:g} s", hint="restart the engine")


def together(
    agree: Callable[[str], list[str]], *steps: Callable[[], Any], on_failure: Callable[[], None] = lambda: None
) -> None:
    """Run ``steps`` in order on every worker of an engine; call ``on_failure`` on a worker where one fails.

    Args:
        agree: as for `EngineWorker`.

    Raises:
        EngineRefusedError, DeadlineError: on every worker, if any worker failed.
    """
    said = ""
    try:
        for step in steps:
            step()
    except Exception as error:
        said = _said(error)
        log.error("a step failed on this worker", exc_info=error)
        on_failure()
    failures = agree(said)
    if any(failures):
        raise _joined(failures)


def _said(error: BaseException) -> str:
    return json.dumps(error_info(error))


def _joined(failures: list[str]) -> EngineRefusedError | DeadlineError:
    """Return one error for those of several workers (none is ""), with the parts of the first."""
    errors = {said: error_from(json.loads(said)) for said in failures if said}
    first = next(iter(errors.values()))
    if len(failures) == 1:
        return first
    what = _by_worker([errors[said].what if said else "" for said in failures])
    code = next((error.code for error in errors.values() if error.code), "")
    return type(first)(what, expected=first.expected, state=first.state, hint=first.hint, code=code)


def _by_worker(words: list[str]) -> str:
    """Join the words of workers, grouping those that say the same."""
    ranks: dict[str, list[str]] = {}
    for rank, said in enumerate(words):
        if said:
            ranks.setdefault(said, []).append(str(rank))
    return "; ".join(f"worker {', '.join(numbers)}: {said}" for said, numbers in ranks.items())
