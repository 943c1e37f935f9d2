"""NIXL's agents: where the library is, how an agent is made, and the memory that is registered with it."""

from __future__ import annotations

import importlib
import logging
from contextlib import suppress
from typing import Any

import torch

from torchrl_ext.errors import ConfigError
from torchrl_ext.transports.group.peers import Move

__all__ = ["KEPT", "UNUSED_BYTES", "Registered", "load_nixl", "make_agent"]

_MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")

KEPT = 1024
"""Storages that stay registered."""
UNUSED_BYTES = 64 << 20
"""Bytes of storages that nobody else holds any more, beyond which they are let go of at the next registration."""

_Key = tuple[int, int]


def load_nixl() -> Any:
    """Return NIXL's Python interface.

    Raises:
        ConfigError: it is not installed.
    """
    raises = logging.raiseExceptions
    try:
        for name in _MODULES:
            with suppress(ImportError, RuntimeError, OSError):  # there, but made for another CUDA
                found = importlib.import_module(name)
                logger = logging.getLogger("nixl")
                if logger.level == logging.INFO:  # which it prints to standard output
                    logger.setLevel(logging.WARNING)
                return found
    finally:
        logging.raiseExceptions = raises  # NIXL sets it for the whole process
    raise ConfigError(
        "NIXL is not installed here",
        expected=f"one of the modules {', '.join(_MODULES)}",
        hint="pip install 'torchrl_ext[nixl]', or use the backend 'gloo' or 'nccl'",
    )


def make_agent(api: Any, name: str) -> Any:
    """Return an agent of this name, without a thread of its own, which would take a core.

    Raises:
        RuntimeError: NIXL cannot start, or has no UCX.
    """
    try:
        agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"], enable_prog_thread=False))
    except Exception as error:  # NIXL's errors have no root of their own
        raise RuntimeError(f"NIXL cannot start: {error}") from error
    if "UCX" not in agent.backends:
        raise RuntimeError("this build of NIXL has no UCX")
    return agent


class Registered:
    """The storages that transfers use, each registered once and held, since what is registered must not be freed.

    Args:
        agent: NIXL's.

    Attributes:
        state: how often storages were let go of that peers may know, and how many peers may know since the beginning.
            A peer that knows another first number must forget all, as addresses may have come to be used again; one
            that knows another second number lacks some.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._held: dict[_Key, tuple[torch.UntypedStorage, Any]] = {}  # the one used last comes last
        self._users: dict[Move, _Key] = {}
        self._offered: set[_Key] = set()
        self.state = (0, 0)

    def enter(self, move: Move) -> None:
        """Register the memory of a transfer, unless it is, and hold it until `leave`."""
        if move in self._users or move.flat is None:
            return
        storage = move.flat.untyped_storage()
        key = (storage.data_ptr(), storage.nbytes())
        if key in self._held:
            self._held[key] = self._held.pop(key)
        else:
            self._make_room()
            kind, index = ("VRAM", storage.device.index) if storage.is_cuda else ("DRAM", 0)
            self._held[key] = storage, self._agent.register_memory([(*key, index, "")], kind)
        if move.sends and key not in self._offered:
            self._offered.add(key)
            self.state = self.state[0], self.state[1] + 1
        self._users[move] = key

    def leave(self, move: Move) -> None:
        """Tell that a transfer does not use its memory any more."""
        self._users.pop(move, None)

    def sweep(self) -> None:
        """Let go of what nobody else holds."""
        self._let_go(self._unused())

    def close(self) -> None:
        """Let go of everything, also of the agent."""
        self._users.clear()
        self._let_go(list(self._held))
        self._agent = None

    def _make_room(self) -> None:
        unused = self._unused()
        if sum(nbytes for _, nbytes in unused) > UNUSED_BYTES:
            self._let_go(unused)
        if len(self._held) >= KEPT:
            used = set(self._users.values())
            self._let_go([key for key in self._held if key not in used][: max(1, KEPT // 4)])

    def _unused(self) -> list[_Key]:
        used = set(self._users.values())
        return [key for key, (storage, _) in self._held.items() if key not in used and _holders(storage) == 1]

    def _let_go(self, keys: list[_Key]) -> None:
        for key in keys:
            storage, described = self._held.pop(key)
            with suppress(Exception):  # an agent that is broken lets go of all at its end
                self._agent.deregister_memory(described)
            del storage
        if self._offered.intersection(keys):
            self._offered.difference_update(keys)
            self.state = self.state[0] + 1, self.state[1]


def _holders(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))
