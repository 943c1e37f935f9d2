"""The worker's end of the sharded transport: it names its slices, and receives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

from torch import Tensor

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.group.buckets import BufferPool
from torchrl_ext.data.group.group import Group, GroupWorker, Member
from torchrl_ext.data.sharded.agreement import Needs, ShardedLoad, read_plan
from torchrl_ext.data.sharded.plan import MemberPlan
from torchrl_ext.data.sharded.rounds import RoundReceiver
from torchrl_ext.data.sharded.shares import Blocks, packed
from torchrl_ext.data.transports.base import Arrival
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
        member: Member,
        slices: Mapping[str, tuple[Block, ...]] | None = None,
        whole: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(member)
        self._slices, self._whole = slices or {}, whole or {}
        self._pool = BufferPool(member.device)
        self._plan: MemberPlan | None = None
        self._number = 0  # of the plan

    def enter(self, rank: int, members: int | None, params: tuple[ParamMeta, ...], within: Deadline) -> None:
        """Join the group that trainer rank 0 forms, and leave a note of the needs of this worker.

        Args:
            rank: of this worker in the group.
            members: how many there are; None leaves that to the trainer.
            params: of the model; without a control layer the trainer has to agree on them.
            within: deadline of each wait.

        Raises:
            DeadlineError, ConfigError, ManifestError: as `Member.enter`.
        """
        alone = members is None  # without a control layer
        group = self.member.enter(rank, members, params if alone else (), within, again=alone)
        self._plan = None
        share = Blocks.of_blocks(map(self._needed, params)) if self._slices else None
        group.store.set(f"needs/{group.rank}", packed(Needs(share, dict(self._whole))))

    def _needed(self, meta: ParamMeta) -> tuple[Block, ...]:
        return self._slices.get(meta.name, (Block.whole(meta.shape),))

    def incoming(self, group: Group, load: ShardedLoad, arrival: Arrival, into: Mapping[str, Tensor]) -> RoundReceiver:
        if self._plan is None or self._number != load.plan:
            self._plan = read_plan(group, load.plan, arrival.params, self.member.timeout_s)
            self._number = load.plan
        return RoundReceiver(self._plan, [self._needed(meta) for meta in arrival.params], into, group, self._pool)
