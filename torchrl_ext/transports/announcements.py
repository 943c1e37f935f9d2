"""How a trainer tells its workers of a handoff when no control layer does: numbered notes on the group's board."""

from __future__ import annotations

from typing import Any

from torchrl_ext.errors import NotConnectedError
from torchrl_ext.transports.acks import stop_reason
from torchrl_ext.transports.base import deadline
from torchrl_ext.transports.groups import Group
from torchrl_ext.types import Info

__all__ = ["Announcements"]


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
        self._group.board.put(self._key(self._count), short)
        self._group.board.drop(self._key(self._count - 1))
        self._rows = rows

    def get(self, timeout_s: float) -> Info | None:
        """Worker: the next announcement, or None after ``timeout_s`` seconds.

        Raises:
            NotConnectedError: the trainer ended the group, or is gone, or another thread aborted.
        """
        group, key = self._group, self._key(self._count + 1)
        try:
            if group.board.missing([key], deadline(timeout_s)):
                reason = "this rank aborted" if group.board.stop.is_set() else stop_reason(group)
                if reason is None:
                    return None
                raise NotConnectedError(
                    f"rank {group.rank} is no longer connected to the trainer, {group.call([0])}: {reason}",
                    hint="connect again when the trainer does",
                )
            info = group.board.get(key)
        except NotConnectedError:
            group.sever()
            raise
        self._count += 1
        self._rows = info["params"] = self._rows if info["params"] is None else info["params"]
        return info

    def _key(self, number: int) -> str:
        return f"announced/{self._group.generation}/{number}"
