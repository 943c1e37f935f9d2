"""The choice between gloo and NCCL, and what each needs to be made: a store, and devices whose sockets are known."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # by a star there

from torchrl_ext.errors import ConfigError, DeadlineError, TransportError, WeightSyncError
from torchrl_ext.transports.base import deadline
from torchrl_ext.transports.group.notes import NoteStore
from torchrl_ext.transports.group.sockets import in_time, listening
from torchrl_ext.weights.devices import known_device, usable_device

__all__ = [
    "GLOO_DEVICES", "GroupStore", "brief", "choose_backend", "gloo_devices", "kept_store", "made_in_time",
    "reached_store",
]  # fmt: skip

GLOO_DEVICES = 2
"""Each gloo device has one thread that moves bytes; two of them carry 1.6 times what one does."""
_ATTEMPTS = 20
_LOOK_UP_S = 10.0
_CREATING = threading.Lock()
"""Devices are created one group at a time, so that a group knows its own listening sockets."""


def choose_backend(
    device: torch.device | str | int | None, backend: str | None, known: Sequence[str] = ("gloo", "nccl")
) -> tuple[torch.device, str]:
    """Return the device of the tensors that travel, and their backend: gloo on the CPU, NCCL on CUDA.

    Args:
        device: by default the current CUDA device, or the CPU without one or with gloo.
        backend: one of ``known``; by default gloo or NCCL.
        known: backends that will do.

    Raises:
        ConfigError: no such backend, or one that cannot move tensors of this device; or there is no such device.
    """
    if backend is not None and backend not in known:
        raise ConfigError(f"there is no collective backend {backend!r}", expected=" or ".join(map(repr, known)))
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

    gloo needs it while it is constructed. NCCL leaves the id of each communicator there when this is first used, and
    its monitor looks for signals of other ranks for as long as the process lives.

    Args:
        notes: where the values are.
        beginning: of the names of its notes.
        timeout_s: how long a backend waits for a value, in seconds.
    """

    def __init__(self, notes: NoteStore, beginning: str, timeout_s: float) -> None:
        super().__init__()
        self._notes, self._beginning, self._timeout_s = notes, beginning, timeout_s

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value under ``key``."""
        self._notes.put(self._beginning + key, value if isinstance(value, str) else bytes(value).decode("latin-1"))

    def get(self, key: str) -> bytes:
        """Return the value under ``key``, as soon as it is there.

        Raises:
            TransportError: it did not come in time, or another thread aborted.
        """
        found = self._notes.wait(self._beginning + key, deadline(self._timeout_s))
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
        except WeightSyncError:  # a thread of NCCL's, which asks, must not end the process
            return False

    def has_extended_api(self) -> bool:
        """Return False: several values cannot be asked for at once."""
        return False


def made_in_time(make: Callable[[], Any], until: float, timeout_s: float, stop: threading.Event) -> Any:
    """Return what ``make`` returns, or raise at ``until``: gloo itself waits several timeouts for a dead peer."""
    try:
        made = in_time(make, until, stop)
    except RuntimeError as error:
        raise TransportError(f"connections could not be made: {brief(error)}") from error
    if made:
        return made[0]
    if stop.is_set():
        raise TransportError("forming the group was aborted")
    raise DeadlineError(f"connections were not made within {timeout_s:g} s")


def kept_store(listener: socket.socket, timeout_s: float) -> Any:
    """Return a store of torch's own that this process keeps behind a listening socket."""
    host, port = listener.getsockname()[:2]
    host = "127.0.0.1" if host in ("::", "0.0.0.0") else host
    patience = timedelta(seconds=timeout_s)
    tcp_store = dist.TCPStore  # type: ignore[attr-defined]  # by a star there
    return tcp_store(host, port, None, True, patience, False, False, listener.detach())


def reached_store(host: str, port: int, timeout_s: float) -> Any:
    """Return the store of torch's own that another process keeps."""
    tcp_store = dist.TCPStore  # type: ignore[attr-defined]  # by a star there
    return tcp_store(host, port, None, False, timedelta(seconds=timeout_s), False)


def gloo_devices(
    host: str, port: int, stop: threading.Event, count: int = GLOO_DEVICES
) -> tuple[list[Any], set[tuple[Any, ...]]]:
    """Return gloo devices, and the addresses at which they listen.

    They are bound to the interface that reaches the trainer, unless GLOO_SOCKET_IFNAME names others, as in torch.

    Args:
        host, port: where the trainer is.
        stop: set by another thread to end a look-up.
        count: of devices.
    """
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    make = dist.ProcessGroupGloo.create_device
    if names:
        calls = [partial(make, interface=names[index % len(names)]) for index in range(count)]
    else:
        calls = [partial(make, hostname=_own_address(host, port, stop))] * count
    with _CREATING:
        devices, listeners = zip(*(_listening_device(call) for call in calls), strict=True)
    return list(devices), set().union(*listeners)


def _listening_device(make: Callable[[], Any]) -> tuple[Any, set[tuple[Any, ...]]]:
    """Return a device and its address, which gloo does not tell: the one at which this process listens anew.

    Where another thread of this process began to listen meanwhile, there are several, and another device is made.

    Raises:
        TransportError: other threads opened listeners during every attempt.
    """
    for _ in range(_ATTEMPTS):
        before = set(listening())
        device = make()
        new = set(listening()) - before
        if len(new) <= 1:  # none where open files cannot be listed
            return device, new
    raise TransportError(
        f"other threads of this process opened listening sockets during each of {_ATTEMPTS} attempts to make a device",
        state="no group was formed",
        hint="connect before or after they do so",
    )


def _own_address(host: str, port: int, stop: threading.Event) -> str:
    """Return this machine's address on the route to the trainer."""
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_DGRAM)
    places = in_time(look_up, time.monotonic() + _LOOK_UP_S, stop)
    if not places:
        raise DeadlineError(f"no name server said within {_LOOK_UP_S:g} s where {host} is")
    family, _, _, _, target = places[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing; the kernel picks the interface
        return probe.getsockname()[0]


def brief(error: BaseException) -> str:
    """Return the message of an error of torch's without its stack."""
    return str(error).split("\n")[0].split(" This is typically caused")[0]
