"""How a trainer tells its workers of a handoff when no control layer does: by numbered notes."""

from __future__ import annotations

import time
from typing import Any

from torchrl_ext.errors import NotConnectedError, TransportError
from torchrl_ext.transports.base import deadline
from torchrl_ext.transports.collective.acks import stop_reason
from torchrl_ext.transports.collective.group import Group
from torchrl_ext.types import Info

__all__ = ["Announcements"]

_LOOK_S = 0.5
"""How often a worker that waits looks whether its group is still there."""


class Announcements:
    """One rank's place in the sequence of a group's announcements.

    Args:
        group: whose ranks they are for.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._count = 0
        self._rows: list[Any] | None = None

    def put(self, info: Info) -> None:
        """Trainer: the next announcement. Whoever reads it has read the one before, which goes."""
        self._count += 1
        rows = info["params"]
        short = {**info, "params": None} if rows == self._rows else info  # a model's list of parameters rarely changes
        self._group.notes.put(self._key(self._count), short)
        self._group.notes.drop(self._key(self._count - 1))
        self._rows = rows

    def get(self, timeout_s: float) -> Info | None:
        """Worker: the next announcement, or None after ``timeout_s`` seconds.

        Raises:
            NotConnectedError: the trainer ended the group, or is gone, or another thread aborted.
            TransportError: what is announced is no handoff.
        """
        group, key = self._group, self._key(self._count + 1)
        until = deadline(timeout_s)
        try:
            while group.notes.missing([key], min(until, deadline(_LOOK_S))):
                reason = self._ended()
                if reason is not None:
                    raise NotConnectedError(
                        f"rank {group.rank} is no longer connected to the trainer, {group.call([0])}: {reason}",
                        hint="connect again when the trainer does",
                    )
                if time.monotonic() >= until:
                    return None
            info = group.notes.get(key)
        except NotConnectedError:
            group.sever()
            raise
        self._count += 1
        if type(info) is dict:
            self._rows = info["params"] = self._rows if info.get("params") is None else info["params"]
        if type(info) is not dict or type(self._rows) is not list:
            raise TransportError(
                f"the trainer, {group.call([0])}, announced {str(info)[:200]!r}",
                expected="what its transport says of a handoff, with a list of parameters",
                state="nothing was received",
                hint="use the same version of torchrl_ext on every rank",
            )
        return info

    def _ended(self) -> str | None:
        if self._group.notes.stop.is_set():
            return "this rank aborted"
        return stop_reason(self._group) or (None if self._group.whole else "a connection of the group was closed")

    def _key(self, number: int) -> str:
        return f"announced/{self._group.generation}/{number}"
