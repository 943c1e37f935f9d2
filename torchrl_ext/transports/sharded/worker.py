"""The worker's end of the sharded transport: it names its slices, and receives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

from torch import Tensor

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import NotConnectedError, WeightSyncError, why
from torchrl_ext.transports.base import Arrival, WorkerEnd
from torchrl_ext.transports.group import handoffs
from torchrl_ext.transports.group.handoffs import GroupMailbox
from torchrl_ext.transports.group.meeting import Membership
from torchrl_ext.transports.group.peers import PeerGroup
from torchrl_ext.transports.sharded.agreement import Needs
from torchrl_ext.transports.sharded.ends import End, Load
from torchrl_ext.transports.sharded.plans.shares import Share
from torchrl_ext.transports.sharded.rounds import RoundReceiver
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.shards.blocks import Block

__all__ = ["ShardedWorker"]


@final
class ShardedWorker(End, GroupMailbox, WorkerEnd):
    """One worker.

    Args:
        member: meets the others.
        slices: blocks that it needs, by name; a tensor that is left out is needed whole.
        whole: tensors that are needed whole although the engine is sharded -> the reason.
    """

    def __init__(
        self,
        member: Membership,
        slices: Mapping[str, tuple[Block, ...]] | None = None,
        whole: Mapping[str, str] | None = None,
    ) -> None:
        End.__init__(self, member)
        self._slices, self._whole = slices or {}, whole or {}

    def enter(self, room: str, rank: int, members: int | None, params: tuple[ParamMeta, ...], within: Deadline) -> None:
        """Join the group that trainer rank 0 forms in ``room``, and leave a note of the needs of this worker.

        Args:
            room: where the members meet.
            rank: of this worker in the group.
            members: how many there are; None leaves that to the trainer.
            params: of the model; without a control layer the trainer has to agree on them.
            within: deadline of each wait.

        Raises:
            DeadlineError, ConfigError, ManifestError: as `Membership.enter`.
        """
        self.member.under(within)
        self.member.enter(room, rank, members, params if members is None else ())
        group, self.own = self.member.carrier(), None
        share = Share.of_blocks(self._needed(meta) for meta in params) if self._slices else None
        group.notes.put(f"needs/{group.generation}/{group.rank}", Needs(share, self._whole).to_json())

    def _needed(self, meta: ParamMeta) -> tuple[Block, ...]:
        return self._slices.get(meta.name, (Block.whole(meta.shape),))

    def receive(self, arrival: Arrival, into: Mapping[str, Tensor], within: Deadline) -> Iterator[tuple[str, Tensor]]:
        self.member.under(within)
        pairs = self._receiving(arrival, into)
        next(pairs)  # from here on the handoff is taken or refused, also by a loader that asks for nothing
        return pairs

    def _receiving(self, arrival: Arrival, into: Mapping[str, Tensor]) -> Iterator[Any]:
        """Yield None once the handoff has begun, and then its pairs."""
        load = Load.from_json(arrival.info, "a handoff of a sharded transport")
        group = self._group_of(load)
        name, acknowledged, before = None, False, group.received.total()
        receiver: RoundReceiver | None = None
        try:
            receiver = self._receiver(group, load, arrival, into)
            yield None
            for name, tensor in receiver.pairs():
                yield name, tensor
            handoffs.acknowledge(group, load.handoff, group.received.total() - before)
            acknowledged = True
        except WeightSyncError as error:
            raise handoffs.receiving_failed(group, load.handoff, arrival.version, error) from error
        except (GeneratorExit, Exception) as error:
            if receiver is not None:
                stopped = "it loaded nothing" if name is None else f"it stopped loading after {name!r}"
                self._drain(group, receiver, load, stopped if type(error) is GeneratorExit else why(error))
                acknowledged = True
            raise
        finally:
            if not acknowledged:
                group.sever()

    def refuse(self, arrival: Arrival, error: BaseException) -> None:
        """Receive and drop a version that cannot land here, and tell the trainer why."""
        load = Load.from_json(arrival.info, "a handoff of a sharded transport")
        group = self._group_of(load)
        self._drain(group, self._receiver(group, load, arrival, {}), load, why(error))

    def _drain(self, group: PeerGroup, receiver: RoundReceiver, load: Load, words: str) -> None:
        """Receive and drop the rest of a handoff, so that the group stays in step, and tell the trainer why."""
        if not group.alive:
            return
        try:
            receiver.drain()
            handoffs.acknowledge(group, load.handoff, words)
        except WeightSyncError:
            group.sever()

    def _group_of(self, load: Load) -> PeerGroup:
        group = self.member.carrier()
        if load.group != group.generation:
            raise NotConnectedError(
                f"the trainer sends through group {load.group}, this worker is in group {group.generation}",
                hint="connect again",
            )
        return group

    def _receiver(self, group: PeerGroup, load: Load, arrival: Arrival, into: Mapping[str, Tensor]) -> RoundReceiver:
        plan = self._read_plan(group, load.plan, arrival.params)
        return RoundReceiver(plan, [self._needed(meta) for meta in arrival.params], into, group, self._pool)

    def check_connection(self) -> bool:
        return self.member.connected

    def close(self) -> None:
        self.member.close()
