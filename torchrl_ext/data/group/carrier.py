"""A carrier moves bytes between the ranks of one group; a class for each library that does it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.data.group.store import KeyStore

__all__ = ["DEVICE", "HOST", "Carrier", "Move", "Seat", "Sizes", "polled"]

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.00005, 0.0005
"""Between two looks at a transfer of a device, which moves a MiB in some microseconds."""


@dataclass(frozen=True)
class Seat:
    """The place of this process in a group that is formed.

    Attributes:
        store: of the connection.
        rank: this process's.
        peers: how to call the process of each rank, this one included, in a message.
        device: where tensors must be.
        backend: that carries tensors of the device, by the name that torch gives it: ``"gloo"``, ``"nccl"``, ...
        within: deadline of forming the group; every later wait has as many seconds.
    """

    store: KeyStore
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
