"""The embedded engine's HTTP connections: those on which no request comes are closed, so that others find room."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

__all__ = ["patient"]

_BASE: Any = AutoHTTPProtocol


def patient(*, head_s: float = 10.0, most: int = 128, crowded_s: float = 1.0) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with deadlines for the head of a request, which anybody may begin without a key.

    Args:
        head_s: how long a connection may be open without a request in work, in seconds.
        most: number of such connections from which on further ones have only ``crowded_s``.
        crowded_s: enough for a client that has a request to send, in seconds.
    """
    waiting: dict[Any, asyncio.TimerHandle] = {}

    class Connection(_BASE):  # type: ignore[misc]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._look()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._look()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._look()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._leave()

        def _look(self) -> None:
            """Begin or end this connection's wait; parts of a head do not prolong it."""
            if self.cycle is not None and not self.cycle.response_complete:
                self._leave()
            elif self not in waiting and not self.transport.is_closing():
                allowed_s = head_s if len(waiting) < most else crowded_s
                waiting[self] = self.loop.call_later(allowed_s, self.transport.close)

        def _leave(self) -> None:
            if self in waiting:
                waiting.pop(self).cancel()

    return Connection
