"""The contract of the data layer. A transport moves bytes; it knows nothing of engines, HTTP, pauses or caches.

Its two ends are two classes: `Transport` is the trainer's, `LandingEnd` a worker's. A control layer carries the
trainer's messages (`Handoff.info`) to the workers. **A failure ends the connection, always**: whoever drives a
transport calls `Transport.close` after any error, and the next update begins with `Transport.open`.

To add a transport, implement the abstract methods of both (or of
`torchrl_ext.data.transports.standalone.StandaloneTransport`, which also works without a control layer), name the class
in the entry-point group ``torchrl_ext.transports``, and run `torchrl_ext.testing` over it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import Tensor

from torchrl_ext.base.deadline import Deadline, one_at_a_time
from torchrl_ext.base.errors import ConcurrentUpdateError
from torchrl_ext.base.reports import Spans
from torchrl_ext.base.types import Info, ParamMeta
from torchrl_ext.data.group.ranks import Steps, TrainerRanks, numbered
from torchrl_ext.data.landing.patcher import Changes
from torchrl_ext.data.weights.blocks import Block
from torchrl_ext.data.weights.source import WeightSource

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "Abilities",
    "Arrival",
    "Handoff",
    "LandingEnd",
    "TransferStats",
    "Transport",
    "Update",
    "Worker",
    "exclusive",
    "passing",
    "steps_of",
]  # fmt: skip


def _nothing(*_: object) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Update:
    """One version as a trainer sends it.

    Attributes:
        source: the weights. If it yields only some tensors, its ``part`` (`torchrl_ext.base.types.Part`) names the
            version that has the others; for a transport with the ability ``compares`` it yields all, and ``part`` names
            the ones that may differ.
        version: its number.
        anew: workers may hold another sender's weights, so this version must not build on them.
    """

    source: WeightSource
    version: int
    anew: bool = False

    @cached_property
    def params(self) -> tuple[ParamMeta, ...]:
        """The parameters that the source yields, in order; read once."""
        return self.source.params()


@dataclass
class TransferStats:
    """The cost of one update on a transport, in bytes and seconds.

    Attributes:
        bytes: bytes that were moved or published, counted once for all workers; None if they equal the source's.
        density: changed elements / all elements.
        spans: seconds by phase (``encode``, ``publish``, ``transfer``).
        rank_bytes: bytes that each trainer rank sent, in order of rank; empty if not counted.
        worker_bytes: bytes that each worker received, in order of rank; empty if not counted.
        encoding: how changes were coded; empty for a full update.
        whole: tensors that a sharded transport did not move as slices -> the reason why a worker needs the whole
            tensor, or why the trainer gathers it.
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
    """One version that is ready to be sent, or an invitation that workers join.

    Attributes:
        info: JSON-safe; the trainer end's message to a worker's end, besides the version and its parameters.
        ahead: moves the bytes that can be moved while engines still generate, during their prefetch.
        transfer: moves the bytes during the engines' load; does nothing for files.
        served: called when the version is in service, with the oldest version that an engine may still read (None if no
            control layer knows it). Older versions may be removed.
        digest: digest over those of all tensors (`torchrl_ext.data.weights.digests.digest_of`), if they travel with the
            version (the ability ``digests``) and this end knows them; workers repeat it.
        stats: filled in by `Transport.prepare` and by the steps.
    """

    info: Info = field(default_factory=dict)
    ahead: Callable[[Deadline], None] = _nothing
    transfer: Callable[[Deadline], None] = _nothing
    served: Callable[[int | None], None] = _nothing
    digest: str = ""
    stats: TransferStats = field(default_factory=TransferStats)


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One worker, as it joins a transport.

    Attributes:
        rank: 1, 2, ... among the workers of all engines; the trainer is rank 0.
        params: the model's parameters, in the trainer's order.
        slices: blocks of tensors that this worker needs, by name; an empty list if it needs none; a tensor that is not
            listed is needed whole. Used only by transports with the ability ``slices``.
        whole: tensors that are needed whole although the engine is sharded -> the reason.
        copies: returns the names of tensors of which the worker end keeps host copies, because the loader cannot patch
            them.
    """

    rank: int
    params: tuple[ParamMeta, ...] = ()
    slices: Mapping[str, tuple[Block, ...]] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    copies: Callable[[str], bool] = lambda name: False


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One version for a worker to receive: its number, its parameters in order, and the handoff's info."""

    version: int
    params: tuple[ParamMeta, ...]
    info: Info = field(default_factory=dict)


class Abilities(NamedTuple):
    """What a transport can do; a control layer asks for nothing else.

    ==========  =======  ======  =====  ========  =======
    transport   digests  slices  parts  compares  gathers
    ==========  =======  ======  =====  ========  =======
    collective  no       no      yes    no        yes
    delta       yes      no      yes    yes       no
    disk        no       no      no     no        yes
    ipc         no       no      yes    no        yes
    memory      no       no      yes    no        yes
    native      no       no      yes    no        yes
    sharded     yes      yes     yes    no        no
    ==========  =======  ======  =====  ========  =======

    Attributes:
        digests: workers compare what arrives with digests that travel with the weights, so the sender sends none. A
            worker of an engine then compares what its model holds with what arrived; nothing that a transport says
            stands for that.
        slices: workers receive only the blocks that they need (`Worker.slices`), as
            `torchrl_ext.data.landing.sliced.Sliced`.
        parts: an update of some tensors is possible (``only=``).
        compares: the transport itself finds what changed, so sources yield all tensors; `WeightSource.part` names those
            that may differ.
        gathers: `Transport.prepare` or ``transfer`` iterates over the source, together with the other trainer ranks.
    """

    digests: bool = False
    slices: bool = False
    parts: bool = True
    compares: bool = False
    gathers: bool = True


