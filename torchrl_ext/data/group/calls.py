"""Calls into libraries that take no deadline and cannot be interrupted, also when the process ends."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from torchrl_ext.base.deadline import Deadline, in_thread
from torchrl_ext.base.errors import TransportError, WeightSyncError

__all__ = ["brief", "in_time", "made_in_time", "run_beside", "sever_at_exit"]

_SLICE_S = 0.05
_TEARDOWN_S = 2.0
_CALLS: set[Future[Any]] = set()


def run_beside(call: Callable[[], Any]) -> Future[Any]:
    """Run ``call`` in a thread of its own, and return the future of its result."""
    made = in_thread(call, "torchrl-ext-beside")
    _CALLS.add(made)
    made.add_done_callback(_CALLS.discard)
    return made


def in_time(call: Callable[[], Any], within: Deadline) -> list[Any]:
    """Return the result of ``call`` as a list of one; an empty list where the deadline is over first."""
    made = run_beside(call)
    while not made.done() and not within.over:
        wait([made], _SLICE_S)
    return [made.result()] if made.done() else []


def made_in_time(make: Callable[[], Any], within: Deadline) -> Any:
    """Return the result of ``make``; gloo itself waits several timeouts for a dead peer.

    Raises:
        WeightSyncError: as ``make`` raised it.
        TransportError: torch could not make the connections, or another thread ended the wait.
        DeadlineError: it took too long.
    """
    try:
        made = in_time(make, within)
    except WeightSyncError:
        raise
    except RuntimeError as error:
        raise TransportError(f"connections could not be made: {brief(error)}") from error
    if made:
        return made[0]
    raise within.error("connections were not made")


def brief(error: BaseException) -> str:
    """Return the message of an error of torch's without its stack."""
    return str(error).split("\n")[0].split(" This is typically caused")[0]


_SEVERABLE: weakref.WeakSet[Any] = weakref.WeakSet()


def sever_at_exit(one: Any) -> None:
    """Call ``one.sever()`` at the end of the process, before its modules go."""
    _SEVERABLE.add(one)


@atexit.register
def _sever_all() -> None:
    for one in list(_SEVERABLE):
        one.sever()
    wait(list(_CALLS), _TEARDOWN_S)  # a call into C++ that returns while the interpreter ends takes the process down
