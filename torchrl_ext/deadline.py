"""`Deadline`: how long a wait may last, what ends it early, whom its error names; and calls that run beside others."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar, final

from torchrl_ext.errors import DeadlineError, TransportError, WeightSyncError

__all__ = ["Deadline", "beside", "in_thread", "one_at_a_time"]

Found = TypeVar("Found")

_SHORTEST_S, _LONGEST_S, _GROWTH = 0.02, 1.0, 1.5


@final
class Deadline:
    """The moment until which a wait may last, a flag that ends it early, and the party that is waited for.

    A value is passed down to every wait of one step, so that the step has one deadline however many waits it takes, and
    one flag (``stop``) that another thread sets to end them all.

    Args:
        timeout_s: seconds from now.
        who: the party that is waited for, as a message names it: ``"worker 3 (pid 17 on host)"``.
        stop: ends every wait under this deadline when it is set; by default one of its own.

    Attributes:
        until: monotonic moment.
    """

    def __init__(self, timeout_s: float, who: str = "the other end", stop: threading.Event | None = None) -> None:
        self.timeout_s, self.who = timeout_s, who
        self.until = time.monotonic() + timeout_s
        self.stop = threading.Event() if stop is None else stop

    def again(self, who: str | None = None) -> Deadline:
        """Return a deadline of as many seconds that begins now, under the same flag: for the next wait of a step."""
        return Deadline(self.timeout_s, self.who if who is None else who, self.stop)

    def within(self, timeout_s: float) -> Deadline:
        """Return a deadline of ``timeout_s`` seconds from now that is no later than this one, under the same flag."""
        return Deadline(min(timeout_s, self.left_s), self.who, self.stop)

    @property
    def left_s(self) -> float:
        """The seconds that are left; 0 from the moment on."""
        return max(0.0, self.until - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether the moment has come, or another thread ended the wait."""
        return self.stop.is_set() or time.monotonic() >= self.until

    def error(self, what: str = "", **parts: str | None) -> WeightSyncError:
        """Return the error for a wait that is `over`.

        Args:
            what: what did not happen, such as ``"rank 2 did not arrive"``; by default, that `who` did not answer.
            parts: ``expected``, ``state``, ``hint`` of the error.

        Returns:
            DeadlineError at the moment; TransportError where another thread ended the wait before.
        """
        what = what or f"{self.who} did not answer"
        if self.stop.is_set():
            return TransportError(f"{what} before the wait was ended by a failure elsewhere, or an abort", **parts)
        return DeadlineError(f"{what} within {self.timeout_s:g} s", **parts)

    def check(self, what: str = "", **parts: str | None) -> None:
        """Raise the `error` of a wait that is `over`; do nothing before."""
        if self.over:
            raise self.error(what, **parts)

    def pauses(self, *, shortest_s: float = _SHORTEST_S, longest_s: float = _LONGEST_S) -> Iterator[float]:
        """Yield the turns of a loop that polls something, each as the seconds that are left.

        There is a first turn in any case, and a last one at the deadline, unless another thread ends the wait. The
        pauses between turns grow by half.

        Args:
            shortest_s: the first pause, in seconds.
            longest_s: no pause is longer, in seconds.
        """
        pause_s = shortest_s
        while True:
            yield self.left_s
            left_s = self.left_s
            if left_s <= 0 or self.stop.wait(min(pause_s, left_s)):
                return
            pause_s = min(longest_s, _GROWTH * pause_s)

    def poll(
        self,
        ask: Callable[[], Found],
        what: str = "",
        *,
        late: Callable[[], Exception] | None = None,
        shortest_s: float = _SHORTEST_S,
        longest_s: float = _LONGEST_S,
        **parts: str | None,
    ) -> Found:
        """Call ``ask`` until it returns something true, and return that.

        Args:
            ask: the question; any error that it raises ends the wait.
            what: what did not happen, as in `error`.
            late: makes the error in place of `error`, where it takes a last look to describe.
            shortest_s, longest_s: as in `pauses`.
            parts: as in `error`.

        Raises:
            DeadlineError, TransportError: the `error` with ``what`` and ``parts``, or the one that ``late`` makes.
        """
        for _ in self.pauses(shortest_s=shortest_s, longest_s=longest_s):
            found = ask()
            if found:
                return found
        raise self.error(what, **parts) if late is None else late()


@contextmanager
def one_at_a_time(lock: threading.Lock, error: Exception) -> Iterator[None]:
    """Hold ``lock`` during the block; raise ``error`` at once where another thread holds it."""
    if not lock.acquire(blocking=False):
        raise error
    try:
        yield
    finally:
        lock.release()


def in_thread(call: Callable[[], Found], name: str) -> Future[Found]:
    """Run ``call``, which may never return, in a thread that nobody has to wait for, not even the end of the process.

    Returns:
        The future of what it returns or raises; its ``result(timeout)`` is a wait with a deadline.
    """
    job: Future[Found] = Future()
    job.set_running_or_notify_cancel()  # a caller that stops waiting cannot cancel it

    def work() -> None:
        try:
            job.set_result(call())
        except BaseException as error:  # noqa: BLE001 - carried over to the thread that waits
            job.set_exception(error)

    if sys.is_finalizing():  # a thread that is started now never runs; an object that is dropped last may ask for one
        work()
    else:
        threading.Thread(target=work, name=name, daemon=True).start()
    return job


def _append(error: BaseException, cause: BaseException) -> None:
    """Let the chain of causes of ``error`` end with ``cause``."""
    while error is not cause and error.__cause__ is not None:
        error = error.__cause__
    if error is not cause:
        error.__cause__ = cause


@contextmanager
def beside(call: Callable[[Callable[[], None]], None], within: Deadline) -> Iterator[None]:
    """Run ``call`` in a thread beside the block, whose waits are under the same deadline.

    Whichever side fails first sets ``within.stop``, so that neither waits for a party that has given up. The first
    cause is raised, the other one chained to it: an error of the block that is none of a wait is a cause in any case.
    ``call`` must have a deadline of its own.

    Args:
        call: takes a callable for failures that it sees early.
        within: of the block's waits.
    """
    foreseen = threading.Event()

    def early() -> None:
        foreseen.set()
        within.stop.set()

    def run() -> None:
        try:
            call(early)
        except BaseException:
            early()
            raise

    job = in_thread(run, "torchrl-ext-load")
    try:
        yield
    except BaseException as error:
        first = foreseen.is_set() and isinstance(error, (TransportError, DeadlineError))
        within.stop.set()
        other = job.exception()
        if other is None:
            raise
        if first:
            raise other from error
        _append(error, other)
        raise
    job.result()
