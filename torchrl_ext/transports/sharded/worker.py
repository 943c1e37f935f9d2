"""The worker's end of the sharded transport: it says what it needs, and receives that alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from torchrl_ext.errors import ManifestError, NotConnectedError, WeightSyncError, why
from torchrl_ext.transports.base import deadline
from torchrl_ext.transports.group import handoffs
from torchrl_ext.transports.group.peers import Carrier
from torchrl_ext.transports.sharded.agreement import Needs, plan_of, rows_of
from torchrl_ext.transports.sharded.ends import End, Settings
from torchrl_ext.transports.sharded.plans.plan import TransferPlan
from torchrl_ext.transports.sharded.plans.shares import Share
from torchrl_ext.transports.sharded.rounds import Incoming
from torchrl_ext.types import Info, ParamMeta
from torchrl_ext.weights.shards.blocks import Block

__all__ = ["WorkerEnd"]


class WorkerEnd(End):
    """One worker.

    Args:
        settings, address, port, secret: as for `End`.
        worker: its number without a control layer.

    Attributes:
        slices, whole: as `Transport.want` was told.
    """

    def __init__(self, settings: Settings, address: str, port: int, secret: str, worker: int) -> None:
        super().__init__(settings, address, port, secret)
        self._rank = 1 + worker
        self.slices: Mapping[str, tuple[Block, ...]] = {}
        self.whole: Mapping[str, str] = {}
        self._params: tuple[ParamMeta, ...] = ()
        self._rows: list[Any] = []

    def enter(self, room: str, rank: int | None, members: int | None, params: tuple[ParamMeta, ...]) -> None:
        """Join the group that trainer rank 0 forms in ``room``, and say what this worker needs.

        Args:
            room: where the members meet.
            rank: of this worker in the group; None for that of its number.
            members: how many there are; None leaves that to the trainer.
            params: of the model; those that the trainer has to agree on where there is no control layer.

        Raises:
            DeadlineError, ConfigError, ManifestError: as `Membership.enter`.
        """
        self.member.stop.clear()
        alone = members is None
        self.member.enter(room, self._rank if rank is None else rank, members, params if alone else ())
        group, self.plan, self._params = self.member.carrier(), None, params
        share = Share.of_blocks(self._needed(meta) for meta in params) if self.slices else None
        group.notes.put(f"needs/{group.generation}/{group.rank}", Needs(share, self.whole).to_json())

    def _needed(self, meta: ParamMeta) -> tuple[Block, ...]:
        return self.slices.get(meta.name, (Block.whole(meta.shape),))

    def receive(self, info: Info, into: Mapping[str, Tensor]) -> Iterator[Any]:
        """Yield None once the handoff has begun, and then the pairs of `Transport.receive`."""
        group = self.member.carrier()
        incoming = self._incoming(group, info, into)
        name, told, before = None, False, group.received.total()
        try:
            yield None
            for name, tensor in incoming.pairs():
                yield name, tensor
            handoffs.acknowledge(group, info, group.received.total() - before)
            told = True
        except WeightSyncError as error:
            raise handoffs.receiving_failed(group, info, error) from error
        except (GeneratorExit, Exception) as error:
            stopped = "it loaded nothing" if name is None else f"it stopped loading after {name!r}"
            self._drain(group, incoming, info, stopped if type(error) is GeneratorExit else why(error))
            told = True
            raise
        finally:
            if not told:
                group.sever()

    def decline(self, info: Info, error: BaseException) -> None:
        """As `StandaloneTransport.decline`."""
        group = self.member.carrier()
        self._drain(group, self._incoming(group, info, {}), info, why(error))

    def _drain(self, group: Carrier, incoming: Incoming, info: Info, words: str) -> None:
        """Receive and drop the rest of a handoff, so that the group stays in step, and tell the trainer why."""
        if not group.alive:
            return
        try:
            incoming.drain()
            handoffs.acknowledge(group, info, words)
        except WeightSyncError:
            group.sever()

    def _incoming(self, group: Carrier, info: Info, into: Mapping[str, Tensor]) -> Incoming:
        if info["group"] != group.generation:
            raise NotConnectedError(
                f"the trainer sends through group {info['group']}, this worker is in group {group.generation}",
                hint="connect again",
            )
        if info["params"] != self._rows:
            self._rows, self._params = info["params"], tuple(ParamMeta.from_json(row) for row in info["params"])
        params = self._params
        if self.plan is None or self.number != info["plan"] or self.plan.params != params:
            self.plan, self.number = self._made(group, info, params), info["plan"]
        trainers = [0, *range(1 + self.plan.workers, self.plan.workers + self.plan.ranks)]
        needed = [self._needed(meta) for meta in params]
        return Incoming(self.plan, group.rank - 1, needed, into, group, trainers, self._pool)

    def _made(self, group: Carrier, info: Info, params: tuple[ParamMeta, ...]) -> TransferPlan:
        """Make the plan, and tell the trainer that it is the same, or what differs.

        Raises:
            ManifestError: it is another one.
        """
        key, until = f"plan/{group.generation}/{info['plan']}/{group.rank}", deadline(self.settings.timeout_s)
        bucket_bytes = self.settings.bucket_bytes
        try:
            own = Share.of_blocks(self._needed(meta) for meta in params) if self.slices else None
            plan = plan_of(group, info["plan"], params, until, bucket_bytes=bucket_bytes, own=own)
        except WeightSyncError as error:
            group.notes.put(key, {"error": why(error)})
            raise
        differs = plan.digest != info["digest"]
        group.notes.put(key, rows_of(plan) if differs else {})
        if differs:
            raise ManifestError(
                "this worker makes another transfer plan than the trainer",
                state="nothing was moved; the engine stays paused with its old weights",
                hint="use one release of torchrl_ext on both ends",
            )
        return plan
