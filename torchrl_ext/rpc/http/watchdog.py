"""A deadline over a whole HTTP call."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

__all__ = ["Watchdog"]


class Watchdog:
    """Ends a call at its deadline, also when bytes keep dripping in: httpx's own limits hold for each read alone.

    Args:
        limit_s: seconds from here to the deadline.

    Attributes:
        expired: whether the call was cut.
    """

    def __init__(self, limit_s: float) -> None:
        self._until = time.monotonic() + limit_s
        self._timer = threading.Timer(limit_s, self._expire)
        self._timer.daemon = True
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.expired = False

    def __enter__(self) -> Watchdog:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def left_s(self) -> float:
        """Seconds until the deadline.

        Raises:
            TimeoutError: none are left.
        """
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Called by httpcore at each step of the call; keeps the newest socket."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            with self._lock:
                self._socket = info["return_value"].get_extra_info("socket")
            if self.expired:
                self._expire()

    def _expire(self) -> None:
        with self._lock:
            self.expired = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # it is closed already
                    self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
