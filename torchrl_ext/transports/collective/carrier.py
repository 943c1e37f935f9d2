"""What carries bytes between two ranks of a group, whichever library moves them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torchrl_ext.transports.collective.notes import NoteStore

__all__ = ["Carrier"]


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
        sent, received: bytes by peer, of the transfers that are done, as this end counts them.
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
        self.alive, self.workers = True, range(1, len(peers))
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()

    @property
    def whole(self) -> bool:
        """Whether no peer closed a connection, as far as that can be told."""
        return self.alive

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

    @abstractmethod
    def wait(self, work: Any) -> None:
        """Wait until a transfer is done; one that is done may be waited for again.

        Raises:
            TransportError: a connection broke, a peer is gone, or another thread aborted.
            DeadlineError: nothing moved for `timeout_s`; names the peer.
        """

    def call(self, ranks: Iterable[int]) -> str:
        """Return ranks as messages name them: ``"rank 2 (pid 17 on host)"``."""
        return ", ".join(f"rank {rank} ({self.peers[rank]})" for rank in ranks)

    @abstractmethod
    def sever(self) -> None:
        """End the group at once, here and at its peers, and every wait in other threads. May be called twice."""
