"""`Deadline` bounds every wait of a step; helpers run a call in a thread next to its caller."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar, final

from torchrl_ext.base.errors import DeadlineError, TransportError, WeightSyncError

__all__ = ["Deadline", "beside", "in_thread", "one_at_a_time"]

Found = TypeVar("Found")

_SHORTEST_S, _LONGEST_S, _GROWTH = 0.02, 1.0, 1.5


@final
class Deadline:
    """A deadline and a stop flag, shared by all waits of one step; another thread can set the flag to end them early.

    Args:
        timeout_s: seconds from now.
        who: the peer, as errors name it: ``"worker 3 (pid 17 on host)"``.
        stop: event that ends every wait under this deadline when it is set; None makes a new one.

    Attributes:
        until: the deadline, in seconds of `time.monotonic`.
    """

    def __init__(self, timeout_s: float, who: str = "the other end", stop: threading.Event | None = None) -> None:
        self.timeout_s, self.who = timeout_s, who
        self.until = time.monotonic() + timeout_s
        self.stop = threading.Event() if stop is None else stop

    def again(self, who: str | None = None) -> Deadline:
        """Return a new deadline of the same length that begins now and shares the stop flag."""
        return Deadline(self.timeout_s, self.who if who is None else who, self.stop)

    def within(self, timeout_s: float) -> Deadline:
        """Return a deadline ``timeout_s`` seconds from now, but not after this one, that shares the stop flag."""
        return Deadline(min(timeout_s, self.left_s), self.who, self.stop)

    @property
    def left_s(self) -> float:
        """Seconds left; 0 after the deadline."""
        return max(0.0, self.until - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether the deadline has passed or the stop flag is set."""
        return self.stop.is_set() or time.monotonic() >= self.until

    def error(self, what: str = "", **parts: Any) -> WeightSyncError:
        """Return the error for a wait that is `over`.

        Args:
            what: what did not happen, such as ``"rank 2 did not arrive"``; by default, that `who` did not answer.
            parts: the error's ``expected``, ``state`` and ``hint``.

        Returns:
            A TransportError if the stop flag is set, otherwise a DeadlineError.
        """
        what = what or f"{self.who} did not answer"
        if self.stop.is_set():
            return TransportError(f"{what} before a failure elsewhere, or an abort, ended the wait", **parts)
        return DeadlineError(f"{what} within {self.timeout_s:g} s", **parts)

    def check(self, what: str = "", **parts: Any) -> None:
        """Raise the `error` if the wait is `over`."""
        if self.over:
            raise self.error(what, **parts)

    def pauses(self, *, shortest_s: float = _SHORTEST_S, longest_s: float = _LONGEST_S) -> Iterator[float]:
        """Yield the seconds left at each turn of a polling loop, and sleep between turns.

        There is always a first turn, and one at the deadline unless the stop flag is set. Each sleep is half as long
        again as the one before.

        Args:
            shortest_s: the first sleep, in seconds.
            longest_s: the longest sleep, in seconds.
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
        """Call ``ask`` until it returns a true value, and return that value.

        Args:
            ask: the function to call; an error that it raises ends the wait.
            what, parts: as in `error`.
            late: returns the error to raise at the deadline instead of `error`.
            shortest_s, longest_s: as in `pauses`.

        Raises:
            DeadlineError, TransportError: the `error` for ``what`` and ``parts``, unless ``late`` returns another one.
        """
        for _ in self.pauses(shortest_s=shortest_s, longest_s=longest_s):
            found = ask()
            if found:
                return found
        raise self.error(what, **parts) if late is None else late()


@contextmanager
def one_at_a_time(lock: threading.Lock, error: Exception) -> Iterator[None]:
    """Hold ``lock`` during the block; raise ``error`` at once if it is taken."""
    if not lock.acquire(blocking=False):
        raise error
    try:
        yield
    finally:
        lock.release()


def in_thread(call: Callable[[], Found], name: str) -> Future[Found]:
    """Run ``call``, which may never return, in a daemon thread, and return its future.

    The future cannot be cancelled; ``result(timeout)`` waits with a timeout.
    """
    job = Future[Found]()
    job.set_running_or_notify_cancel()

    def work() -> None:
        try:
            job.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            job.set_exception(error)

    if sys.is_finalizing():  # a thread started now would never run; a finalizer may still call this
        work()
    else:
        threading.Thread(target=work, name=name, daemon=True).start()
    return job


def _append(error: BaseException, cause: BaseException) -> None:
    """Append ``cause`` to the ``__cause__`` chain of ``error``."""
    while error is not cause and error.__cause__ is not None:
        error = error.__cause__
    if error is not cause:
        error.__cause__ = cause


@contextmanager
def beside(call: Callable[[Callable[[], None]], None], within: Deadline) -> Iterator[None]:
    """Run ``call`` in a thread while the block runs; then wait for it, and raise its error.

    The side that fails first sets ``within.stop``, so that the block does not wait for a peer that has given up. If
    both fail, the first error is raised with the other one chained; an error of the block that does not come from a
    wait always counts as the first. ``call`` must have its own deadline.

    Args:
        call: takes a function that it calls to report an early failure.
        within: deadline of the block's waits.
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
