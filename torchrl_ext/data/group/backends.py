"""The choice between gloo and NCCL, and the store and the devices that a backend is made of."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # by a star there

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.devices import known_device, usable_device
from torchrl_ext.base.errors import ConfigError, TransportError, WeightSyncError
from torchrl_ext.data.group.calls import in_time
from torchrl_ext.data.group.notes import NoteStore

__all__ = ["GLOO_DEVICES", "GroupStore", "choose_backend", "gloo_options", "nccl_options"]

GLOO_DEVICES = 2
"""Each gloo device has one thread that moves bytes; two of them carry 1.6 times as much as one."""
_GLOO_THREADS = 8
_LATER_S = 5.0
"""Seconds by which gloo's deadline comes after ours: ours raises the error, and gloo's only frees its threads."""
_NEVER = timedelta(days=365)
_LOOK_UP_S = 10.0


def choose_backend(device: torch.device | str | int | None, backend: str | None) -> tuple[torch.device, str]:
    """Return the device of the tensors that travel, and their backend: gloo on the CPU, NCCL on CUDA.

    Args:
        device: by default the current CUDA device, or the CPU without one or with gloo.
        backend: ``"gloo"`` or ``"nccl"``; by default that of the device.

    Raises:
        ConfigError: no such backend, or one that cannot move tensors of this device; or there is no such device.
    """
    if backend not in (None, "gloo", "nccl"):
        raise ConfigError(f"there is no collective backend {backend!r}", expected="'gloo' or 'nccl'")
    if device is None:
        device = "cuda" if backend != "gloo" and torch.cuda.is_available() else "cpu"
    chosen = known_device(device) if backend == "gloo" else usable_device(device)
    if chosen.type == "cuda" and backend == "gloo":
        chosen = torch.device("cpu")  # gloo moves host memory; CUDA tensors are copied to it and from it
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())  # an index is needed for devices to compare
    if backend == "nccl" and chosen.type != "cuda":
        raise ConfigError(f"NCCL cannot move tensors on {chosen}", expected="a CUDA device, or backend='gloo'")
    return chosen, backend or ("nccl" if chosen.type == "cuda" else "gloo")


class GroupStore(Store):
    """A torch store that keeps its values in a `NoteStore`, behind its secret.

    gloo needs it while it is constructed. NCCL leaves the id of its communicator there, and its monitor looks for
    signals of other ranks for as long as the process lives.

    Args:
        notes: where the values are.
        beginning: of the names of its notes.
        within: a backend waits as many seconds for a value, under the same flag.
    """

    def __init__(self, notes: NoteStore, beginning: str, within: Deadline) -> None:
        super().__init__()
        self._notes, self._beginning, self._within = notes, beginning, within

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value under ``key``."""
        self._notes.put(self._beginning + key, value if isinstance(value, str) else bytes(value).decode("latin-1"))

    def get(self, key: str) -> bytes:
        """Return the value under ``key``, as soon as it is there.

        Raises:
            TransportError: it did not come in time, or another thread aborted.
        """
        found = self._notes.wait(self._beginning + key, self._within.again())
        if not found:
            raise TransportError(f"nothing was left under {key!r}")
        return str(found[0]).encode("latin-1", errors="replace")

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until values are there; errors as `get`."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all these values are there, as far as the trainer answers."""
        try:
            return all(self._notes.has(self._beginning + key) for key in keys)
        except WeightSyncError:  # the monitor of NCCL asks in a thread of its own, and must not end the process
            return False


def nccl_options() -> Any:
    """Return options of NCCL without a timeout: where one passes, torch ends the process, and our waits have theirs."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    return options


def gloo_options(
    host: str, port: int, within: Deadline, *, devices: int = GLOO_DEVICES, threads: int = _GLOO_THREADS
) -> Any:
    """Return options of gloo, whose devices are bound to the interface that reaches the trainer.

    GLOO_SOCKET_IFNAME may name other interfaces, as in torch.

    Args:
        host, port: where the trainer is.
        within: every wait of ours has as many seconds; its flag ends a look-up.
        devices, threads: how many of each.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # left out of the stub
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    make = dist.ProcessGroupGloo.create_device
    if names:
        options._devices = [make(interface=names[index % len(names)]) for index in range(devices)]
    else:
        own = _own_address(host, port, within.stop)
        options._devices = [make(hostname=own) for _ in range(devices)]
    options._threads, options._timeout = threads, timedelta(seconds=within.timeout_s + _LATER_S)
    return options


def _own_address(host: str, port: int, stop: threading.Event) -> str:
    """Return this machine's address on the route to the trainer."""
    within = Deadline(_LOOK_UP_S, stop=stop)
    places = in_time(partial(socket.getaddrinfo, host, port, type=socket.SOCK_DGRAM), within)
    if not places:
        raise within.error(f"no name server knew {host}")
    family, _, _, _, target = places[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing; the kernel picks the interface
        return probe.getsockname()[0]
