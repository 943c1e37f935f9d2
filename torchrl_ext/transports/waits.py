"""Waits that have a deadline and can be ended, also around calls into libraries that offer neither."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["await_threads", "beside", "in_time", "pauses"]

_PAUSE_S = (0.0005, 0.01)
_SLICE_S = 0.05


def pauses(until: float, stop: threading.Event) -> Iterator[None]:
    """Turns of a loop that asks for something, with growing pauses, until a deadline or ``stop``."""
    pause_s, longest_s = _PAUSE_S
    while not stop.is_set():
        yield
        if time.monotonic() >= until:
            return
        stop.wait(pause_s)
        pause_s = min(pause_s * 1.5, longest_s)


def in_time(call: Callable[[], Any], until: float, stop: threading.Event) -> list[Any]:
    """What a call returns that can neither be given a deadline nor be interrupted, as a list of one; empty when it is
    not back in time, or when stopped.

    It runs in a thread of its own, which is then left to it.
    """
    made: list[Any] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            made.append(call())
        except Exception as error:  # noqa: BLE001 - carried over to the thread that waits
            failed.append(error)

    thread = beside(run)
    while thread.is_alive() and time.monotonic() < until and not stop.is_set():
        thread.join(_SLICE_S)
    if failed:
        raise failed[0]
    return made


_THREADS: list[threading.Thread] = []


def beside(call: Callable[[], None]) -> threading.Thread:
    """A thread around a call into a library that may take its time."""
    thread = threading.Thread(target=call, name="torchrl-ext-beside", daemon=True)
    _THREADS[:] = [other for other in _THREADS if other.is_alive()] + [thread]
    thread.start()
    return thread


def await_threads(until: float) -> None:
    """Let the threads of `beside` end, as far as they do until then."""
    for thread in list(_THREADS):
        thread.join(max(0.0, until - time.monotonic()))
