"""Process groups without a default group and without environment variables.

Every `Group` is a generation of its own, so that a failed one leaves nothing behind.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import TransportError
from torchrl_ext.transports.group.backends import GLOO_DEVICES, GroupStore, gloo_options, nccl_options
from torchrl_ext.transports.group.broadcasts import Broadcasts, completed_within
from torchrl_ext.transports.group.calls import made_in_time, run_beside, sever_at_exit, wait_for_at_exit
from torchrl_ext.transports.group.notes import NoteStore
from torchrl_ext.transports.group.peers import Move, PeerGroup

__all__ = ["Group"]

_LATER_S = 5.0
"""Seconds by which the deadline of a thread comes after ours."""
_SLICE_S = 0.1
_SLICE_BYTES = 8 << 20
"""Size of the slices of a transfer over gloo; several in flight keep every connection to a peer busy."""


class Group(PeerGroup):
    """A process group of one generation of ranks: rank 0 broadcasts to all others, or one rank sends to another.

    Args:
        notes, generation, rank, peers, device, timeout_s: as for `PeerGroup`.
        backend: ``"gloo"`` or ``"nccl"``.

    Attributes:
        broadcasts: those of rank 0.
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
        super().__init__(notes, generation, rank, peers, device=device, timeout_s=timeout_s)
        self.backend = backend
        self._block: list[_GroupedMove] | None = None
        self._lines: dict[tuple[int, bool], _Line] = {}
        self._end_lines = weakref.finalize(self, _end, self._lines)
        self._end_lines.atexit = False
        within = Deadline(timeout_s, stop=notes.stop)
        # held here, since C++ does not keep its Python methods
        self._store: Any = GroupStore(notes, f"group/{generation}/", timeout_s)
        if backend == "nccl":
            kind, options = "ProcessGroupNCCL", nccl_options()
        else:
            kind, options = "ProcessGroupGloo", gloo_options(notes.host, notes.port, timeout_s, notes.stop)
        pg = made_in_time(partial(getattr(dist, kind), self._store, rank, self.world_size, options), within)
        self.broadcasts = Broadcasts(pg, backend, device=device, timeout_s=timeout_s, stop=notes.stop, lost=self._lost)
        sever_at_exit(self)
        try:
            self._exchange(within)
        except BaseException:
            self.sever()
            raise

    def _exchange(self, within: Deadline) -> None:
        """Add up a number over all ranks, so that a group that is formed is one that works.

        NCCL makes its communicator only when it is used first, in the thread that does so, and without a deadline.
        """
        total = torch.full((1,), float(self.rank + 1), device=self.device)
        work = made_in_time(partial(self.broadcasts.pg.allreduce, [total]), within)
        self.broadcasts.keep(work)
        self.broadcasts.wait(work)
        expected = self.world_size * (self.world_size + 1) / 2
        if total.item() != expected:
            raise TransportError(f"a first sum over all ranks is {total.item():g}", expected=f"{expected:g}")
        if self.rank == 0:  # every rank is past them, since it took part
            self.notes.sweep(*(f"{kind}/{self.generation}/" for kind in ("group", "ready")))

    def under(self, stop: threading.Event) -> None:
        super().under(stop)
        self.broadcasts.stop = stop

    def send(self, flat: Tensor, to: int) -> Any:
        return self._move(flat, to, sends=True)

    def receive(self, flat: Tensor, source: int) -> Any:
        return self._move(flat, source, sends=False)

    def _move(self, flat: Tensor, peer: int, *, sends: bool) -> Move:
        pg = self.broadcasts.pg
        with self._lock:  # the slices of two transfers must not mix
            if self.backend == "nccl":
                grouped = _GroupedMove(flat, peer, sends)
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
                    self._lines[peer, sends] = _Line(self.timeout_s + _LATER_S)
                self._lines[peer, sends].add(move, works)
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

    def _begin(self, block: Sequence[_GroupedMove]) -> None:
        """Begin transfers over NCCL in one call, on the communicator of the group, which exists already."""
        if not block:
            return
        pg = self.broadcasts.pg
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
        busy = [line.call for line in list(self._lines.values())]
        self.broadcasts.sever(busy)
        self._end_lines()


class _GroupedMove(Move):
    """A transfer over NCCL; those of a block are done at the same moment.

    Attributes:
        work: of the block.
    """

    work: Any = None

    def arrives(self, seconds: float) -> bool:
        if self.done.is_set() or self.work is None:  # its block has not begun
            return self.done.wait(seconds)
        if not completed_within(self.work, seconds):
            return False
        try:
            self.work.wait()  # orders the current stream behind it
            self.landed = self.nbytes
        except RuntimeError as error:
            self.failure = error
        self.end()
        return True


class _Line:
    """The transfers over gloo to one peer, or from it: a thread waits for them, one after the other.

    gloo tells the end of a transfer only to a thread that waits, and closes every connection at the deadline of a wait.

    Args:
        longest_s: deadline of each slice, in seconds.

    Attributes:
        call: of the thread.
    """

    def __init__(self, longest_s: float) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self.call = run_beside(partial(_wait_in_turn, self._queue, longest_s))

    def add(self, move: Move, works: list[tuple[Any, int]]) -> None:
        """Wait next for ``works`` (and their bytes), which are the slices of ``move``."""
        self._queue.put((self.call, move, works))

    def end(self) -> None:
        """End the thread behind the transfers that were added."""
        self._queue.put(None)


def _wait_in_turn(queue: SimpleQueue[Any], longest_s: float) -> None:
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


def _end(lines: dict[tuple[int, bool], _Line]) -> None:
    for line in lines.values():
        line.end()
