"""A session that speaks to engines only."""

from __future__ import annotations

import threading
from typing import Any

from torchrl_ext.rpc.http.session import HTTPSession
from torchrl_ext.rpc.router import refuse_router

__all__ = ["DirectSession"]


class DirectSession:
    """An `HTTPSession` for control calls: before its first one it makes sure that no router is at the address.

    Args:
        url, settings: as for `HTTPSession`.

    Raises:
        ConfigError: the address cannot work; from every call, a router listens there.
    """

    def __init__(self, url: str, **settings: Any) -> None:
        self._http = HTTPSession(url, **settings)
        self._checking, self._direct = threading.Lock(), False
        self.url, self.timeout_s = self._http.url, self._http.timeout_s

    def get(self, route: str, **how: Any) -> Any:
        """As `HTTPSession.get`."""
        self._check()
        return self._http.get(route, **how)

    def post(self, route: str, body: Any = None, **how: Any) -> Any:
        """As `HTTPSession.post`."""
        self._check()
        return self._http.post(route, body, **how)

    def call(self, method: str, route: str, body: Any = None, **how: Any) -> Any:
        """As `HTTPSession.call`."""
        self._check()
        return self._http.call(method, route, body, **how)

    def close(self) -> None:
        """Drop all connections. May be called twice; a later call opens anew."""
        self._http.close()

    def _check(self) -> None:
        with self._checking:
            if not self._direct:
                refuse_router(self._http)
                self._direct = True
