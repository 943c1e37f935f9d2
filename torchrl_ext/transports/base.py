"""The contract of the data layer. A transport moves bytes; it knows no engine, no HTTP, no pause and no cache.

Its two ends are two classes: `Transport` is the trainer's, `WorkerEnd` a worker's. A control layer carries what the one
says to the other (`Handoff.info`), or else a `torchrl_ext.transports.standalone.Mailbox` does.

To add a transport, write the abstract methods of both (or of `StandaloneTransport`, which works without a control
layer, too), name the class in the entry-point group ``torchrl_ext.transports``, and run `torchrl_ext.testing` over it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from torchrl_ext.deadline import Deadline, one_at_a_time
from torchrl_ext.errors import ConcurrentUpdateError
from torchrl_ext.landing.loader import Changes
from torchrl_ext.reports import Spans
from torchrl_ext.transports.ranks import Steps, TrainerRanks, numbered
from torchrl_ext.types import Info, ParamMeta
from torchrl_ext.weights.shards.blocks import Block
from torchrl_ext.weights.source import WeightSource

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "Arrival", "Handoff", "TransferStats", "Transport", "Update", "Worker", "WorkerEnd", "exclusive", "passing",
    "steps_of",
]  # fmt: skip


def _nothing(*_: object) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Update:
    """One version as a trainer sends it.

    Attributes:
        source: the weights. Its ``part`` (`torchrl_ext.types.Part`) says which version has all other tensors, where it
            yields some; of a transport whose `Transport.parts` is false, which of all may differ from that version.
        version: its number.
        anew: workers may hold another sender's weights, so this version must build on nothing of theirs.
    """

    source: WeightSource
    version: int
    anew: bool = False

    @cached_property
    def params(self) -> tuple[ParamMeta, ...]:
        """The parameters that the source yields, in order; asked for once."""
        return self.source.params()


@dataclass
class TransferStats:
    """The cost of one update on a transport, in bytes and seconds.

    Attributes:
        bytes: bytes that were moved or published, once, whatever the fan-out; None where they equal the source's.
        density: changed elements / all elements.
        spans: seconds by phase (``encode``, ``publish``, ``transfer``).
        rank_bytes: bytes that each trainer rank sent, in order of rank; empty where they were not counted.
        worker_bytes: bytes that each worker received, in order of rank; empty where they were not counted.
        encoding: kinds of blocks in which changes were coded, and why; empty for a full update.
        whole: tensors that a sharded transport did not move as slices -> why a worker needs all of the tensor, or why
            the trainer gathers it.
    """

    bytes: int | None = None
    density: float = 1.0
    spans: Spans = field(default_factory=Spans)
    rank_bytes: tuple[int, ...] = ()
    worker_bytes: tuple[int, ...] = ()
    encoding: str = ""
    whole: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Handoff:
    """One version that is ready to be sent, or an invitation to workers to join.

    Attributes:
        info: JSON-safe; what the trainer's end says to a worker's, beside the version and its parameters.
        ahead: moves what can be moved while engines still generate, beside their prefetch.
        transfer: moves the bytes, beside the engines' load. Files leave it nothing to do.
        served: takes the oldest version that an engine may still read, now that this one is in service; None where no
            control layer knows what workers read. Older ones may go.
        stats: filled in by `Transport.prepare` and by the steps.
    """

    info: Info = field(default_factory=dict)
    ahead: Callable[[Deadline], None] = _nothing
    transfer: Callable[[Deadline], None] = _nothing
    served: Callable[[int | None], None] = _nothing
    stats: TransferStats = field(default_factory=TransferStats)


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One worker, as it joins a transport.

    Attributes:
        rank: 1, 2, ... among the workers of all engines; the trainer is rank 0.
        params: of the model, in the trainer's order.
        slices: blocks of tensors that this worker needs, by name, none where nothing lands here; a tensor that is left
            out is needed whole. Only for a transport that `Transport.slices`.
        whole: tensors that are needed whole although the engine is sharded -> the reason.
        copies: names the tensors of which the worker end keeps host copies, for a loader that cannot patch them.
    """

    rank: int
    params: tuple[ParamMeta, ...] = ()
    slices: Mapping[str, tuple[Block, ...]] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    copies: Callable[[str], bool] = lambda name: False


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One version as a worker is to receive it: its number, its parameters in order, and the handoff's info."""

    version: int
    params: tuple[ParamMeta, ...]
    info: Info = field(default_factory=dict)


