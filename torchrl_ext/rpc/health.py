"""`Health`: a shared record of which engines are healthy, for everything that sends them requests or weights."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from torchrl_ext.deadline import in_thread

__all__ = ["Health"]

Changed = Callable[[str, Exception | None], None]


class Health:
    """Complaints about engines, by address and reporter; an engine without complaints is healthy.

    A pool reports engines that an update lost, routing reports engines with outdated weights, and rollout requests
    report engines that refused them. Each reporter withdraws only its own complaint. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._complaints: dict[str, dict[str, tuple[Exception, float]]] = {}
        self._subscribers: list[Changed] = []

    def __reduce__(self) -> tuple[type[Health], tuple[()]]:
        return Health, ()  # a copy in another process starts empty

    def fail(self, url: str, why: Exception, *, by: str, for_s: float = float("inf")) -> None:
        """Report an unhealthy engine.

        Args:
            url: the engine's base address, as `torchrl_ext.rpc.http.normalise_url` returns it.
            why: the reason; replaces the reporter's earlier complaint.
            by: the reporter.
            for_s: seconds until the complaint expires.
        """
        with self._lock:
            before, now = self._why(url), time.monotonic()
            for known in list(self._complaints):
                self._keep(known, {by: one for by, one in self._complaints[known].items() if one[1] > now})
            self._complaints.setdefault(url, {})[by] = (why, now + for_s)
        if before is None:
            self._tell(url, why)

    def mend(self, url: str, *, by: str) -> None:
        """Withdraw the complaint of ``by`` about an engine, if there is one."""
        with self._lock:
            before = self._why(url)
            self._keep(url, {party: one for party, one in self._complaints.get(url, {}).items() if party != by})
            after = self._why(url)
        if before is not None and after is None:
            self._tell(url, None)

    def forget(self, url: str) -> None:
        """Drop every complaint about an engine that has left, without an announcement."""
        with self._lock:
            self._complaints.pop(url, None)

    def why(self, url: str, *, by: str | None = None) -> Exception | None:
        """Return the reason for a complaint about an engine (by ``by``, if given); None if there is no complaint."""
        with self._lock:
            return self._why(url, by)

    def subscribe(self, changed: Changed) -> None:
        """Call ``changed(url, reason)`` when an engine becomes unhealthy and ``changed(url, None)`` when it recovers.

        The call runs in the reporter's thread; for a reporter on an event loop, in a thread of its own, because it may
        wait for that loop. The expiry of a complaint is not announced.
        """
        self._subscribers.append(changed)

    def _why(self, url: str, by: str | None = None) -> Exception | None:
        now, complaints = time.monotonic(), self._complaints.get(url, {}).items()
        return next((why for party, (why, until) in complaints if until > now and by in (None, party)), None)

    def _keep(self, url: str, complaints: dict[str, tuple[Exception, float]]) -> None:
        if complaints:
            self._complaints[url] = complaints
        else:
            self._complaints.pop(url, None)

    def _tell(self, url: str, why: Exception | None) -> None:
        for changed in self._subscribers:
            loop = None
            with suppress(RuntimeError):
                loop = asyncio.get_running_loop()
            if loop is None:
                changed(url, why)
            else:
                in_thread(partial(changed, url, why), f"tell of {url}")
