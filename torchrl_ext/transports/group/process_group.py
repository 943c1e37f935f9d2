"""Process groups of torch's without a default group and without environment variables.

Every `Group` is a generation of its own, so that a failed one leaves nothing behind.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from threading import Event
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import TransportError
from torchrl_ext.transports.group.backends import GLOO_DEVICES, GroupStore, gloo_options, nccl_options
from torchrl_ext.transports.group.calls import made_in_time, run_beside, sever_at_exit, wait_for_at_exit
from torchrl_ext.transports.group.peers import ALL, Move, PeerGroup, Seat

__all__ = ["Group", "form_group"]

_LATER_S = 5.0
"""Seconds by which the deadline of a thread comes after ours."""
_SLICE_S = 0.1
_SLICE_BYTES = 8 << 20
"""Size of the slices of a transfer over gloo; several in flight keep every connection to a peer busy."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.01
_AT_ONCE = timedelta(milliseconds=1)
_UNUSED_TAG = 1 << 20


def form_group(seat: Seat, backend: str) -> Group:
    """Return a group of torch's backend ``"gloo"`` or ``"nccl"``, once it works.

    Raises:
        TransportError, DeadlineError: not every rank takes part.
    """
    notes, within = seat.notes, seat.within
    store: Any = GroupStore(notes, f"{seat.generation}/group/", within)
    if backend == "nccl":
        kind, options = "ProcessGroupNCCL", nccl_options()
    else:
        kind, options = "ProcessGroupGloo", gloo_options(notes.host, notes.port, within)
    pg = made_in_time(partial(getattr(dist, kind), store, seat.rank, len(seat.peers), options), within)
    group = Group(seat, pg, backend, store)
    try:
        group._exchange(within)
    except BaseException:
        group.sever()
        raise
    return group


@final
class Group(PeerGroup):
    """A process group of one generation of ranks: rank 0 broadcasts to all others, or one rank sends to another.

    Args:
        seat: of this process.
        pg: torch's backend object.
        backend: ``"gloo"`` or ``"nccl"``.
        store: held with it, since C++ does not keep the Python methods of a store.
    """

    def __init__(self, seat: Seat, pg: Any, backend: str, store: Any) -> None:
        super().__init__(seat)
        self._held, self._store, self.backend = [pg], store, backend
        self._begun: deque[Any] = deque()  # works of torch's
        self._block: list[_WorkMove] | None = None
        self._lines: dict[tuple[int, bool], tuple[SimpleQueue[Any], Future[Any]]] = {}
        self._end = weakref.finalize(self, _end, backend, self._held, self._lines, self._begun, store)
        self._end.atexit = False  # then it is severed
        sever_at_exit(self)

    def _exchange(self, within: Deadline) -> None:
        """Add up a number over all ranks, so that a group that is formed is one that works.

        NCCL makes its communicator only when it is used first, in the thread that does so, and without a deadline.
        """
        total = torch.full((1,), float(self.rank + 1), device=self.device)
        self.wait(self._follow(made_in_time(partial(self.pg.allreduce, [total]), within), total))
        expected = self.world_size * (self.world_size + 1) / 2
        if total.item() != expected:
            raise TransportError(f"a first sum over all ranks is {total.item():g}", expected=f"{expected:g}")
        if self.rank == 0:  # every rank is past them, since it took part
            for kind in ("group", "ready"):
                self.notes.drop(f"{self.generation}/{kind}/")

    @property
    def pg(self) -> Any:
        """The backend.

        Raises:
            TransportError: the group was ended.
        """
        held = [*self._held]
        if not self.alive or not held:
            raise TransportError("the transfer was aborted")
        return held[0]

    def broadcast(self, flat: Tensor) -> Move:
        """Begin a broadcast of ``flat`` from rank 0, and return the transfer to `wait` for.

        Raises:
            TransportError: the group was ended.
        """
        return self._follow(self.pg.broadcast(flat, 0), flat)

    def _follow(self, work: Any, flat: Tensor) -> Move:
        """Return the transfer of a work of torch's, which is held: a backend is destroyed only when nothing runs."""
        move = _WorkMove(flat, ALL, self.rank == 0)
        move.work, move.blocks = work, self.backend == "gloo"
        with self._lock:
            while self._begun and self._begun[0].is_completed():
                self._begun.popleft()
            self._begun.append(work)
        return move

    def send(self, flat: Tensor, to: int) -> Move:
        return self._move(flat, to, sends=True)

    def receive(self, flat: Tensor, source: int) -> Move:
        return self._move(flat, source, sends=False)

    def _move(self, flat: Tensor, peer: int, *, sends: bool) -> Move:
        pg = self.pg
        with self._lock:  # the slices of two transfers must not mix
            if self.backend == "nccl":
                grouped = _WorkMove(flat, peer, sends)
                if self._block is None:
                    self._begin([grouped])
                else:
                    self._block.append(grouped)
                return grouped
            move, works = Move(flat, peer, sends), []
            call = pg.send if sends else pg.recv
            try:
                for number, part in enumerate(flat.split(_SLICE_BYTES)):  # a tag picks the device
                    works.append((call([part], peer, number % GLOO_DEVICES), part.numel()))
            except RuntimeError as error:
                raise self._broken(move, error) from error
            finally:
                if (peer, sends) not in self._lines:
                    queue: SimpleQueue[Any] = SimpleQueue()
                    beside = run_beside(partial(_wait_in_turn, queue, self.timeout_s + _LATER_S))
                    self._lines[peer, sends] = queue, beside
                queue, beside = self._lines[peer, sends]
                queue.put((beside, move, works))
        return move

    @contextmanager
    def together(self) -> Iterator[None]:
        with self._lock:
            if self.backend != "nccl" or self._block is not None:
                yield
                return
            self._block = []
            try:
                yield
            finally:
                block, self._block = self._block, None
                self._begin(block)

    def _begin(self, block: Sequence[_WorkMove]) -> None:
        """Begin transfers over NCCL in one call, on the communicator of the group, which exists already."""
        if not block:
            return
        pg = self.pg
        try:
            pg._start_coalescing()
            try:
                for move in block:
                    (pg.send if move.sends else pg.recv)([move.flat], move.peer, 0)
            finally:
                work = pg._end_coalescing()
        except RuntimeError as error:
            raise self._broken(block[0], error) from error
        for move in block:
            move.work = work

    def _sever(self) -> None:
        self._end()


