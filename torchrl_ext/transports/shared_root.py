"""A probe in a directory that trainer and workers must both see, which tells whether they do."""

from __future__ import annotations

import re
import socket
import threading
import time
import uuid
from contextlib import suppress

from torchrl_ext.errors import IntegrityError, StoreError, TransportError
from torchrl_ext.stores import Store
from torchrl_ext.stores.local import TEMPORARY
from torchrl_ext.transports.base import deadline
from torchrl_ext.types import Info

__all__ = ["VISIBLE_S", "SharedRoot"]

VISIBLE_S = 2.0  # seconds that a shared filesystem may take to show a new name
_LOOK_S = 0.1
_PROBE = re.compile(re.escape(f".probe{TEMPORARY}") + "[0-9a-f]{32}")


class SharedRoot:
    """Writes the probe on the trainer end, and looks for it on a worker end.

    Args:
        store: the directory (or bucket), as this process sees it.
        token: what the probe holds; names the trainer's run.

    Attributes:
        probe: the key of the probe that lies there, if one does.
    """

    def __init__(self, store: Store, token: str) -> None:
        self._store, self._token = store, token
        self.probe: str | None = None

    def invite(self) -> Info:
        """Write a probe, and return what workers need to look for it (trainer end)."""
        self.clear()
        self.probe = TEMPORARY.join((".probe", uuid.uuid4().hex))
        self._store.put(self.probe, self._token.encode())
        return {
            "root": self._store.url,
            "probe": self.probe,
            "run_id": self._token,
            "host": socket.gethostname(),
        }

    def clear(self) -> None:
        """Remove the probe, if there is one (trainer end)."""
        if self.probe is not None:
            with suppress(StoreError):
                self._store.delete(self.probe)
            self.probe = None

    def find(self, info: Info, timeout_s: float, aborted: threading.Event) -> None:
        """Look for the trainer's probe (worker end).

        Raises:
            StoreError: it is not here, so the root is only visible to the trainer, or another directory.
            TransportError: another thread set ``aborted`` meanwhile.
            IntegrityError: ``info`` is not one of `invite`.
        """
        root, host, probe, token = (_text(info, field) for field in ("root", "host", "probe", "run_id"))
        if not _PROBE.fullmatch(probe):
            raise IntegrityError(
                f"the probe of a shared root is {probe!r}",
                expected="a name as the trainer gives one",
                state="nothing was read",
            )
        here, trainer = f"{self._store.url} on {socket.gethostname()}", f"{root} on {host}"
        until = deadline(min(VISIBLE_S, timeout_s))
        aborted.clear()  # an earlier abort ended the waits of its time, and not this one
        while True:
            with suppress(FileNotFoundError):
                found = self._store.get(probe)
                break
            if not self._store.available() or time.monotonic() > until:
                raise StoreError(
                    f"{here} does not hold what the trainer wrote into {trainer}: this root is only visible to the "
                    "trainer",
                    expected=f"the file {probe}",
                    state="no weights were sent; this engine serves what it has",
                    hint="pick a root on a filesystem that is mounted on both hosts under the same path",
                )
            if aborted.wait(_LOOK_S):
                raise TransportError("joining the trainer was aborted", state="this engine serves what it has")
        if found != token.encode(errors="replace"):
            raise StoreError(
                f"{here} and {trainer} are different directories",
                expected="one directory that both ends see",
                state="no weights were sent; this engine serves what it has",
                hint="pick a root on a filesystem that is mounted on both hosts under the same path",
            )


def _text(info: Info, field: str) -> str:
    value = info.get(field)
    if not isinstance(value, str) or "\0" in value:
        raise IntegrityError(f"{field} of a shared root is {value!r}", expected="a name", state="nothing was read")
    return value
