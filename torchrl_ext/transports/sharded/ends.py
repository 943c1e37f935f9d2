"""What both ends of the sharded transport share: their place in the group, its plan, and memory for messages."""

from __future__ import annotations

from collections.abc import Sequence

from torchrl_ext.transports.copies import BufferPool
from torchrl_ext.transports.group.handoffs import GroupLoad
from torchrl_ext.transports.group.meeting import Membership
from torchrl_ext.transports.group.peers import PeerGroup
from torchrl_ext.transports.sharded.agreement import read_plan
from torchrl_ext.transports.sharded.plans.plan import MemberPlan
from torchrl_ext.types import Count, ParamMeta

__all__ = ["End", "Load"]


class Load(GroupLoad, frozen=True, kw_only=True):
    """One handoff.

    Attributes:
        plan: number of the transfer plan.
    """

    plan: Count


class End:
    """A member of the group.

    Args:
        member: meets the others.

    Attributes:
        own: this member's part of the last plan; None where none is valid.
        number: of that plan.
    """

    def __init__(self, member: Membership) -> None:
        self.member = member
        self.own: MemberPlan | None = None
        self.number = 0
        self._pool = BufferPool(member.device)

    def _read_plan(self, group: PeerGroup, number: int, params: Sequence[ParamMeta]) -> MemberPlan:
        """Return this member's part of a plan, from the notes where it is not that of the last update."""
        if self.own is None or self.number != number or self.own.params != tuple(params):
            self.own = read_plan(group, number, params, self.member.timeout_s)
            self.number = number
        return self.own
