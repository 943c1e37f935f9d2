"""Holds Ctrl-C back while an update runs, so that no engine stays paused."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Interrupts"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Turns SIGINT and SIGTERM into `KeyboardInterrupt`, for the length of a ``with`` block in the main thread.

    An update that runs can be finished first (`deferred`), so that no engine stays paused.
    """

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, Any] = {}
        self._deferring = self._pending = self._ignoring = False
        self._what = ""

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self, what: str) -> Iterator[None]:
        """Hold a first signal back until the end of the block; a second one interrupts the block.

        Args:
            what: what goes on, for the note on standard error.
        """
        self._deferring, self._pending, self._what = True, False, what
        try:
            yield
        finally:
            self._deferring = False
        if self._pending:
            raise KeyboardInterrupt

    def ignore(self) -> None:
        """Ignore signals from now on, since what is left to be done must not be cut short."""
        self._ignoring = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._ignoring:
            return
        if self._deferring and not self._pending:
            self._pending = True
            print(f"finishing {self._what} first; interrupt again to abandon it", file=sys.stderr)
            return
        raise KeyboardInterrupt