class Transport(ABC):
    """The trainer's end of a route for weights.

    Args:
        timeout_s: deadline of every wait, in seconds. A constructor that leaves ``super().__init__()`` out keeps 60.
    """

    name: ClassVar[str]
    proves: ClassVar[bool] = False
    """Workers check every tensor by digests that travel with the weights; a sender needs no proof of its own."""
    slices: ClassVar[bool] = False
    """Workers receive only the blocks that they need (`Worker.slices`), as `torchrl_ext.landing.sliced.Sliced`."""
    parts: ClassVar[bool] = True
    """An update of some tensors carries only these; where this is false, the transport finds itself what changed, and
    `prepare` calls `WeightSource.look` for what is not known to be finite, so that no pass has to."""
    gathers: ClassVar[bool] = True
    """`prepare` or ``transfer`` passes over the source, in which the other trainer ranks take part."""
    background: ClassVar[bool] = False
    """An update may run in another thread, from a copy of the weights, while the trainer computes."""
    timeout_s: float = 60.0

    def __init__(self, *, timeout_s: float = 60.0) -> None:
        self.timeout_s = timeout_s

    @cached_property
    def ranks(self) -> TrainerRanks:
        """The ranks of this trainer; a sender that drives updates sets those of its own."""
        return TrainerRanks(numbered("transport"), self.timeout_s)

    @abstractmethod
    def open(self, workers: int, params: tuple[ParamMeta, ...], within: Deadline) -> Handoff:
        """Invite ``workers`` engine workers to `join`, for these parameters; ``transfer`` runs while they do."""

    @abstractmethod
    def prepare(self, update: Update, within: Deadline) -> Handoff:
        """Do everything for a version that can be done before engines pause; the handoff has the rest.

        Raises:
            StaleBaseError: the version on which a part builds is not there any more; the sender sends everything.
        """

    def rank_steps(self, source: WeightSource) -> Steps:
        """Return what another trainer rank does when rank 0 orders it through `ranks`, by the name of the order."""
        return {}

    def latest_version(self) -> int:
        """Return the newest version that this transport knows to exist; 0 before the first."""
        return 0

    @classmethod
    @abstractmethod
    def join(cls, info: Info, here: Worker, within: Deadline) -> WorkerEnd:
        """Return the end of worker ``here``, connected to the trainer whose `open` made ``info``."""

    @abstractmethod
    def check_connection(self) -> bool:
        """Return whether this end is connected."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release everything. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class WorkerEnd(ABC):
    """A worker's end: `stage` and `receive` for each version, and `close`."""

    def stage(
        self,
        version: int,
        held: Callable[[str], Mapping[str, str]] | None,
        within: Deadline,
        *,
        files: Sequence[str] | None = None,
        label: str | None = None,
    ) -> Changes | None:
        """Fetch, check and decode a version while the engine serves.

        Args:
            version: the version to reach.
            held: takes the name of a digest (`torchrl_ext.weights.digests`) and returns the digests of what the model
                holds; None where the model may hold parts of several versions, and nothing can be built upon.
            within: deadline of each wait.
            files: names of its files, where it comes in parts, of which these are one; None for all of it.
            label: what the weights in service are called.

        Returns:
            The changes that lead there from what the model holds; None where `receive` brings it in full.

        Raises:
            StaleBaseError: it builds on a version that this worker does not hold.
        """
        return None

    @abstractmethod
    def receive(self, arrival: Arrival, into: Mapping[str, Tensor], within: Deadline) -> Iterator[tuple[str, Tensor]]:
        """Yield the pairs of one version, full tensors in checkpoint coordinates, in the order of its parameters.

        Where `Transport.slices` is true, `Sliced` tensors of the blocks that the worker needs, and nothing for a name
        without blocks.

        Args:
            arrival: the version.
            into: tensors that may be filled directly; that very tensor is yielded then. Whatever else is yielded is
                memory that nobody writes again.
            within: deadline of each wait.
        """

    def landed(self, staged: Changes) -> None:  # noqa: B027 - without changes there is nothing to follow
        """Take note that the model now holds the version that ``staged`` leads to."""

    @abstractmethod
    def close(self) -> None:
        """Leave the trainer, and end every wait in other threads. May be called twice."""


def exclusive(transport: Transport, what: str) -> AbstractContextManager[None]:
    """Hold a transport for one send; a second one meanwhile is refused with a ConcurrentUpdateError."""
    refusal = ConcurrentUpdateError(
        f"{what} was called while another send runs on this {transport.name} transport",
        state="the running send goes on",
        hint="send from one thread, or give each trainer a transport of its own",
    )
    return one_at_a_time(vars(transport).setdefault("_busy", threading.Lock()), refusal)


@contextmanager
def passing(transport: Transport, source: WeightSource) -> Iterator[None]:
    """Have the other trainer ranks take part in the block's pass over ``source``, which is finished if it fails."""
    if transport.gathers:
        transport.ranks.session.order("gather", always=True)
    try:
        yield
    except BaseException:
        if transport.gathers:
            source.drain()
        raise


def steps_of(transport: Transport, source: WeightSource) -> Steps:
    """Return what a trainer rank other than 0 does for each order of an update of ``source``."""
    return {"gather": lambda order: source.replay(), **transport.rank_steps(source)}
