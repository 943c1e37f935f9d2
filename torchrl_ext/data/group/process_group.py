"""Process groups of torch's without a default group and without environment variables.

Every `Group` is a generation of its own, so that a failed one leaves nothing behind.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import NotConnectedError, TransportError, WeightSyncError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.group.backends import GLOO_DEVICES, GroupStore, gloo_options, nccl_options
from torchrl_ext.data.group.calls import brief, made_in_time, run_beside, sever_at_exit, wait_for_at_exit
from torchrl_ext.data.group.notes import NoteStore

__all__ = ["Group", "Seat", "form_group", "severed"]

_ALL = -1
"""The peer of a broadcast."""
_LOOK_S = 0.1
_NEWS_S = 0.5
_LATER_S = 5.0
"""Seconds by which the deadline of a thread comes after ours."""
_SLICE_S = 0.1
_SLICE_BYTES = 8 << 20
"""Size of the slices of a transfer over gloo; several in flight keep every connection to a peer busy."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.01
_AT_ONCE = timedelta(milliseconds=1)
_UNUSED_TAG = 1 << 20


class Move:
    """A transfer between this rank and a peer, or all of them.

    Args:
        flat: the memory, which is held until nothing uses it any more.
        peer: the other rank, or `_ALL`.
        sends: whether this rank sends.

    Attributes:
        nbytes: in all.
        landed: bytes that are there.
        failure: the error that ended the transfer, if it failed.
        done: set once ``flat`` is free again, well or badly.
        counted: whether its bytes are in the group's counters.
    """

    def __init__(self, flat: Tensor, peer: int, sends: bool) -> None:
        self.flat: Tensor | None = flat
        self.peer, self.sends, self.nbytes = peer, sends, flat.numel()
        self.landed, self.counted = 0, False
        self.failure: BaseException | None = None
        self.done = threading.Event()

    def arrives(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until ``flat`` is free again, and return whether it is."""
        return self.done.wait(seconds)

    def end(self) -> None:
        """Let go of the memory, and end the waits of other threads."""
        self.flat = None
        self.done.set()


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


def severed(generation: str) -> str:
    """Return the name of the note that says why a group was severed; the first reason stays.

    A rank leaves one when it severs its end, and the trainer's notes leave one for a process whose connection closes.
    """
    return f"severed/{generation}"


@dataclass(frozen=True)
class Seat:
    """The place of this process in a group that is formed.

    Attributes:
        notes: where the ranks meet.
        generation: names the group; a new one each time.
        rank: this process's.
        peers: how to call the process of each rank, this one included, in a message.
        device: where tensors must be.
        within: deadline of forming the group; every later wait has as many seconds.
    """

    notes: NoteStore
    generation: str
    rank: int
    peers: dict[int, str]
    device: torch.device
    within: Deadline


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
class Group:
    """A process group of one generation of ranks: rank 0 broadcasts to all others, or one rank sends to another.

    The n-th `receive` from a peer gets the bytes of the n-th `send` of that peer to this rank; both have the same size.
    Any number of transfers may be in flight. Threads may share the group; the transfers of one pair count in the order
    in which they were begun.

    Args:
        seat: of this process.
        pg: torch's backend object.
        backend: ``"gloo"`` or ``"nccl"``.
        store: held with it, since C++ does not keep the Python methods of a store.

    Attributes:
        notes, generation, rank, peers, device: as in `Seat`.
        stop: set by another thread to end every wait.
        timeout_s: deadline of every wait, in seconds.
        alive: whether the group can be used.
        world_size: number of ranks.
        workers: ranks other than 0.
        acknowledged: number of the handoff that this worker answered to last; 0 before the first.
        announced, params: number of the last announcement, 0 before the first, and its parameters.
        sent, received: bytes by peer, of the transfers that were waited for, as this end counts them.
    """

    def __init__(self, seat: Seat, pg: Any, backend: str, store: Any) -> None:
        self.notes, self.generation, self.rank, self.peers = seat.notes, seat.generation, seat.rank, seat.peers
        self.device, self.timeout_s, self.stop = seat.device, seat.within.timeout_s, seat.within.stop
        self.world_size = len(seat.peers)
        self.alive, self.workers, self.acknowledged, self.announced = True, range(1, len(seat.peers)), 0, 0
        self.params: tuple[ParamMeta, ...] = ()
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self._reason, self._next_look = "", 0.0
        self._lock = threading.RLock()
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
        move = _WorkMove(flat, _ALL, self.rank == 0)
        move.work, move.blocks = work, self.backend == "gloo"
        with self._lock:
            while self._begun and self._begun[0].is_completed():
                self._begun.popleft()
            self._begun.append(work)
        return move

    def send(self, flat: Tensor, to: int) -> Move:
        """Begin to send ``flat`` to a rank, and return the transfer to `wait` for; until then it must not change.

        Args:
            flat: 1-D, contiguous, uint8, of one byte or more, on `device`.
            to: another rank.

        Raises:
            TransportError: the group was ended.
        """
        return self._move(flat, to, sends=True)

    def receive(self, flat: Tensor, source: int) -> Move:
        """Begin to fill ``flat`` with the next bytes from a rank, and return the transfer to `wait` for; as `send`."""
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
        """Begin the transfers of a block in one call.

        Over NCCL the transfers of a block run beside each other, and blocks (a transfer outside of any is one) run in
        order, so that all ranks must begin those that they share in one order. Over gloo it changes nothing.
        """
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

    def wait(self, move: Move) -> None:
        """Wait until a transfer is done; one that is done may be waited for again.

        Raises:
            TransportError: a connection broke, a peer is gone, or another thread aborted.
            DeadlineError: nothing moved for `timeout_s`; names the peer.
        """
        landed, within = 0, Deadline(self.timeout_s, stop=self.stop)
        while (not move.arrives(_LOOK_S) and move.failure is None) or self.stop.is_set():
            if move.landed != landed:
                landed, within = move.landed, within.again()
            if self._over:
                raise TransportError("the transfer was aborted")
            lost = self._lost()
            if lost and not move.arrives(_LOOK_S):  # its last bytes may be on their way from the kernel to us
                raise TransportError(f"bytes moved{self._way(move)} when the group was severed: {lost}")
            within.check(f"nothing moved{self._way(move)}")
        if move.failure is not None:
            raise self._broken(move, move.failure) from move.failure
        with self._lock:
            if not move.counted and move.peer != _ALL:
                (self.sent if move.sends else self.received)[move.peer] += move.landed
                move.counted = True

    @property
    def intact(self) -> bool:
        """Whether every rank is in the group, as far as is known."""
        return self.alive and not self._lost()

    def _lost(self) -> str:
        """Return why a peer does not answer any more, as of the last half second; "" if nobody knows of a failure."""
        now = time.monotonic()
        if not self._reason and now >= self._next_look:
            self._next_look = now + _NEWS_S
            try:
                return self.reason()
            except NotConnectedError as error:
                self._reason = error.what
        return self._reason

    def reason(self, timeout_s: float = 0.0) -> str:
        """Return why the group was severed; "" if no rank says so within ``timeout_s`` seconds.

        Raises:
            NotConnectedError: the notes are gone, and the trainer with them.
        """
        if not self._reason:
            found = self.notes.wait(severed(self.generation), Deadline(timeout_s, stop=self.stop))
            self._reason = str(found[0]) if found else ""
        return self._reason

    def explain(self, reason: str) -> None:
        """Leave word of why the group is severed, unless there is one."""
        with suppress(WeightSyncError):  # the trainer is gone, which ends the group as well
            self.notes.put(severed(self.generation), reason, keep=True)

    def call(self, ranks: Iterable[int]) -> str:
        """Return ranks as messages name them: ``"rank 2 (pid 17 on host)"``."""
        return ", ".join(f"rank {rank} ({self.peers[rank]})" for rank in ranks)

    def sever(self, reason: str = "") -> None:
        """End the group at once, here and at its peers, and every wait in other threads. May be called twice.

        Args:
            reason: for the other ranks.
        """
        with self._lock:
            if not self.alive:
                return
            self.alive = False
        reason = reason or f"{self.call([self.rank])} left it"
        if self.rank == 0:
            self.explain(reason)
        else:  # which asks the trainer, that may be frozen
            run_beside(partial(self.explain, reason))
        self._end()

    @property
    def _over(self) -> bool:
        return self.stop.is_set() or not self.alive

    def _way(self, move: Move) -> str:
        return "" if move.peer == _ALL else f" {'to' if move.sends else 'from'} {self.call([move.peer])}"

    def _broken(self, move: Move, error: BaseException) -> TransportError:
        if self._over:
            return TransportError("the transfer was aborted")
        return TransportError(f"a connection broke while bytes moved{self._way(move)}: {brief(error)}")


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
    pause = threading.Event()
    while begun:
        while not begun[0].is_completed():
            pause.wait(0.01)
        begun.popleft()
    held.clear()
