"""Broadcasts of rank 0 on a backend of torch's, with deadlines, and with an end that frees whoever waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import TransportError
from torchrl_ext.transports.group.backends import GLOO_DEVICES
from torchrl_ext.transports.group.calls import brief, run_beside

__all__ = ["Broadcasts", "completed_within"]

_SLICE = timedelta(seconds=0.1)
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.01
_AT_ONCE = timedelta(milliseconds=1)
_UNUSED_TAG = 1 << 20


@final
class Broadcasts:
    """Holds a backend that was made, begins broadcasts on it and waits for them, and ends it.

    Args:
        pg: torch's backend object.
        backend: ``"gloo"`` or ``"nccl"``.
        device: where tensors must be.
        timeout_s: deadline of every wait, in seconds.
        stop: set by another thread to end every wait.
        lost: returns why no peer answers any more; "" as far as nobody knows of any failure.

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
        lost: Callable[[], str] = str,
    ) -> None:
        self._pg, self.backend, self.device, self.timeout_s, self.stop = pg, backend, device, timeout_s, stop
        self.alive, self._lost = True, lost
        self._begun: deque[Any] = deque()
        self._lock = threading.RLock()

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
        within = Deadline(self.timeout_s, stop=self.stop)
        while not self._completed(work) or self.stop.is_set():
            if self.stop.is_set() or not self.alive:
                raise TransportError("the transfer was aborted")
            lost = self._lost()  # gloo itself forgets a send that was half-way when its connection broke
            if lost and not self._completed(work):
                raise TransportError(lost)
            within.check("nothing moved")
        try:
            work.wait()
        except RuntimeError as error:
            if self.stop.is_set() or not self.alive:
                raise TransportError("the transfer was aborted") from error
            raise TransportError(f"a connection of the group broke: {brief(error)}") from error

    def _completed(self, work: Any) -> bool:
        """Return whether a work is done, well or badly, after a short wait if it is not."""
        if self.backend == "nccl":  # its wait only orders streams
            return completed_within(work, _SLICE.total_seconds())
        if not work.is_completed():
            with suppress(RuntimeError):
                work.wait(_SLICE)
        return bool(work.is_completed())

    def sever(self, busy: Iterable[Future[Any]] = ()) -> None:
        """End it at once, here and at its peers, and every wait in other threads. May be called twice.

        Args:
            busy: calls of other threads that use the backend, and end now.
        """
        with self._lock:
            if not self.alive:
                return
            self.alive = False
        pg, self._pg = self._pg, None
        if self.backend == "nccl":
            run_beside(pg.abort)
            return
        _close_connections(pg)
        remains = [[*busy], self._begun, pg]
        del pg
        run_beside(partial(_destroy_later, remains))


def completed_within(work: Any, seconds: float) -> bool:
    """Return whether a work of NCCL's is done within ``seconds``."""
    turns = Deadline(seconds).pauses(shortest_s=_SHORTEST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
    return any(work.is_completed() for _ in turns)


def _close_connections(pg: Any) -> None:
    """Close every connection of a gloo backend, by which waits of all threads end, and peers see it.

    gloo has no call for it, but it closes the connections of a device when a `recv` on it is not answered in time.
    """
    for tag in range(_UNUSED_TAG, _UNUSED_TAG + GLOO_DEVICES):  # a tag picks the device
        for peer in range(pg.size()):
            if peer != pg.rank():
                with suppress(RuntimeError):
                    pg.recv([torch.empty(1, dtype=torch.uint8)], peer, tag).wait(_AT_ONCE)


def _destroy_later(remains: list[Any]) -> None:
    """Destroy a backend once nothing runs on it.

    gloo leaves a send that was half-way when its connection broke to its timeout. Destroying the backend earlier
    would block in a destructor, which takes the process down when the interpreter ends meanwhile.
    """
    busy, begun, _ = remains
    wait(busy)
    pause = threading.Event()
    while begun:
        while not begun[0].is_completed():
            pause.wait(0.01)
        begun.popleft()
    remains.clear()
