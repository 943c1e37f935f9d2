"""One rank's end of a group in which ranks send each other bytes, whichever library moves them."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import NotConnectedError, TransportError, WeightSyncError
from torchrl_ext.transports.group.calls import brief, run_beside
from torchrl_ext.transports.group.notes import NoteStore
from torchrl_ext.types import ParamMeta

__all__ = ["ALL", "Member", "Move", "PeerGroup", "Seat", "severed"]

ALL = -1
"""The peer of a broadcast."""

_LOOK_S = 0.1
_NEWS_S = 0.5


class Move:
    """A transfer between this rank and a peer, or all of them.

    Args:
        flat: the memory, which is held until nothing uses it any more.
        peer: the other rank, or `ALL`.
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


class PeerGroup(ABC):
    """One rank's end of a group in which every rank can send bytes to every other.

    The n-th `receive` from a peer gets the bytes of the n-th `send` of that peer to this rank; both have the same size.
    Any number of transfers may be in flight. Threads may share the group; the transfers of one pair count in the order
    in which they were begun.

    Args:
        seat: of this process.

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

    def __init__(self, seat: Seat) -> None:
        self.notes, self.generation, self.rank, self.peers = seat.notes, seat.generation, seat.rank, seat.peers
        self.device, self.timeout_s, self.stop = seat.device, seat.within.timeout_s, seat.within.stop
        self.world_size = len(seat.peers)
        self.alive, self.workers, self.acknowledged, self.announced = True, range(1, len(seat.peers)), 0, 0
        self.params: tuple[ParamMeta, ...] = ()
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self._reason, self._next_look = "", 0.0
        self._lock = threading.RLock()

    @abstractmethod
    def send(self, flat: Tensor, to: int) -> Move:
        """Begin to send ``flat`` to a rank, and return the transfer to `wait` for; until then it must not change.

        Args:
            flat: 1-D, contiguous, uint8, of one byte or more, on `device`.
            to: another rank.

        Raises:
            TransportError: the group was ended.
        """

    @abstractmethod
    def receive(self, flat: Tensor, source: int) -> Move:
        """Begin to fill ``flat`` with the next bytes from a rank, and return the transfer to `wait` for; as `send`."""

    def together(self) -> AbstractContextManager[None]:
        """Begin the transfers of a block in one call.

        Over NCCL the transfers of a block run beside each other, and blocks (a transfer outside of any is one) run in
        order, so that all ranks must begin those that they share in one order. Elsewhere it changes nothing.
        """
        return nullcontext()

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
            if not move.counted and move.peer != ALL:
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
        self._sever()

    @abstractmethod
    def _sever(self) -> None:
        """End the transfers and the connections of the group."""

    @property
    def _over(self) -> bool:
        return self.stop.is_set() or not self.alive

    def _way(self, move: Move) -> str:
        return "" if move.peer == ALL else f" {'to' if move.sends else 'from'} {self.call([move.peer])}"

    def _broken(self, move: Move, error: BaseException) -> TransportError:
        if self._over:
            return TransportError("the transfer was aborted")
        return TransportError(f"a connection broke while bytes moved{self._way(move)}: {brief(error)}")


class Member(ABC):
    """One rank's place in one group after the other.

    Attributes:
        stop: set by another thread to end every wait.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._group: PeerGroup | None = None

    def under(self, within: Deadline) -> None:
        """End every wait of the next step, here and in the group, when ``within`` is stopped."""
        self.stop = within.stop
        if self._group is not None:
            self._group.stop = within.stop

    @property
    def connected(self) -> bool:
        """Whether there is a group that can be used."""
        return self._group is not None and self._group.alive

    def carrier(self) -> Any:
        """Return the current group, of the class that this place forms.

        Raises:
            NotConnectedError: there is none, or it was closed.
        """
        if self._group is None or not self._group.alive:
            closed = "" if self._group is None else ": its group was closed after a failure"
            raise NotConnectedError(
                f"this end of the transport is not connected{closed}",
                hint="call init_all_workers_group on every rank at the same time, or connect through a sender",
            )
        return self._group

    @abstractmethod
    def close(self) -> None:
        """Leave the group, and end every wait in it. May be called twice."""
