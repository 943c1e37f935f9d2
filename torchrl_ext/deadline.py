"""Waits with a deadline: for what has to be polled, and for calls that can neither be interrupted nor given one.

Every wait of this package has a deadline, and its error names what it waited for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = ["in_background", "in_thread", "pauses", "wait_until"]

Found = TypeVar("Found")

_SHORTEST_S, _LONGEST_S, _GROWTH = 0.02, 1.0, 1.5


def pauses(
    timeout_s: float,
    stop: threading.Event | None = None,
    *,
    shortest_s: float = _SHORTEST_S,
    longest_s: float = _LONGEST_S,
) -> Iterator[float]:
    """Yield the turns of a loop that polls something, each as the seconds that are left until the deadline.

    There is always a first turn, and a last one at the deadline. The pauses between turns grow by half.

    Args:
        timeout_s: the deadline, in seconds from now.
        stop: ends the loop early, also in the middle of a pause, when it is set.
        shortest_s: the first pause, in seconds.
        longest_s: no pause is longer, in seconds.
    """
    stop = threading.Event() if stop is None else stop
    until, pause_s = time.monotonic() + timeout_s, shortest_s
    while True:
        left_s = until - time.monotonic()
        yield max(0.0, left_s)
        left_s = until - time.monotonic()
        if left_s <= 0 or stop.wait(min(pause_s, left_s)):
            return
        pause_s = min(longest_s, _GROWTH * pause_s)


def wait_until(
    ask: Callable[[], Found],
    timeout_s: float,
    late: Callable[[], Exception],
    *,
    stop: threading.Event | None = None,
    shortest_s: float = _SHORTEST_S,
    longest_s: float = _LONGEST_S,
) -> Found:
    """Call ``ask`` until it returns something true, and return that.

    Args:
        ask: what it raises ends the wait, and is raised.
        timeout_s, stop, shortest_s, longest_s: as for `pauses`.
        late: makes the error to raise where nothing true came by the deadline, or ``stop`` was set before.
    """
    for _ in pauses(timeout_s, stop, shortest_s=shortest_s, longest_s=longest_s):
        found = ask()
        if found:
            return found
    raise late()


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

    threading.Thread(target=work, name=name, daemon=True).start()
    return job


def _append(error: BaseException, cause: BaseException) -> None:
    """Let the chain of causes of ``error`` end with ``cause``."""
    while error is not cause and error.__cause__ is not None:
        error = error.__cause__
    if error is not cause:
        error.__cause__ = cause


@contextmanager
def in_background(call: Callable[..., None], info: Any, abort: Callable[[], None]) -> Iterator[None]:
    """Run ``call(info, abort)`` in a thread beside the block.

    Whichever side fails first aborts the other, so that neither waits for a party that has given up. The first cause
    is raised, the other one chained to it. ``call`` must have a deadline of its own.

    Args:
        call: takes ``info`` and a callable for failures that it sees early.
        info: handed to ``call``.
        abort: unblocks the block; may run in either thread, more than once.
    """
    failures: list[BaseException] = []
    foreseen = threading.Event()

    def early() -> None:
        foreseen.set()
        abort()

    def run() -> None:
        try:
            call(info, early)
        except BaseException as error:  # noqa: BLE001 - carried over to the waiting thread
            failures.append(error)
            abort()

    thread = threading.Thread(target=run, name="torchrl-ext-load", daemon=True)
    thread.start()
    try:
        yield
    except BaseException as error:
        late = not failures and not foreseen.is_set()
        abort()
        thread.join()
        if failures and not late:
            raise failures[0] from error
        for other in failures:
            _append(error, other)
        raise
    thread.join()
    if failures:
        raise failures[0]
