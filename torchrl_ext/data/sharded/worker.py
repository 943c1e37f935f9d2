"""The worker's end of the sharded transport: it names its slices, and receives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

from torch import Tensor

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.group.handoffs import GroupWorker
from torchrl_ext.data.group.meeting import Membership
from torchrl_ext.data.group.process_group import Group
from torchrl_ext.data.sharded.agreement import Needs, ShardedLoad, read_plan
from torchrl_ext.data.sharded.plan import MemberPlan
from torchrl_ext.data.sharded.rounds import RoundReceiver
from torchrl_ext.data.sharded.shares import Blocks, packed
from torchrl_ext.data.transports.base import Arrival
from torchrl_ext.data.transports.buckets import BufferPool
from torchrl_ext.data.weights.blocks import Block

__all__ = ["ShardedWorker"]


@final
class ShardedWorker(GroupWorker):
    """One worker.

    Args:
        member: meets the others.
        slices: blocks that it needs, by name; a tensor that is left out is needed whole.
        whole: tensors that are needed whole although the engine is sharded -> the reason.
    """

    load: ClassVar[type[ShardedLoad]] = ShardedLoad

    def __init__(
        self,
        member: Membership,
        slices: Mapping[str, tuple[Block, ...]] | None = None,
        whole: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(member)
        self._slices, self._whole = slices or {}, whole or {}
        self._pool = BufferPool(member.device)
        self._plan: MemberPlan | None = None
        self._number = 0  # of the plan

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
        group, self._plan = self.member.carrier(), None
        share = Blocks.of_blocks(map(self._needed, params)) if self._slices else None
        group.notes.put(f"{group.generation}/needs/{group.rank}", packed(Needs(share, dict(self._whole))))

    def _needed(self, meta: ParamMeta) -> tuple[Block, ...]:
        return self._slices.get(meta.name, (Block.whole(meta.shape),))

    def incoming(self, group: Group, load: ShardedLoad, arrival: Arrival, into: Mapping[str, Tensor]) -> RoundReceiver:
        if self._plan is None or self._number != load.plan:
            self._plan = read_plan(group, load.plan, arrival.params, self.member.timeout_s)
            self._number = load.plan
        return RoundReceiver(self._plan, [self._needed(meta) for meta in arrival.params], into, group, self._pool)
