"""What carries bytes between two ranks of a group, whichever library moves them."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, wait
from typing import Any, Protocol

import torch
from torch import Tensor

from torchrl_ext.errors import DeadlineError, TransportError
from torchrl_ext.transports.group.backends import brief
from torchrl_ext.transports.group.notes import NoteStore
from torchrl_ext.transports.group.sockets import await_calls

__all__ = ["Carrier", "Move", "must_return", "sever_at_exit"]

_LOOK_S = 0.1
_TEARDOWN_S = 2.0
_NEAR_S = 10.0
"""A call into C++ that returns while the interpreter ends takes the process down, so the end waits for such a one."""


class Move:
    """A transfer between this rank and a peer.

    Args:
        flat: the memory, which is held until nothing uses it any more.
        peer: the other rank.
        sends: whether this rank sends.

    Attributes:
        nbytes: in all.
        landed: bytes that are there.
        failure: what the transfer met, if it failed.
        done: set once ``flat`` is free again, well or badly.
        counted: whether its bytes are in the carrier's counters.
    """

    def __init__(self, flat: Tensor, peer: int, sends: bool) -> None:
        self.flat: Tensor | None = flat
        self.peer, self.sends, self.nbytes = peer, sends, flat.numel()
        self.landed, self.counted = 0, False
        self.failure: BaseException | None = None
        self.done = threading.Event()

    def is_completed(self) -> bool:
        """Return whether ``flat`` is free again, well or badly."""
        return self.done.is_set()

    def finish(self) -> None:
        """Have the transfer go on to its end, although nobody waits for it."""

    def end(self, failure: BaseException | None = None) -> None:
        """Let go of the memory, and of those who wait."""
        self.failure = self.failure or failure
        self.flat = None
        self.done.set()


class Carrier(ABC):
    """One rank's end of a group in which every rank can send bytes to every other.

    The n-th `receive` from a peer gets the bytes of the n-th `send` of that peer to this rank; both have the same size.
    Between different pairs of ranks there is no order, and any number of transfers may be in flight. Threads may share
    it; the transfers of one pair count in the order in which they were begun.

    Args:
        notes: where the ranks meet.
        generation: names the group; a new one each time.
        rank: this process's.
        peers: how to call the process of each rank, this one included, in a message.
        device: where tensors must be.
        timeout_s: deadline of every wait, in seconds.

    Attributes:
        alive: whether the group can be used.
        world_size: number of ranks.
        workers: ranks other than 0.
        acknowledged: number of the handoff that this worker answered to last; 0 before the first.
        sent, received: bytes by peer, of the transfers that were waited for, as this end counts them.
    """

    def __init__(
        self,
        notes: NoteStore,
        generation: str,
        rank: int,
        peers: dict[int, str],
        *,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.notes, self.generation, self.rank, self.peers = notes, generation, rank, peers
        self.device, self.timeout_s = device, timeout_s
        self.world_size = len(peers)
        self.alive, self.workers, self.acknowledged = True, range(1, len(peers)), 0
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self._lock = threading.RLock()

    def under(self, stop: threading.Event) -> None:
        """Have ``stop`` end every wait from now on."""
        self.notes.stop = stop

    @abstractmethod
    def send(self, flat: Tensor, to: int) -> Any:
        """Begin to send ``flat`` to a rank, and return the work to `wait` for; until then it must not change.

        Args:
            flat: 1-D, contiguous, uint8, of one byte or more, on `device`.
            to: another rank.

        Raises:
            TransportError: the group was ended.
        """

    @abstractmethod
    def receive(self, flat: Tensor, source: int) -> Any:
        """Begin to fill ``flat`` with what a rank sends next, and return the work to `wait` for; as `send`."""

    def wait(self, work: Any) -> None:
        """Wait until a transfer is done; one that is done may be waited for again.

        Raises:
            TransportError: a connection broke, a peer is gone, or another thread aborted.
            DeadlineError: nothing moved for `timeout_s`; names the peer.
        """
        move: Move = work
        landed, until = -1, 0.0
        while not move.done.wait(_LOOK_S) and move.failure is None:
            if move.landed != landed:
                landed, until = move.landed, time.monotonic() + self.timeout_s
            if self._over:
                raise TransportError("the transfer was aborted")
            lost = self._lost()
            if lost and not move.done.wait(_LOOK_S):  # its last bytes may be on their way from the kernel to us
                raise TransportError(f"{lost} closed its connection while bytes moved {self._way(move)}")
            if time.monotonic() >= until:
                raise DeadlineError(f"nothing moved {self._way(move)} for {self.timeout_s:g} s")
        if move.failure is not None:
            raise self._broken(move, move.failure) from move.failure
        with self._lock:
            if not move.counted:
                (self.sent if move.sends else self.received)[move.peer] += move.landed
                move.counted = True

    @property
    def whole(self) -> bool:
        """Whether no peer closed a connection, as far as that can be told."""
        return not self._lost()

    @abstractmethod
    def _lost(self) -> str:
        """Return how to call a peer that closed its connection; "" where none did, as far as that can be told."""

    def call(self, ranks: Iterable[int]) -> str:
        """Return ranks as messages name them: ``"rank 2 (pid 17 on host)"``."""
        return ", ".join(f"rank {rank} ({self.peers[rank]})" for rank in ranks)

    @abstractmethod
    def sever(self) -> None:
        """End the group at once, here and at its peers, and every wait in other threads. May be called twice."""

    @property
    def _over(self) -> bool:
        return self.notes.stop.is_set() or not self.alive

    def _way(self, move: Move) -> str:
        return f"{'to' if move.sends else 'from'} {self.call([move.peer])}"

    def _broken(self, move: Move, error: BaseException) -> TransportError:
        if self._over:
            return TransportError("the transfer was aborted")
        return TransportError(f"a connection broke while bytes moved {self._way(move)}: {brief(error)}")


class _Severable(Protocol):
    def sever(self) -> None: ...


_SEVERABLE: weakref.WeakSet[Any] = weakref.WeakSet()
_RETURNING: dict[Future[Any], float] = {}


def sever_at_exit(one: _Severable) -> None:
    """Sever ``one`` at the end of the process, before its modules go."""
    _SEVERABLE.add(one)


def must_return(call: Future[Any], at: float) -> None:
    """Have the end of the process wait for a call that is in C++, if it will return soon.

    Args:
        call: of a thread.
        at: monotonic moment until which it returns; a later word about the same call replaces an earlier one.
    """
    new = call not in _RETURNING
    _RETURNING[call] = at
    if new:
        call.add_done_callback(lambda done: _RETURNING.pop(done, None))


@atexit.register
def _sever_all() -> None:
    for one in list(_SEVERABLE):
        one.sever()
    await_calls(_TEARDOWN_S)
    soon = time.monotonic() + _NEAR_S
    wait([call for call, at in list(_RETURNING.items()) if at < soon], _NEAR_S)
