"""A group of ranks: the notes by which they meet, a carrier that moves their bytes, and a deadline for every wait.

Every `Group` is a generation of its own, so that a failed one leaves nothing behind. It asks no carrier what it is.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import NotConnectedError, TransportError, WeightSyncError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.group.calls import brief, run_beside, sever_at_exit
from torchrl_ext.data.group.notes import NoteStore

__all__ = ["DEVICE", "HOST", "Carrier", "Group", "Move", "Seat", "Sizes", "form_group", "polled", "severed"]

_LOOK_S = 0.1
_NEWS_S = 0.5
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.00005, 0.0005
"""Between two looks at a transfer of a device, which moves a MiB in some microseconds."""


@dataclass(frozen=True)
class Seat:
    """The place of this process in a group that is formed.

    Attributes:
        notes: where the ranks meet.
        generation: names the group; a new one each time.
        rank: this process's.
        peers: how to call the process of each rank, this one included, in a message.
        device: where tensors must be.
        backend: that carries tensors of the device, by the name that torch gives it: ``"gloo"``, ``"nccl"``, ...
        within: deadline of forming the group; every later wait has as many seconds.
    """

    notes: NoteStore
    generation: str
    rank: int
    peers: dict[int, str]
    device: torch.device
    backend: str
    within: Deadline


@final
class Move:
    """A transfer in which this rank takes part.

    Args:
        kind: ``"sum"`` adds ``flat`` up over all ranks, in place; ``"broadcast"`` is from rank 0.
        flat: the memory, which is held until nothing uses it any more.
        peer: the other rank of ``"send"`` and ``"receive"``.

    Attributes:
        nbytes: in all.
        landed: bytes that are there.
        failure: the error that ended the transfer, if it failed.
        done: set once ``flat`` is free again, well or badly.
        handle: of the carrier.
        counted: whether its bytes are in the group's counters.
    """

    def __init__(
        self, kind: Literal["sum", "broadcast", "send", "receive"], flat: Tensor, peer: int | None = None
    ) -> None:
        self.kind, self.peer, self.nbytes = kind, peer, flat.nbytes
        self.flat: Tensor | None = flat
        self.landed, self.counted = 0, False
        self.failure: BaseException | None = None
        self.done = threading.Event()
        self.handle: Any = None

    def end(self, failure: BaseException | None = None) -> None:
        """Let go of the memory, and end the waits of other threads."""
        if failure is None:
            self.landed = self.nbytes
        self.failure, self.flat, self.handle = failure, None, None
        self.done.set()


@dataclass(frozen=True)
class Sizes:
    """In which pieces a carrier likes its bytes.

    Attributes:
        bucket_bytes: small tensors share a buffer of this size.
        direct_bytes: from this size on a tensor travels as it lies in memory.
        slice_bytes: larger transfers are cut into such pieces; None cuts none.
    """

    bucket_bytes: int
    direct_bytes: int
    slice_bytes: int | None


HOST = Sizes(8 << 20, 1 << 20, 8 << 20)
"""For gloo, as measured: from `direct_bytes` on a copy costs more than a broadcast; several slices in flight keep every
connection to a peer busy."""

DEVICE = Sizes(256 << 20, 32 << 20, None)
"""For NVLink and the like, not measured: each transfer has some 50 us of its own, in which a device copies 32 MiB."""


class Carrier(ABC):
    """Moves bytes between the ranks of one group, between tensors on one device; a class for each library that does it.

    A constructor takes a `Seat`, and returns by its deadline. It may return before every rank is there: the first
    transfer of each group is a ``"sum"`` of one number, which proves that it works.

    Where an error is raised, a transfer fails or `error` says something, no transfer of this carrier can be relied on
    any more, and its memory may be written until it ends: `abort` is the only call that still makes sense, here and at
    every other rank. The process lives, and its next carrier knows nothing of this one.

    Attributes:
        library: that carries, as messages name it; all ranks need the same.
        sizes: in which pieces transports send.
    """

    library: ClassVar[str] = "torch"
    sizes: ClassVar[Sizes]

    @abstractmethod
    def begin(self, moves: Sequence[Move], within: Deadline) -> None:
        """Begin transfers beside each other; one thread calls it at a time, and `abort` may come meanwhile.

        Calls run in order where the library has one order for all (NCCL), so ranks make the calls that they share in
        the same order. What the calling thread queued on the device before is done before the bytes are read.

        Args:
            moves: one or more; a ``"sum"`` or ``"broadcast"`` comes by itself.
            within: deadline for the library to take them, which some do only when the peers do.

        Raises:
            RuntimeError: of the library; also a TransportError or DeadlineError of ours.
        """

    @abstractmethod
    def arrives(self, move: Move, seconds: float) -> bool:
        """Wait at most ``seconds`` until a transfer is over, and return whether it is; any thread may ask.

        Then it has `Move.end`, and what this thread queues on the device from now on runs after it. Where the carrier
        was aborted or has an `error` by then, it has failed.
        """

    def error(self) -> str:
        """Return what broke this carrier, if the library says so beside any transfer; "" while nothing is known."""
        return ""

    @abstractmethod
    def abort(self) -> None:
        """End every transfer, here and at its peers as far as they notice, without waiting; any thread, at any time.

        May be called twice. Memory is held until the library has let go of it.
        """


def polled(over: Callable[[], bool], within: Deadline) -> bool:
    """Return whether ``over()`` becomes true within the deadline, asking as often as suits the speed of a device."""
    return any(over() for _ in within.pauses(shortest_s=_SHORTEST_PAUSE_S, longest_s=_LONGEST_PAUSE_S))


def severed(generation: str) -> str:
    """Return the name of the note that says why a group was severed; the first reason stays.

    A rank leaves one when it severs its end, and the trainer's notes leave one for a process whose connection closes.
    """
    return f"severed/{generation}"


def form_group(seat: Seat, carrier: Callable[[Seat], Carrier]) -> Group:
    """Return a group over the carrier of a seat, once it works.

    Raises:
        TransportError, DeadlineError: not every rank takes part.
    """
    try:
        group = Group(seat, carrier(seat))
    except WeightSyncError:
        raise
    except RuntimeError as error:
        raise TransportError(f"connections could not be made: {brief(error)}") from error
    try:
        total, expected = group.total(seat.rank + 1), len(seat.peers) * (len(seat.peers) + 1) / 2
        if total != expected:
            raise TransportError(f"a first sum over all ranks is {total:g}", expected=f"{expected:g}")
        if seat.rank == 0:  # every rank is past them, since it took part
            for kind in ("group", "ready"):
                seat.notes.drop(f"{seat.generation}/{kind}/")
    except BaseException:
        group.sever()
        raise
    return group


@final
class Group:
    """One generation of ranks: rank 0 broadcasts to all others, or one rank sends to another.

    The n-th `receive` from a peer gets the bytes of the n-th `send` of that peer to this rank; both have the same size.
    Any number of transfers may be in flight. Threads may share the group; the transfers of one pair count in the order
    in which they were begun.

    Args:
        seat: of this process.
        carrier: formed for this seat, and owned from here on.

    Attributes:
        notes, generation, rank, peers, device: as in `Seat`.
        carrier: moves the bytes.
        stop: set by another thread to end every wait.
        timeout_s: deadline of every wait, in seconds.
        alive: whether the group can be used.
        world_size: number of ranks.
        workers: ranks other than 0.
        acknowledged: number of the handoff that this worker answered to last; 0 before the first.
        announced, params: number of the last announcement, 0 before the first, and its parameters.
        sent, received: bytes by peer, of the transfers that were waited for, as this end counts them.
    """

    def __init__(self, seat: Seat, carrier: Carrier) -> None:
        self.notes, self.generation, self.rank, self.peers = seat.notes, seat.generation, seat.rank, seat.peers
        self.device, self.timeout_s, self.stop = seat.device, seat.within.timeout_s, seat.within.stop
        self.world_size, self.carrier = len(seat.peers), carrier
        self.alive, self.workers, self.acknowledged, self.announced = True, range(1, len(seat.peers)), 0, 0
        self.params: tuple[ParamMeta, ...] = ()
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self._reason, self._next_look = "", 0.0
        self._lock, self._order = threading.Lock(), threading.RLock()
        self._block: list[Move] | None = None
        self._end = weakref.finalize(self, carrier.abort)
        self._end.atexit = False  # then it is severed
        sever_at_exit(self)

    def total(self, own: float) -> float:
        """Return the sum of a number of each rank (float32).

        Raises:
            TransportError, DeadlineError: as `wait`.
        """
        flat = torch.full((1,), own, dtype=torch.float32, device=self.device)
        self.wait(self._begin(Move("sum", flat)))
        return flat.item()

    def broadcast(self, flat: Tensor) -> Move:
        """Begin a broadcast of ``flat`` from rank 0, and return the transfer to `wait` for; else as `send`."""
        return self._begin(Move("broadcast", flat))

    def send(self, flat: Tensor, to: int) -> Move:
        """Begin to send ``flat`` to a rank, and return the transfer to `wait` for; until then it must not change.

        Args:
            flat: 1-D, contiguous, uint8, of one byte or more, on `device`.
            to: another rank.

        Raises:
            TransportError: the group was ended, or a connection broke.
            DeadlineError: the peers did not take part within `timeout_s`, where the carrier waits for them.
        """
        return self._begin(Move("send", flat, to))

    def receive(self, flat: Tensor, source: int) -> Move:
        """Begin to fill ``flat`` with the next bytes from a rank, and return the transfer to `wait` for; as `send`."""
        return self._begin(Move("receive", flat, source))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Begin the sends and receives of a block in one call, at its end; ones of a block that raises never begin.

        All ranks must begin the blocks that they share in one order; a transfer outside of any is a block.
        """
        with self._order:
            if self._block is not None:
                yield
                return
            block = self._block = []
            try:
                yield
            finally:
                self._block = None
            self._launch(block)

    def _begin(self, move: Move) -> Move:
        with self._order:  # the pieces of two transfers must not mix
            if self._block is None:
                self._launch([move])
            else:
                self._block.append(move)
        return move

    def _launch(self, moves: list[Move]) -> None:
        if not self.alive:
            raise TransportError("the transfer was aborted")
        if not moves:
            return
        peers = sorted({move.peer for move in moves if move.peer is not None})
        try:
            self.carrier.begin(moves, Deadline(self.timeout_s, self.call(peers) or "the other ranks", self.stop))
        except WeightSyncError:
            raise
        except RuntimeError as error:
            raise self._broken(moves[0], error) from error

    def wait(self, move: Move) -> None:
        """Wait until a transfer is done; one that is done may be waited for again.

        Raises:
            TransportError: a connection broke, a peer is gone, or another thread aborted.
            DeadlineError: nothing moved for `timeout_s`; names the peer.
        """
        landed, within = 0, Deadline(self.timeout_s, stop=self.stop)
        while (not self.carrier.arrives(move, _LOOK_S) and move.failure is None) or self.stop.is_set():
            if move.landed != landed:
                landed, within = move.landed, within.again()
            if self._over:
                raise TransportError("the transfer was aborted")
            lost = self._lost()
            if lost and not self.carrier.arrives(move, _LOOK_S):  # its last bytes may be on their way to us
                raise TransportError(f"bytes moved{self._way(move)} when the group was severed: {lost}")
            if error := self.carrier.error():
                raise self._broken(move, error)
            within.check(f"nothing moved{self._way(move)}")
        if move.failure is not None:
            raise self._broken(move, move.failure) from move.failure
        with self._lock:
            if not move.counted and move.peer is not None:
                (self.sent if move.kind == "send" else self.received)[move.peer] += move.landed
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
        return "" if move.peer is None else f" {'to' if move.kind == 'send' else 'from'} {self.call([move.peer])}"

    def _broken(self, move: Move, error: BaseException | str) -> TransportError:
        if self._over:
            return TransportError("the transfer was aborted")
        why = error if isinstance(error, str) else brief(error)
        return TransportError(f"a connection broke while bytes moved{self._way(move)}: {why}")
