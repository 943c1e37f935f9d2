"""Broadcasts of rank 0 on a backend of torch's, with deadlines, and with an end that frees whoever waits."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from torchrl_ext.deadline import pauses
from torchrl_ext.errors import DeadlineError, TransportError
from torchrl_ext.transports.group.backends import brief
from torchrl_ext.transports.group.peers import Move
from torchrl_ext.transports.group.sockets import connected, run_beside, shut_down

__all__ = ["LONGEST_PAUSE_S", "SHORTEST_PAUSE_S", "SLICE", "Broadcasts"]

SLICE = timedelta(seconds=0.1)
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.0005, 0.01


@final
class Broadcasts:
    """Holds a backend that was made, begins broadcasts on it and waits for them, and ends it.

    Args:
        pg: torch's backend object.
        backend: ``"gloo"`` or ``"nccl"``.
        device: where tensors must be.
        timeout_s: deadline of every wait, in seconds.
        stop: set by another thread to end every wait.

    Attributes:
        alive: whether it can be used.
    """

    def __init__(
        self,
        pg: Any,
        backend: str,
        *,
        device: torch.device,
        timeout_s: float,
        stop: threading.Event,
    ) -> None:
        self._pg, self.backend, self.device, self.timeout_s, self.stop = pg, backend, device, timeout_s, stop
        self.alive, self._connections = True, 0
        self._endpoints: set[tuple[Any, ...]] = set()
        self._begun: deque[Any] = deque()
        self._lock = threading.RLock()

    def watch(self, endpoints: Iterable[tuple[Any, ...]]) -> None:
        """Take note of addresses at which ranks listen; every connection to or from one is there now."""
        self._endpoints |= {*endpoints}
        self._connections = self._count_connections()

    @property
    def pg(self) -> Any:
        """The backend.

        Raises:
            TransportError: it was ended.
        """
        pg = self._pg
        if not self.alive or pg is None:
            raise TransportError("the transfer was aborted")
        return pg

    def broadcast(self, flat: Tensor) -> Any:
        """Begin a broadcast of ``flat`` from rank 0, and return the work to `wait` for."""
        work = self.pg.broadcast(flat, 0)
        self.keep(work)
        return work

    def keep(self, work: Any) -> None:
        """Hold on to a work until it is done: a backend is destroyed only when nothing runs on it."""
        with self._lock:
            while self._begun and self._begun[0].is_completed():
                self._begun.popleft()
            self._begun.append(work)

    def wait(self, work: Any) -> None:
        """Wait until a work of torch's is done.

        Raises:
            TransportError: a connection broke, a peer is gone, or another thread aborted.
            DeadlineError: it took `timeout_s`.
        """
        until = time.monotonic() + self.timeout_s
        if self.backend == "nccl":  # its wait only orders streams, so completion is asked for
            for _ in pauses(self.timeout_s, self.stop, shortest_s=SHORTEST_PAUSE_S, longest_s=LONGEST_PAUSE_S):
                if work.is_completed():
                    break
        while True:
            finished = work.is_completed()
            try:
                work.wait() if finished else work.wait(SLICE)
            except RuntimeError as error:
                if finished and not self.stop.is_set():
                    raise TransportError(f"a connection of the group broke: {brief(error)}") from error
            else:
                return
            if self.stop.is_set():
                raise TransportError("the transfer was aborted")
            if not self.whole:  # gloo itself forgets sends that were half-way
                raise TransportError("a peer closed its connection")
            if time.monotonic() >= until:
                raise DeadlineError(f"nothing moved for {self.timeout_s:g} s")

    @property
    def whole(self) -> bool:
        """Whether no peer closed a connection, as far as that can be told."""
        return self._count_connections() >= self._connections

    def _count_connections(self) -> int:
        return sum(1 for _ in connected(self._endpoints))

    def sever(self) -> None:
        """End it at once, here and at its peers, and every wait in other threads. May be called twice.

        gloo has no way to interrupt a call that waits for a peer, so its sockets are shut down under it: they
        are those connected to the addresses at which the ranks of this group listen.
        """
        with self._lock:
            if not self.alive:
                return
            self.alive = False
        pg, self._pg = self._pg, None
        if self.backend == "nccl":
            run_beside(pg.abort)
            return
        shut_down(self._endpoints)
        remains = [self._begun, pg]
        del pg
        run_beside(partial(_destroy_later, remains))


def _destroy_later(remains: list[Any]) -> None:
    """Destroy a backend once nothing runs on it.

    gloo leaves a send that was half-way when its connection broke to its timeout. Destroying the backend earlier
    would block in a destructor, which takes the process down when the interpreter ends meanwhile.
    """
    begun, pause = remains[0], threading.Event()
    while begun:
        if isinstance(begun[0], Move):
            begun[0].finish()
        while not begun[0].is_completed():
            pause.wait(0.01)
        begun.popleft()
    remains.clear()
