"""`Health`: which engines are well, known in one place to everybody who sends them requests or weights."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable

__all__ = ["Health"]

Changed = Callable[[str, Exception | None], None]


class Health:
    """Complaints about engines, by address and by who complains; an engine is well while there is none.

    A pool complains of engines that an update lost, requests of engines that refused them, a supervisor of processes
    that ended. Each withdraws only its own complaint. Safe to use from many threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._complaints: defaultdict[str, dict[str, tuple[Exception, float]]] = defaultdict(dict)
        self._subscribers: list[Changed] = []

    def __reduce__(self) -> tuple[type[Health], tuple[()]]:
        return Health, ()  # another process makes its own observations

    def fail(self, url: str, why: Exception, *, by: str, for_s: float = float("inf")) -> None:
        """Complain of an engine.

        Args:
            url: its base address, as `torchrl_ext.rpc.http.normalise_url` gives it.
            why: the reason; a later complaint by the same party takes its place.
            by: who complains.
            for_s: seconds after which the complaint is withdrawn by itself.
        """
        with self._lock:
            before = self._why(url)
            self._complaints[url][by] = (why, time.monotonic() + for_s)
        if before is None:
            self._tell(url, why)

    def mend(self, url: str, *, by: str) -> None:
        """Withdraw the complaint that ``by`` has of an engine; do nothing where it has none."""
        with self._lock:
            before = self._why(url)
            self._complaints[url].pop(by, None)
            after = self._why(url)
        if before is not None and after is None:
            self._tell(url, None)

    def why(self, url: str, *, by: str | None = None) -> Exception | None:
        """Return the reason of a complaint about an engine; None while it is well.

        Args:
            by: asks for this party's complaint only.
        """
        with self._lock:
            return self._why(url, by)

    def subscribe(self, changed: Changed) -> None:
        """Call ``changed`` with an address and the reason when an engine becomes unwell, and with None when it is well
        again, in the thread that says so. A complaint that ends by its time is not announced."""
        self._subscribers.append(changed)

    def _why(self, url: str, by: str | None = None) -> Exception | None:
        now, complaints = time.monotonic(), self._complaints[url].items()
        return next((why for party, (why, until) in complaints if until > now and by in (None, party)), None)

    def _tell(self, url: str, why: Exception | None) -> None:
        for changed in self._subscribers:
            changed(url, why)