class _WorkMove(Move):
    """A transfer that a work of torch's carries out: a broadcast, or any transfer over NCCL, in a block or by itself.

    Attributes:
        work: None until the block begins, and when it is done.
        blocks: whether the work can be waited for; NCCL's wait only orders streams.
    """

    work: Any = None
    blocks = False

    def arrives(self, seconds: float) -> bool:
        work = self.work
        if work is None:
            return self.done.wait(seconds)
        if not self._completed(work, seconds):
            return False
        try:
            work.wait()  # over NCCL it orders the current stream behind the work
            self.landed = self.nbytes
        except RuntimeError as error:
            self.failure = error
        self.end()
        self.work = None
        return True

    def _completed(self, work: Any, seconds: float) -> bool:
        """Return whether the work is done, well or badly, within ``seconds``."""
        if self.blocks:
            if not work.is_completed():
                with suppress(RuntimeError):
                    work.wait(timedelta(seconds=seconds))
            return bool(work.is_completed())
        turns = Deadline(seconds).pauses(shortest_s=_SHORTEST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
        return any(work.is_completed() for _ in turns)


def _wait_in_turn(queue: SimpleQueue[Any], longest_s: float) -> None:
    """Wait for the transfers over gloo to one peer, or from it, one after the other, until None comes.

    gloo tells the end of a transfer only to a thread that waits, and closes every connection at the deadline of a wait.

    Args:
        queue: of transfers: the call in which this runs, the transfer, and the works of its slices with their bytes.
        longest_s: deadline of each slice, in seconds.
    """
    while (item := queue.get()) is not None:
        call: Future[Any] = item[0]
        move: Move = item[1]
        for work, nbytes in item[2]:
            seconds = longest_s if move.failure is None else _SLICE_S  # other slices may still use the memory
            wait_for_at_exit(call, time.monotonic() + seconds)
            try:
                work.wait(timedelta(seconds=seconds))
                move.landed += nbytes
            except RuntimeError as error:
                move.failure = move.failure or error
            del work
        move.end()
        del item, move  # nothing is held while the next one is waited for


def _end(
    backend: str,
    held: list[Any],
    lines: dict[tuple[int, bool], tuple[SimpleQueue[Any], Future[Any]]],
    begun: deque[Any],
    store: Any,
) -> None:
    """End the backend in ``held`` and every wait on it, here and at its peers."""
    if backend == "nccl":
        run_beside(partial(_abort, held, store))
        return
    _close_connections(held[0])
    for queue, _ in list(lines.values()):
        queue.put(None)
    run_beside(partial(_destroy_later, [beside for _, beside in list(lines.values())], begun, held, store))


def _abort(held: list[Any], store: Any) -> None:
    """End a backend of NCCL's, whose monitor looks into ``store`` meanwhile."""
    held.pop().abort()


def _close_connections(pg: Any) -> None:
    """Close every connection of a gloo backend, by which waits of all threads end, and peers see it.

    gloo has no call for it, but it closes the connections of a device when a `recv` on it is not answered in time.
    """
    for tag in range(_UNUSED_TAG, _UNUSED_TAG + GLOO_DEVICES):  # a tag picks the device
        for peer in range(pg.size()):
            if peer != pg.rank():
                with suppress(RuntimeError):
                    pg.recv([torch.empty(1, dtype=torch.uint8)], peer, tag).wait(_AT_ONCE)


def _destroy_later(busy: list[Future[Any]], begun: deque[Any], held: list[Any], store: Any) -> None:
    """Destroy a backend of gloo's once nothing runs on it; ``store`` lives until then.

    gloo leaves a send that was half-way when its connection broke to its timeout. Destroying the backend earlier
    would block in a destructor, which takes the process down when the interpreter ends meanwhile.
    """
    wait(busy)
    pause = Event()
    while begun:
        while not begun[0].is_completed():
            pause.wait(0.01)
        begun.popleft()
    held.clear()
