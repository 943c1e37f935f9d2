"""Process groups without a default group and without environment variables.

Every `Group` is a generation of its own, so that a failed one leaves nothing behind.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_ext.errors import DeadlineError, TransportError
from torchrl_ext.transports.rendezvous import Board, brief, pauses

__all__ = ["Group"]

_SLICE = timedelta(seconds=0.25)
_GLOO_DEVICES = 2
"""Each gloo device has one thread that moves bytes; two of them carry 1.6 times what one does."""
_GLOO_THREADS = 4
_CREATING = threading.Lock()
"""Devices are created one group at a time, so that a group knows its own listening sockets."""


class Group:
    """One generation of ranks: rank 0 broadcasts, the others receive.

    Args:
        board: where the ranks meet.
        generation: names the group; a new one each time.
        rank, world_size: this rank and their number.
        device: where tensors must be.
        backend: ``"gloo"`` or ``"nccl"``.
        timeout_s: deadline of every wait, in seconds.
        peers: rank -> how to call its process in a message.
    """

    def __init__(
        self,
        board: Board,
        generation: str,
        rank: int,
        world_size: int,
        *,
        device: torch.device,
        backend: str,
        timeout_s: float,
        peers: dict[int, str],
    ) -> None:
        self.board, self.generation, self.rank, self.world_size = board, generation, rank, world_size
        self.device, self.backend, self.timeout_s, self.peers = device, backend, timeout_s, peers
        self._severed = False
        self._burial: threading.Thread | None = None
        store = dist.PrefixStore(f"group/{generation}", board.store)
        # Ours is the deadline that speaks: the backend's comes later and only frees its threads.
        patience = timedelta(seconds=timeout_s + 5)
        self._listeners: set[tuple[Any, ...]] = set()
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = patience
            self._pg: Any = dist.ProcessGroupNCCL(store, rank, world_size, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            with _CREATING:
                before = set(_listening())
                options._devices = _gloo_devices(board)
                self._listeners = set(_listening()) - before
            options._threads, options._timeout = _GLOO_THREADS, patience
            board.put(f"listeners/{generation}/{rank}", sorted(self._listeners))
            self._pg = dist.ProcessGroupGloo(store, rank, world_size, options)
            for peer in range(world_size):
                self._listeners |= {tuple(name) for name in board.get(f"listeners/{generation}/{peer}")}

    @property
    def alive(self) -> bool:
        """Whether the group can be used."""
        return not self._severed

    @property
    def workers(self) -> range:
        """Ranks that receive."""
        return range(1, self.world_size)

    def call(self, ranks: Iterable[int]) -> str:
        """``"rank 2 (pid 17 on host)"``, for messages."""
        return ", ".join(f"rank {rank} ({self.peers[rank]})" for rank in ranks)

    def broadcast(self, flat: Tensor) -> Any:
        """Begin a broadcast from rank 0; `wait` for what is returned."""
        return self._pg.broadcast(flat, 0)

    def wait(self, work: Any) -> None:
        """Until a broadcast is done.

        Raises:
            TransportError: a connection broke, or another thread aborted.
            DeadlineError: `timeout_s` passed.
        """
        until = time.monotonic() + self.timeout_s
        if self.backend == "nccl":  # its wait only orders streams, so completion is asked for
            for _ in pauses(until, self.board.stop):
                if work.is_completed():
                    break
        while True:
            finished = work.is_completed()
            try:
                work.wait() if finished else work.wait(_SLICE)
            except RuntimeError as error:
                if finished:
                    raise TransportError(f"a connection of the group broke: {brief(error)}") from error
            else:
                return
            if self.board.stop.is_set():
                raise TransportError("the transfer was aborted")
            if time.monotonic() >= until:
                raise DeadlineError(f"nothing moved for {self.timeout_s:g} s")

    def sever(self) -> None:
        """End the group at once, here and (their connections close) at its peers. May be called twice.

        gloo has no way to interrupt a broadcast that waits for a peer, so its sockets are shut down under it: they
        are those connected to the addresses at which the ranks of this group listen.
        """
        if self._severed:
            return
        self._severed = True
        pg, self._pg = self._pg, None
        if self.backend == "nccl":
            self._bury(pg.abort)
            return
        for one in _sockets():
            with one:
                try:
                    if {_name(one.getsockname()), _name(one.getpeername())} & self._listeners:
                        one.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # not connected, or closed meanwhile
        last = [pg]
        del pg
        self._bury(last.clear)  # its destructor waits for its threads, which end now that their sockets did

    def buried(self, timeout_s: float) -> None:
        """Wait until the backend of a severed group has ended its threads."""
        if self._burial is not None:
            self._burial.join(timeout_s)

    def _bury(self, last_rites: Callable[[], None]) -> None:
        self._burial = threading.Thread(target=last_rites, name="torchrl-ext-bury", daemon=True)
        self._burial.start()


def _gloo_devices(board: Board) -> list[Any]:
    """Bound where the trainer is reachable from; GLOO_SOCKET_IFNAME has the last word, as it has in torch."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    make = dist.ProcessGroupGloo.create_device
    if names:
        return [make(interface=names[index % len(names)]) for index in range(_GLOO_DEVICES)]
    address = board.address.rpartition(":")[0]
    family, _, _, _, target = socket.getaddrinfo(address, board.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing; the kernel picks the interface
        own = probe.getsockname()[0]
    return [make(hostname=own) for _ in range(_GLOO_DEVICES)]


def _sockets() -> Iterator[socket.socket]:
    """Duplicates of this process's internet sockets, to be closed by the caller."""
    try:
        entries = os.listdir("/dev/fd")
    except OSError:
        return
    for entry in entries:
        try:
            copy = os.dup(int(entry))
        except OSError:
            continue
        try:
            one = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
            yield one
        else:
            one.close()


def _listening() -> Iterator[tuple[Any, ...]]:
    for one in _sockets():
        with one:
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield _name(one.getsockname())


def _name(address: tuple[Any, ...]) -> tuple[Any, ...]:
    return (str(address[0]).removeprefix("::ffff:"), address[1])
