"""The worker's end of the sharded transport: it names its slices, and receives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

from torch import Tensor

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import TransportError
from torchrl_ext.base.types import ParamMeta, Params, Wire
from torchrl_ext.data.group.buckets import BufferPool
from torchrl_ext.data.group.group import Group, GroupLoad, GroupWorker, Member
from torchrl_ext.data.sharded.plan import Agreement, Blocks, Shares
from torchrl_ext.data.sharded.rounds import RoundReceiver
from torchrl_ext.data.transports.base import Arrival
from torchrl_ext.data.weights.blocks import Block

__all__ = ["Needs", "ShardedLoad", "ShardedWorker", "read_agreement"]


class ShardedLoad(GroupLoad, frozen=True, kw_only=True):
    """One handoff.

    Attributes:
        plan: digest of the transfer plan.
    """

    plan: str


class Needs(Wire, frozen=True, kw_only=True):
    """The needs of one worker, which it leaves when it joins.

    Attributes:
        share: `Blocks.to_text` of the share of the parameters for which it joined; None for all of every tensor.
        whole: the tensors that it needs whole although the engine is sharded -> the reason.
    """

    share: str | None
    whole: dict[str, str]


def read_agreement(group: Group, params: Params) -> Agreement:
    """Return what rank 0 has left for all members of a group before any of them asks.

    Args:
        params: of the connection's first update.

    Raises:
        TransportError, ConfigError, ManifestError: it is not there, or malformed.
    """
    note = group.store.find("shares", Deadline(group.timeout_s, stop=group.stop))
    if note is None:
        raise TransportError(f"{group.call([0])} left no shares for a transfer plan", state="nothing was moved")
    return Agreement(Shares.from_json(note, f"the shares that {group.call([0])} left"), params, group.rank)


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
        self._agreement: Agreement | None = None  # of the group

    def enter(self, rank: int, members: int | None, params: Params, within: Deadline) -> None:
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
        self._agreement = None
        share = Blocks.of_blocks(map(self._needed, params)).to_text() if self._slices else None
        group.store.set(f"needs/{group.rank}", Needs(share=share, whole=dict(self._whole)).to_json())

    def _needed(self, meta: ParamMeta) -> tuple[Block, ...]:
        return self._slices.get(meta.name, (Block.whole(meta.shape),))

    def incoming(self, group: Group, load: ShardedLoad, arrival: Arrival, into: Mapping[str, Tensor]) -> RoundReceiver:
        self._agreement = self._agreement or read_agreement(group, arrival.params)
        plan = self._agreement.plan(arrival.params, load.plan)
        return RoundReceiver(plan, [self._needed(meta) for meta in arrival.params], into, group, self._pool)
