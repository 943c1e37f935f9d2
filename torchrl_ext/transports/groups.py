"""Process groups without a default group and without environment variables.

Every `Group` is a generation of its own, so that a failed one leaves nothing behind.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_ext.errors import DeadlineError, TransportError
from torchrl_ext.transports.rendezvous import Board, brief, pauses
from torchrl_ext.transports.sockets import connected, listening, shut_down

__all__ = ["Group"]

_SLICE = timedelta(seconds=0.1)
_GLOO_DEVICES = 2
"""Each gloo device has one thread that moves bytes; two of them carry 1.6 times what one does."""
_GLOO_THREADS = 8
_LAST_RITES_S = 2.0
_CREATING = threading.Lock()
"""Devices are created one group at a time, so that a group knows its own listening sockets."""


class Group:
    """One generation of ranks: rank 0 broadcasts, the others receive.

    Args:
        board: where the ranks meet.
        generation: names the group; a new one each time.
        rank: this process's.
        peers: how to call the process of each rank, this one included, in a message.
        device: where tensors must be.
        backend: ``"gloo"`` or ``"nccl"``.
        timeout_s: deadline of every wait, in seconds.
    """

    def __init__(
        self,
        board: Board,
        generation: str,
        rank: int,
        peers: dict[int, str],
        *,
        device: torch.device,
        backend: str,
        timeout_s: float,
    ) -> None:
        self.board, self.generation, self.rank = board, generation, rank
        self.world_size = world_size = len(peers)
        self.device, self.backend, self.timeout_s, self.peers = device, backend, timeout_s, peers
        self._severed = False
        self._begun: deque[Any] = deque()
        store = dist.PrefixStore(f"group/{generation}", board.store)
        # Ours is the deadline that speaks: the backend's comes later and only frees its threads.
        patience = timedelta(seconds=timeout_s + 5)
        self._listeners: set[tuple[Any, ...]] = set()
        self._connections = 0
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = patience
            make = partial(dist.ProcessGroupNCCL, store, rank, world_size, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            with _CREATING:
                before = set(listening())
                options._devices = _gloo_devices(board)
                self._listeners = set(listening()) - before
            options._threads, options._timeout = _GLOO_THREADS, patience
            board.put(f"listeners/{generation}/{rank}", sorted(self._listeners))
            make = partial(dist.ProcessGroupGloo, store, rank, world_size, options)
        self._pg: Any = _made(make, timeout_s, board.stop)
        if backend == "gloo":
            for peer in range(world_size):
                self._listeners |= {tuple(name) for name in board.get(f"listeners/{generation}/{peer}")}
            self._connections = self._count_connections()
        _GROUPS.add(self)

    @property
    def alive(self) -> bool:
        """Whether the group can be used."""
        return not self._severed

    @property
    def whole(self) -> bool:
        """Whether no peer closed a connection, as far as that can be told."""
        return self._count_connections() >= self._connections

    @property
    def workers(self) -> range:
        """Ranks that receive."""
        return range(1, self.world_size)

    def call(self, ranks: Iterable[int]) -> str:
        """``"rank 2 (pid 17 on host)"``, for messages."""
        return ", ".join(f"rank {rank} ({self.peers[rank]})" for rank in ranks)

    def broadcast(self, flat: Tensor) -> Any:
        """Begin a broadcast from rank 0; `wait` for what is returned."""
        if self._severed:
            raise TransportError("the transfer was aborted")
        while self._begun and self._begun[0].is_completed():
            self._begun.popleft()
        work = self._pg.broadcast(flat, 0)
        self._begun.append(work)
        return work

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
                if finished and not self.board.stop.is_set():
                    raise TransportError(f"a connection of the group broke: {brief(error)}") from error
            else:
                return
            if self.board.stop.is_set():
                raise TransportError("the transfer was aborted")
            if not self.whole:  # gloo itself forgets sends that were half-way
                raise TransportError("a peer closed its connection")
            if time.monotonic() >= until:
                raise DeadlineError(f"nothing moved for {self.timeout_s:g} s")

    def _count_connections(self) -> int:
        return sum(1 for _ in connected(self._listeners))

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
            _start(pg.abort)
            return
        shut_down(self._listeners)
        remains = [self._begun, pg]
        del pg
        _start(lambda: _put_to_rest(remains))


def _made(make: Callable[[], Any], timeout_s: float, stop: threading.Event) -> Any:
    """What a backend's constructor returns; gloo's waits several timeouts for a peer that died, so it gets a thread."""
    made: list[Any] = []
    failed: list[RuntimeError] = []

    def run() -> None:
        try:
            made.append(make())
        except RuntimeError as error:
            failed.append(error)

    thread = _start(run)
    until = time.monotonic() + timeout_s
    while thread.is_alive() and time.monotonic() < until and not stop.is_set():
        thread.join(0.05)
    if made:
        return made[0]
    if failed:
        raise TransportError(f"connections could not be made: {brief(failed[0])}") from failed[0]
    if stop.is_set():
        raise TransportError("forming the group was aborted")
    raise DeadlineError(f"connections were not made within {timeout_s:g} s")


_GROUPS: weakref.WeakSet[Group] = weakref.WeakSet()
_THREADS: list[threading.Thread] = []


def _start(call: Callable[[], None]) -> threading.Thread:
    """A thread around a call into a backend that may take its time."""
    thread = threading.Thread(target=call, name="torchrl-ext-group", daemon=True)
    _THREADS[:] = [other for other in _THREADS if other.is_alive()] + [thread]
    thread.start()
    return thread


def _put_to_rest(remains: list[Any]) -> None:
    """Let go of a backend once nothing runs on it.

    gloo leaves a send that was half-way when its connection broke to its timeout. Destroying the backend earlier
    would block in a destructor, which takes the process down when the interpreter ends meanwhile.
    """
    begun, pause = remains[0], threading.Event()
    while begun:
        while not begun[0].is_completed():
            pause.wait(0.01)
        begun.popleft()
    remains.clear()


@atexit.register
def _end_groups() -> None:
    for group in list(_GROUPS):
        group.sever()
    until = time.monotonic() + _LAST_RITES_S
    for thread in _THREADS:
        thread.join(max(0.0, until - time.monotonic()))


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
