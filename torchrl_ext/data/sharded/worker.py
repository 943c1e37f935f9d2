"""The worker's end of the sharded transport: it names its slices, and receives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, final

import msgspec
from torch import Tensor

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import ManifestError, TransportError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.group.group import Group, GroupLoad, GroupWorker, Member
from torchrl_ext.data.sharded.plan import Blocks, MemberPlan, Shares, packed
from torchrl_ext.data.sharded.rounds import RoundReceiver
from torchrl_ext.data.transports.base import Arrival
from torchrl_ext.data.transports.buckets import BufferPool
from torchrl_ext.data.weights.blocks import Block

__all__ = ["Needs", "ShardedLoad", "ShardedWorker", "read_plan"]


class ShardedLoad(GroupLoad, frozen=True, kw_only=True):
    """One handoff.

    Attributes:
        plan: digest of the transfer plan.
    """

    plan: str


class Needs(msgspec.Struct, frozen=True):
    """The needs of one worker.

    Attributes:
        share: of the parameters for which it joined; None for all of every tensor.
        whole: the tensors that it needs whole although the engine is sharded -> the reason.
    """

    share: Blocks | None
    whole: dict[str, str]

    def of(self, params: Sequence[ParamMeta], joined: Sequence[ParamMeta]) -> Blocks:
        """Return the share of the parameters of an update.

        Args:
            params: of the update.
            joined: for which the worker joined.

        Raises:
            ManifestError: one is not among those; or the share is of another number of parameters.
        """
        if self.share is None:
            return Blocks.of_blocks((Block.whole(meta.shape),) for meta in params)
        if tuple(params) == tuple(joined):
            return self.share
        blocks = dict(zip(joined, map(self.share.patterns.__getitem__, self.share.indices), strict=False))
        absent = [meta for meta in params if meta not in blocks]
        if absent:
            raise ManifestError(
                f"a worker joined without {absent[0]}, of which it needs slices",
                expected="an update of parameters for which engines were connected",
                state="nothing was sent",
                hint="connect the engines again for the new model",
            )
        return Blocks.of_blocks(map(blocks.__getitem__, params))


def read_plan(group: Group, digest: str, params: Sequence[ParamMeta], timeout_s: float) -> MemberPlan:
    """Make the plan of an update from the shares that rank 0 left, and return this member's part of it.

    Raises:
        TransportError, ConfigError: the shares are not there, or malformed; or rank 0 made another plan of them.
    """
    note = group.store.find("shares", Deadline(timeout_s, stop=group.stop))
    if note is None:
        raise TransportError(f"{group.call([0])} left no shares of a transfer plan", state="nothing was moved")
    plan = Shares.from_json(note, f"the shares that {group.call([0])} left").plan(params)
    if plan.digest != digest:  # gloo ends the whole process where a message has another size at its two ends
        raise TransportError(
            f"{group.call([0])} made another transfer plan than {group.call([group.rank])} of the same shares",
            expected=f"plan {digest}, and found {plan.digest}",
            state="nothing was moved",
            hint="use one release of torchrl_ext on every rank and engine",
        )
    return plan.member(group.rank)


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
        self._digest = ""  # of the plan

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
        if self._plan is None or self._digest != load.plan:
            self._plan = read_plan(group, load.plan, arrival.params, self.member.timeout_s)
            self._digest = load.plan
        return RoundReceiver(self._plan, [self._needed(meta) for meta in arrival.params], into, group, self._pool)
