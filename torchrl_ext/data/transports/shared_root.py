"""A probe in a directory that trainer and workers must both see, which tells whether they do."""

from __future__ import annotations

import re
import socket
import uuid
from contextlib import suppress

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import IntegrityError, StaleBaseError, StoreError
from torchrl_ext.base.types import Info, Wire
from torchrl_ext.data.stores.local import TEMPORARY
from torchrl_ext.data.stores.store import Store

__all__ = ["VISIBLE_S", "Invitation", "SharedRoot"]

VISIBLE_S = 2.0  # seconds that a shared filesystem may take to show a new name
_LOOK_S = 0.1
_PROBE = re.compile(re.escape(f".probe{TEMPORARY}") + "[0-9a-f]{32}")
_NOT_SENT = "no weights were sent; this engine still serves its previous weights"


class Invitation(Wire, frozen=True, kw_only=True):
    """Where the trainer left a probe.

    Attributes:
        root: of the versions, as workers see it.
        probe: the key of the probe.
        run_id: names the trainer's run; the content of the probe.
        trainer: where the trainer wrote the probe: the path there, and the host.
    """

    root: str
    probe: str
    run_id: str
    trainer: str

    def find(self, store: Store, within: Deadline) -> None:
        """Look for the trainer's probe (worker end).

        Args:
            store: the root, as this process sees it.
            within: ends the wait, which lasts `VISIBLE_S` at most.

        Raises:
            StoreError: it is not here, so the root is only visible to the trainer, or another directory.
            TransportError: another thread ended the wait.
            IntegrityError: the invitation names no probe.
        """
        if not _PROBE.fullmatch(self.probe):
            raise IntegrityError(
                f"the probe of a shared root is {self.probe!r}",
                expected="a name as the trainer gives one",
                state="nothing was read",
            )
        here, trainer = f"{store.url} on {socket.gethostname()}", self.trainer
        found = None
        for _ in within.within(VISIBLE_S).pauses(shortest_s=_LOOK_S, longest_s=_LOOK_S):
            with suppress(FileNotFoundError):
                found = store.get(self.probe)
            if found is not None or not store.available():
                break
        if found is None and within.stop.is_set():
            raise within.error("the trainer's root was not found", state=_NOT_SENT)
        if found != self.run_id.encode(errors="replace"):
            raise StoreError(
                f"{here} does not contain the file that the trainer wrote into {trainer}: only the trainer sees this "
                "root"
                if found is None
                else f"{here} and {trainer} are different directories",
                expected=f"the file {self.probe} in one directory that both ends see",
                state=_NOT_SENT,
                hint="choose a root on a filesystem that is mounted on both hosts, under the same path or the one that "
                "seen_at= names",
            )


class SharedRoot:
    """Writes a probe, and invites workers to look for it (trainer end).

    Args:
        store: the directory (or bucket), as this process sees it.
        token: the content of the probe; names the trainer's run.
    """

    def __init__(self, store: Store, token: str) -> None:
        self._store, self._token = store, token
        self._probe: str | None = None  # the key of the one that lies there
        self._invited = False

    def invite(self) -> Info:
        """Write a probe, and return the fields of an `Invitation`."""
        self.clear()
        self._probe = TEMPORARY.join((".probe", uuid.uuid4().hex))
        self._store.put(self._probe, self._token.encode())
        self._invited = True
        trainer = f"{self._store.url} on {socket.gethostname()}"
        return {"root": self._store.url, "probe": self._probe, "run_id": self._token, "trainer": trainer}

    def moved(self) -> None:
        """Refuse a version for workers that were invited into the directory that the root was before.

        Raises:
            StaleBaseError: there are such workers, who may still see that one; the sender has them join again.
        """
        if self._invited:
            self._invited = False
            raise StaleBaseError(
                f"{self._store.url} is another directory now than the one that workers joined",
                expected="a root that stays",
                state="nothing was sent",
                hint="send the weights again: workers then join what is there now",
            )

    def clear(self) -> None:
        """Remove the probe, if there is one."""
        if self._probe is not None:
            with suppress(StoreError):
                self._store.delete(self._probe)
            self._probe = None
