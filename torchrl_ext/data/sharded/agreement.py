"""What trainer rank 0, other trainer ranks and workers leave each other in notes: needs, and parts of plans."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import ManifestError, TransportError
from torchrl_ext.base.types import Count, ParamMeta
from torchrl_ext.data.group.group import Group, GroupLoad
from torchrl_ext.data.sharded.plan import MemberPlan, TransferPlan
from torchrl_ext.data.sharded.shares import Blocks
from torchrl_ext.data.weights.blocks import Block

__all__ = ["Needs", "ShardedLoad", "hand_out", "read_plan"]


class ShardedLoad(GroupLoad, frozen=True, kw_only=True):
    """One handoff.

    Attributes:
        plan: number of the transfer plan.
    """

    plan: Count


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


def hand_out(group: Group, number: int, plan: TransferPlan) -> None:
    """Leave the rows of every member in the notes, in place of earlier plans and the needs (trainer rank 0)."""
    key = f"plan/{number}"
    for kind in ("plan", "needs"):
        group.store.drop(f"{kind}/")
    group.store.set(key, plan.schedule)
    for member in range(1, group.world_size):
        group.store.set(f"{key}/{member}", plan.rows(member))


def read_plan(group: Group, number: int, params: Sequence[ParamMeta], timeout_s: float) -> MemberPlan:
    """Return this member's part of the plan that rank 0 left under a number.

    Raises:
        TransportError: it is not there, or malformed.
    """
    key, within = f"plan/{number}", Deadline(timeout_s, stop=group.stop)
    notes = [group.store.find(name, within) for name in (key, f"{key}/{group.rank}")]
    if None in notes:
        raise TransportError(
            f"{group.call([0])} left no rows of plan {number} for {group.call([group.rank])}", state="nothing was moved"
        )
    return MemberPlan(params, *notes)
