"""Memory that is registered with a NIXL agent, so that network cards can read and write it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from torchrl_ext.transports.collective.carrier import Move

__all__ = ["Registered"]

KEPT = 256
"""Storages that stay registered."""
UNUSED_BYTES = 64 << 20
"""Bytes of storages that nobody else holds any more, from which they are let go in the middle of things."""


class Registered:
    """The storages that transfers use, each registered once and held, since what is registered must not be freed.

    Args:
        agent: NIXL's.

    Attributes:
        state: how often storages were let go of, and how many were registered since the beginning. A peer that knows
            another first number must forget all that it knew, since addresses may have come to be used again.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._held: dict[tuple[int, int], tuple[torch.UntypedStorage, Any]] = {}
        self._users: dict[Move, tuple[int, int]] = {}
        self.state = (0, 0)

    def enter(self, move: Move) -> None:
        """Register the memory of a transfer, unless it is, until the transfer `leave` s."""
        if move in self._users or move.flat is None:
            return
        storage = move.flat.untyped_storage()
        key = (storage.data_ptr(), storage.nbytes())
        if key not in self._held:
            unused = self._unused()
            if len(self._held) >= KEPT or sum(nbytes for _, nbytes in unused) > UNUSED_BYTES:
                self._let_go(unused or [one for one in self._held if one not in self._users.values()])
            kind, index = ("VRAM", storage.get_device()) if storage.is_cuda else ("DRAM", 0)
            self._held[key] = storage, self._agent.register_memory([(*key, index, "")], kind)
            self.state = self.state[0], self.state[1] + 1
        self._users[move] = key

    def leave(self, move: Move) -> None:
        """Tell that a transfer does not use its memory any more."""
        self._users.pop(move, None)

    def sweep(self) -> None:
        """Let go of what nobody else holds."""
        self._let_go(self._unused())

    def close(self) -> None:
        """Let go of everything."""
        self._users.clear()
        self._let_go(list(self._held))

    def _unused(self) -> list[tuple[int, int]]:
        used = set(self._users.values())
        # one holder is ours; a storage that lives in Python only counts itself
        return [key for key, (storage, _) in self._held.items() if key not in used and _holders(storage) <= 1]

    def _let_go(self, keys: list[tuple[int, int]]) -> None:
        for key in keys:
            storage, described = self._held.pop(key)
            with suppress(Exception):  # the agent may be broken, and its memory is freed with it
                self._agent.deregister_memory(described)
            del storage
        if keys:
            self.state = self.state[0] + 1, self.state[1]


def _holders(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))