class Transport(ABC):
    """The trainer's end of a route for weights; one thread drives it, and any thread may `close` it.

    Args:
        timeout_s: deadline of every wait, in seconds. If a constructor does not call ``super().__init__()``, it is 60.
    """

    name: ClassVar[str]
    abilities: ClassVar[Abilities] = Abilities()
    timeout_s: float = 60.0

    def __init__(self, *, timeout_s: float = 60.0) -> None:
        self.timeout_s = timeout_s

    @cached_property
    def ranks(self) -> TrainerRanks:
        """The ranks of this trainer; a sender that drives updates sets its own."""
        return TrainerRanks(numbered("transport"), self.timeout_s)

    @abstractmethod
    def open(self, workers: int, params: tuple[ParamMeta, ...], within: Deadline) -> Handoff:
        """Invite ``workers`` engine workers to `join`, for these parameters; ``transfer`` runs while they do.

        It ends an earlier connection, and may be called at any time between updates.
        """

    @abstractmethod
    def prepare(self, update: Update, within: Deadline) -> Handoff:
        """Do all work for a version that is possible before engines pause; the handoff has the rest.

        After a failure, here or in a step of the handoff, workers hold the version before, or a part of this one.

        Raises:
            StaleBaseError: workers have to join again first, which the sender sees to.
        """

    def rank_steps(self, source: WeightSource) -> Steps:
        """Return the steps that another trainer rank runs when rank 0 orders them through `ranks`, by name."""
        return {}

    def latest_version(self) -> int:
        """Return the newest version that this transport knows to exist; 0 before the first."""
        return 0

    @classmethod
    @abstractmethod
    def join(cls, info: Info, here: Worker, within: Deadline) -> LandingEnd:
        """Return the end of worker ``here``, connected to the trainer whose `open` returned ``info``.

        A failure leaves nothing open.
        """

    @abstractmethod
    def check_connection(self) -> bool:
        """Return whether this end is connected, as from `open` on; after False the sender has all engines join anew."""

    def close(self) -> None:  # noqa: B027 - files connect nobody
        """End the connection, and every wait in it, here and at the workers; `open` begins anew. Twice is allowed."""

    def shutdown(self) -> None:
        """Close, and release what outlives a connection. May be called twice."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class LandingEnd(ABC):
    """A worker's end of one connection: `stage` and `receive` for each version, in this order, and `close`."""

    def stage(self, version: int, held: Callable[[], Mapping[str, str]] | None, within: Deadline) -> Changes | None:
        """Fetch, check and decode a version while the engine serves; a failure changes nothing.

        Args:
            version: the version to reach.
            held: returns the digests of the model's tensors (`torchrl_ext.data.weights.digests`); None if the model may
                hold parts of several versions, so that no change can build on it.
            within: deadline of each wait.

        Returns:
            The changes from the model's weights to the version; None if `receive` yields it in full.

        Raises:
            StaleBaseError: the version builds on one that this worker does not hold.
        """
        return None

    @abstractmethod
    def receive(self, arrival: Arrival, into: Mapping[str, Tensor], within: Deadline) -> Iterator[tuple[str, Tensor]]:
        """Yield the pairs of one version, full tensors in checkpoint coordinates, in the order of its parameters.

        If the transport has the ability ``slices``, it yields `Sliced` tensors of the blocks that the worker needs, and
        skips names without blocks. After a failure the tensors of ``into`` may hold a part of the version.

        Args:
            arrival: the version.
            into: tensors that may be filled directly, and are then yielded themselves. All other yielded memory is
                never written again.
            within: deadline of each wait.
        """

    def landed(self, staged: Changes) -> None:  # noqa: B027 - without changes there is nothing to follow
        """Record that the model now holds the version that ``staged`` leads to."""

    @abstractmethod
    def close(self) -> None:
        """Leave the trainer, and end every wait in other threads. May be called twice."""


def exclusive(transport: Transport, what: str) -> AbstractContextManager[None]:
    """Hold a transport for one send; a second send meanwhile raises ConcurrentUpdateError."""
    refusal = ConcurrentUpdateError(
        f"{what} was called while another send runs on this {transport.name} transport",
        state="the running send continues",
        hint="send from one thread, or give each trainer its own transport",
    )
    return one_at_a_time(vars(transport).setdefault("_busy", threading.Lock()), refusal)


@contextmanager
def passing(transport: Transport, source: WeightSource) -> Iterator[None]:
    """Include the other trainer ranks in the block's pass over ``source``; if the block fails, finish the pass.

    Raises:
        WeightSyncError: another rank failed in it.
    """
    if transport.abilities.gathers:
        transport.ranks.session.order("gather")
    try:
        yield
        transport.ranks.session.settle()
    except BaseException:
        if transport.abilities.gathers:
            source.drain()
        raise


def steps_of(transport: Transport, source: WeightSource) -> Steps:
    """Return the steps of a trainer rank other than 0 in an update of ``source``."""
    return {"gather": lambda order: source.replay(), **transport.rank_steps(source)}
