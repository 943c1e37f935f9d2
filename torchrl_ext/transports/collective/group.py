"""Process groups without a default group and without environment variables.

Every `Group` is a generation of its own, so that a failed one leaves nothing behind.
"""

from __future__ import annotations

import atexit
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
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # by a star there

from torchrl_ext.errors import DeadlineError, TransportError
from torchrl_ext.transports.collective.backends import GroupStore, brief, gloo_devices, made_in_time, torch_store
from torchrl_ext.transports.collective.notes import NoteStore
from torchrl_ext.transports.collective.sockets import await_calls, connected, run_beside, shut_down
from torchrl_ext.waiting import pauses

__all__ = ["Group"]

_SLICE = timedelta(seconds=0.1)
_PAUSE_S, _LONGEST_S = 0.0005, 0.01
_GLOO_THREADS = 8
_TEARDOWN_S = 2.0
_LATER_S = 5.0
"""Seconds by which gloo's deadline comes after ours: ours raises the error, and gloo's only frees its threads."""
_NEVER = timedelta(days=365)


class Group:
    """A process group of one generation of ranks: rank 0 broadcasts, the others receive.

    Args:
        notes: where the ranks meet.
        generation: names the group; a new one each time.
        rank: this process's.
        peers: how to call the process of each rank, this one included, in a message.
        device: where tensors must be.
        backend: ``"gloo"`` or ``"nccl"``.
        timeout_s: deadline of every wait, in seconds.

    Attributes:
        alive: whether the group can be used.
        workers: ranks that receive.
    """

    def __init__(
        self,
        notes: NoteStore,
        generation: str,
        rank: int,
        peers: dict[int, str],
        *,
        device: torch.device,
        backend: str,
        timeout_s: float,
    ) -> None:
        self.notes, self.generation, self.rank = notes, generation, rank
        self.world_size = world_size = len(peers)
        self.device, self.backend, self.timeout_s, self.peers = device, backend, timeout_s, peers
        self.alive, self.workers = True, range(1, world_size)
        self._begun: deque[Any] = deque()
        self._listeners: set[tuple[Any, ...]] = set()
        self._connections = 0
        until = time.monotonic() + timeout_s
        make = self._nccl(until) if backend == "nccl" else self._gloo(until)
        self._pg: Any = made_in_time(make, until, timeout_s, notes.stop)
        _GROUPS.add(self)
        try:
            for peer in range(world_size if backend == "gloo" else 0):
                self._listeners |= _endpoints(notes.get(f"listeners/{generation}/{peer}"))
            self._connections = self._count_connections()
            self._exchange(until)
        except BaseException:
            self.sever()
            raise

    def _gloo(self, until: float) -> Callable[[], Any]:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # left out of the stub
        options._devices, self._listeners = gloo_devices(self.notes)
        options._threads, options._timeout = _GLOO_THREADS, timedelta(seconds=self.timeout_s + _LATER_S)
        self.notes.put(f"listeners/{self.generation}/{self.rank}", sorted(self._listeners))
        self._store = GroupStore(self.notes, until)  # held here, since C++ does not keep its Python methods
        store = PrefixStore(f"group/{self.generation}", self._store)
        return partial(dist.ProcessGroupGloo, store, self.rank, self.world_size, options)

    def _nccl(self, until: float) -> Callable[[], Any]:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _NEVER  # where it passes, torch ends the process; waits here have deadlines of their own
        store = torch_store(self.notes, self.generation, self.rank, until)
        return partial(dist.ProcessGroupNCCL, store, self.rank, self.world_size, options)

    def _exchange(self, until: float) -> None:
        """Add up a number over all ranks, so that a group that is formed is one that works.

        NCCL makes its communicator only when it is used first, in the thread that does so, and without a deadline.
        """
        total = torch.full((1,), float(self.rank + 1), device=self.device)
        work = made_in_time(partial(self._pg.allreduce, [total]), until, self.timeout_s, self.notes.stop)
        self._begun.append(work)
        self.wait(work)
        expected = self.world_size * (self.world_size + 1) / 2
        if total.item() != expected:
            raise TransportError(f"a first sum over all ranks is {total.item():g}", expected=f"{expected:g}")
        if self.rank == 0:  # every rank is past them, since it took part
            self.notes.sweep(*(f"{kind}/{self.generation}/" for kind in ("group", "listeners", "ready")))

    @property
    def whole(self) -> bool:
        """Whether no peer closed a connection, as far as that can be told."""
        return self._count_connections() >= self._connections

    def call(self, ranks: Iterable[int]) -> str:
        """Return ranks as messages name them: ``"rank 2 (pid 17 on host)"``."""
        return ", ".join(f"rank {rank} ({self.peers[rank]})" for rank in ranks)

    def broadcast(self, flat: Tensor) -> Any:
        """Begin a broadcast of ``flat`` from rank 0, and return the work to `wait` for."""
        if not self.alive:
            raise TransportError("the transfer was aborted")
        while self._begun and self._begun[0].is_completed():
            self._begun.popleft()
        work = self._pg.broadcast(flat, 0)
        self._begun.append(work)
        return work

    def wait(self, work: Any) -> None:
        """Wait until a broadcast is done.

        Raises:
            TransportError: a connection broke, or another thread aborted.
            DeadlineError: `timeout_s` passed.
        """
        until = time.monotonic() + self.timeout_s
        if self.backend == "nccl":  # its wait only orders streams, so completion is asked for
            for _ in pauses(self.timeout_s, self.notes.stop, shortest_s=_PAUSE_S, longest_s=_LONGEST_S):
                if work.is_completed():
                    break
        while True:
            finished = work.is_completed()
            try:
                work.wait() if finished else work.wait(_SLICE)
            except RuntimeError as error:
                if finished and not self.notes.stop.is_set():
                    raise TransportError(f"a connection of the group broke: {brief(error)}") from error
            else:
                return
            if self.notes.stop.is_set():
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
        if not self.alive:
            return
        self.alive = False
        pg, self._pg = self._pg, None
        if self.backend == "nccl":
            run_beside(pg.abort)
            return
        shut_down(self._listeners)
        remains = [self._begun, pg]
        del pg
        run_beside(partial(_destroy_later, remains))


def _endpoints(said: Any) -> set[tuple[Any, ...]]:
    """Return the addresses at which a rank says that it listens."""
    if type(said) is not list or not all(
        type(one) is list and len(one) == 2 and (type(one[0]), type(one[1])) == (str, int) for one in said
    ):
        raise TransportError(f"a rank says that it listens at {str(said)[:200]!r}", expected="a list of [host, port]")
    return {(host, port) for host, port in said}


_GROUPS: weakref.WeakSet[Group] = weakref.WeakSet()


def _destroy_later(remains: list[Any]) -> None:
    """Destroy a backend once nothing runs on it.

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
    await_calls(_TEARDOWN_S)
