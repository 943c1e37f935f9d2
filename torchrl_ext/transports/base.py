"""The contract of the data layer. A transport moves bytes; it knows no engine, no HTTP, no pause and no cache.

To add one, write the abstract methods of `Transport` (or of `torchrl_ext.transports.standalone.StandaloneTransport`),
name the class in the entry-point group ``torchrl_ext.transports``, and run `torchrl_ext.testing` over it.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from torchrl_ext.errors import ConcurrentUpdateError, ConfigError
from torchrl_ext.landing.loader import Changes
from torchrl_ext.types import Handoff, Info, ParamMeta
from torchrl_ext.weights.shards.blocks import Block
from torchrl_ext.weights.source import WeightSource

__all__ = ["Incremental", "TransferStats", "Transport"]


@dataclass
class TransferStats:
    """The cost of a transport's last update, in bytes and seconds.

    Attributes:
        bytes: bytes that were moved or published, once, whatever the fan-out; None where they equal the model's.
        density: changed elements / all elements.
        spans: seconds by phase (``encode``, ``publish``, ``transfer``).
        rank_bytes: bytes that each trainer rank sent, in order of rank; empty where they were not counted.
        worker_bytes: bytes that each worker received, in order of rank; empty where they were not counted.
        whole: tensors that went the full route although both sides are sharded -> the reason.
    """

    bytes: int | None = None
    density: float = 1.0
    spans: dict[str, float] = field(default_factory=dict)
    rank_bytes: tuple[int, ...] = ()
    worker_bytes: tuple[int, ...] = ()
    whole: Mapping[str, str] = field(default_factory=dict)


class Incremental(ABC):
    """The steps of a worker end that run before the engine pauses, beside `Transport.receive`.

    Only a transport whose versions are stored, or come as changes, has something to do there.
    """

    @abstractmethod
    def prefetch(self, version: int, held: Callable[[], Mapping[str, str]] | None) -> Changes | None:
        """Fetch and check ``version`` while the engine serves.

        Args:
            version: the version to reach.
            held: tells the position digests of what the model holds, should they be needed; None where the model may
                hold parts of several versions, and nothing can be built upon.

        Returns:
            The changes that lead there from the version that the model holds; None where `Transport.receive` gives it
            in full.
        """

    def expect(self, version: int, files: Sequence[str] | None, label: str | None) -> None:
        """Take note of how ``version``, which is prefetched next, comes.

        Args:
            version: its number.
            files: names of its files, where it comes in parts, of which these are one; None for all of it.
            label: what the weights in service are called.

        Raises:
            ConfigError: no version comes in parts here.
        """
        if files is not None:
            raise ConfigError(f"version {version} comes in parts", expected="files of slime's first format")

    def landed(self, changes: Changes) -> None:  # noqa: B027 - without changes there is nothing to follow
        """Take note that the model now holds the version that ``changes`` lead to."""

    def retain(self, names: Callable[[str], bool]) -> None:  # noqa: B027 - full versions need no copies
        """Keep host copies of the tensors that ``names`` accepts; the loader needs them whole to take in changes."""


class _InFull(Incremental):
    """Has nothing to do before the pause: every version comes in full, when it is received."""

    def prefetch(self, version: int, held: Callable[[], Mapping[str, str]] | None) -> None:
        return None


_IN_FULL = _InFull()


class Transport(ABC):
    """A route for weights from a trainer to its workers; an instance is the trainer end, a worker end, or both.

    Trainer end: `open`, then `prepare` for each version. Worker end: `join`, then `receive` for each version. A control
    layer passes infos from the one to the other, or else `torchrl_ext.transports.standalone` does.

    Args:
        timeout_s: deadline of every wait, in seconds.

    A constructor that leaves ``super().__init__()`` out keeps the default.
    """

    name: ClassVar[str]
    timeout_s: float = 60.0
    _last_version = 0
    proves: ClassVar[bool] = False
    """Workers check every tensor by digests that travel with the weights; a sender needs no proof of its own."""
    slices: ClassVar[bool] = False
    """Workers get the blocks that they `want` alone, as `torchrl_ext.landing.sliced.Sliced`; none of what they need no
    part of."""
    parts: ClassVar[bool] = True
    """`prepare` takes a source of some tensors (`WeightSource.part`), and workers get these alone; where this is false,
    it gets the whole source always, whose `part` says what may have changed."""

    def __init__(self, *, timeout_s: float = 60.0) -> None:
        self.timeout_s = timeout_s

    @cached_property
    def stats(self) -> TransferStats:
        """What the last update took."""
        return TransferStats()

    # trainer end

    @abstractmethod
    def open(self, workers: int, params: tuple[ParamMeta, ...]) -> Handoff:
        """Make ready for ``workers`` engine workers and these parameters.

        Returns:
            A handoff whose ``info`` goes to every engine's `join`, while ``transfer`` runs here.
        """

    @abstractmethod
    def prepare(self, source: WeightSource, version: int) -> Handoff:
        """Do everything for a version that can be done before engines pause; what is left is in the handoff.

        A handoff's ``info`` has at least ``version`` and ``params``, a list of `ParamMeta.to_json`.
        """

    def builds_on(self, version: int) -> bool:
        """Return whether the next version may be a part of the model, which has all else in common with ``version``."""
        return True

    def renew(self) -> None:  # noqa: B027 - most versions need nothing of those before
        """Take note that workers hold what another sender sent: the next version must build on nothing of theirs."""

    def follow(self, source: WeightSource) -> None:
        """Take part in one update on a trainer rank that does not drive it: as a rule in the gathers alone.

        Raises:
            WeightSyncError: this rank, or rank 0, could not do its part.
        """
        source.replay()

    def dismiss(self, source: WeightSource, error: BaseException | None = None) -> None:
        """Let the other trainer ranks go, which are in `follow`: an update is over, or failed with ``error``.

        Where that is a `ConcurrentUpdateError`, ranks that follow orders are in the update that goes on, and stay.
        """
        if error is not None:
            source.drain()

    def latest_version(self) -> int:
        """Return the newest version that this transport knows to exist, or tried to send; 0 before the first."""
        return self._last_version

    @contextmanager
    def exclusive(self, what: str) -> Iterator[None]:
        """Hold this transport for one send; a second one meanwhile is refused.

        Raises:
            ConcurrentUpdateError: another one is running.
        """
        busy: threading.Lock = vars(self).setdefault("_busy", threading.Lock())
        if not busy.acquire(blocking=False):
            raise ConcurrentUpdateError(
                f"{what} was called while another send runs on this {self.name} transport",
                state="the running send goes on",
                hint="send from one thread, or give each trainer a transport of its own",
            )
        try:
            yield
        finally:
            busy.release()

    # worker end

    @classmethod
    def from_info(cls, info: Info) -> Transport:
        """Return the worker end for a trainer's `open` info, ready to `join`."""
        return cls()

    def want(self, slices: Mapping[str, tuple[Block, ...]], whole: Mapping[str, str]) -> None:  # noqa: B027
        """Take note of what this worker needs, before it joins; a transport of whole tensors has no use for it.

        Args:
            slices: blocks of tensors by name, none where nothing lands here; a tensor that is left out is needed whole.
            whole: those that are needed whole although the engine is sharded -> the reason.
        """

    @abstractmethod
    def join(self, info: Info) -> None:
        """Connect to the trainer that made ``info``."""

    @abstractmethod
    def receive(self, info: Info, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the pairs of one handoff, full tensors in checkpoint coordinates, in the order of ``info["params"]``.

        Where `slices` is true, `Sliced` tensors of the blocks that were wanted, and nothing for a name without blocks.

        Args:
            info: a handoff's.
            into: tensors that may be filled directly; what is yielded then is that very tensor. Anything else that
                is yielded is memory that nobody writes again.
        """

    @property
    def incremental(self) -> Incremental:
        """The steps of this worker end that run before the pause."""
        return _IN_FULL

    # both ends

    def abort(self) -> None:  # noqa: B027 - a transport without blocking waits has nothing to abort
        """End every wait inside this transport, from another thread."""

    @abstractmethod
    def check_connection(self) -> bool:
        """Return whether this end is connected."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release everything. May be called twice."""


def deadline(timeout_s: float) -> float:
    """Return the monotonic time at which a wait of ``timeout_s`` seconds that begins now ends."""
    return time.monotonic() + timeout_s
