"""`Board`: the notes of a group as each of its ranks sees them, JSON by name."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchrl_ext.errors import TransportError
from torchrl_ext.transports.collective.notes import Notes
from torchrl_ext.transports.collective.notes_link import NotesLink

__all__ = ["Board", "GroupStore"]


class Board:
    """JSON notes that every rank of a group can read.

    Args:
        address, port: of the trainer; port 0 lets the trainer's own board pick a free one.
        host: this is the trainer, which keeps the notes.
        timeout_s: how long a worker waits for the trainer to listen, and then for each of its answers, in seconds.
        stop: set by another thread to end every wait.
        secret: what only trainer and workers know; "" lets in whoever finds the port.

    Raises:
        DeadlineError: no trainer listens at the address, or what listens does not answer.
        TransportError: the port is taken; or the trainer has another secret.
    """

    def __init__(
        self, address: str, port: int, *, host: bool, timeout_s: float, stop: threading.Event, secret: str = ""
    ) -> None:
        self.stop, self.secret = stop, secret
        self._keeper = _kept(address, port, secret) if host else NotesLink(address, port, secret, timeout_s, stop)
        self.host, self.port = address, self._keeper.port
        self.address = f"{address}:{self.port}"
        # at the end of a process its connections close by themselves: those of a fork would end its parent's
        weakref.finalize(self, self._keeper.close).atexit = False

    def limit_waits(self, timeout_s: float) -> None:
        """Worker: how long the trainer may take for an answer from now on."""
        self._keeper.patience_s = timeout_s

    def close(self) -> None:
        """Leave; the trainer's ends the notes. May be called twice."""
        self._keeper.close()

    def put(self, key: str, value: Any) -> None:
        """Write a note."""
        self._keeper.set(key, json.dumps(value, separators=(",", ":")).encode())

    def get(self, key: str) -> Any:
        """Read a note that is known to be there.

        Raises:
            TransportError: it is not, or is no JSON.
        """
        body = self.wait_bytes(key, 0.0)
        try:
            return json.loads(body or b"")
        except (ValueError, RecursionError) as error:
            raise TransportError(
                f"the note {key!r} at {self.address} cannot be read: {error}",
                expected="a note of a trainer or worker of the same version",
                state="nothing was moved",
                hint="give each training job a port of its own",
            ) from error

    def take(self, key: str) -> Any:
        """`get`, then `drop`."""
        value = self.get(key)
        self.drop(key)
        return value

    def drop(self, key: str) -> None:
        """Remove a note, if it is there."""
        self._keeper.drop(key)

    def sweep(self, *beginnings: str) -> None:
        """Trainer: remove every note whose name begins with one of these."""
        self._keeper.sweep(*beginnings)

    def has(self, key: str) -> bool:
        """Whether the note is there."""
        return self.wait_bytes(key, 0.0) is not None

    def missing(self, keys: Sequence[str], until: float) -> list[str]:
        """Wait for notes; those that are still missing at the deadline (or when stopped)."""
        for at, key in enumerate(keys):
            if self.wait_bytes(key, until) is None:
                return [key for key in keys[at:] if not self.has(key)]
        return []

    def put_bytes(self, key: str, value: bytes) -> None:
        """As `put`, without JSON."""
        self._keeper.set(key, value)

    def wait_bytes(self, key: str, until: float) -> bytes | None:
        """A note as it is; None when it did not come until then, or when stopped."""
        return self._keeper.wait(key, until, self.stop)


def _kept(address: str, port: int, secret: str) -> Notes:
    try:
        return Notes(address, port, secret)
    except OSError as error:
        raise TransportError(
            f"the trainer cannot listen at {address}:{port}: {error}",
            state="no group was formed",
            hint="pick another master_port, or 0 for a free one",
        ) from error


class GroupStore(dist.Store):
    """What torch's backends want to know of each other, on a `Board`. For gloo, which asks while it is constructed.

    Args:
        board: whose notes.
        until: monotonic moment until which a backend waits for a note.
    """

    def __init__(self, board: Board, until: float) -> None:
        super().__init__()
        self._board, self._until = board, until

    def set(self, key: str, value: bytes | str) -> None:
        """Leave a value."""
        self._board.put_bytes(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """A value, as soon as it is there.

        Raises:
            TransportError: it did not come in time, or another thread aborted.
        """
        found = self._board.wait_bytes(key, self._until)
        if found is None:
            raise TransportError(f"nothing was left under {key!r}")
        return found

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until values are there; errors as `get`."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether values are there."""
        return all(self._board.has(key) for key in keys)

    def has_extended_api(self) -> bool:
        """Whether several values can be asked for at once."""
        return False
