"""What both ends of the sharded transport share: how they meet, and the memory of their messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchrl_ext.messages import Count, Wire
from torchrl_ext.transports.copies import BufferPool
from torchrl_ext.transports.group.meeting import Membership
from torchrl_ext.transports.group.peers import PeerGroup
from torchrl_ext.transports.sharded.agreement import read_plan
from torchrl_ext.transports.sharded.plans.plan import MemberPlan
from torchrl_ext.types import ParamMeta

__all__ = ["End", "Load", "Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one end; those of `ShardedTransport`, checked.

    Attributes:
        carrier: ``"group"`` or ``"nixl"``.
        device: where tensors travel from and to.
        backend: of the group that the carrier is.
        bucket_bytes: bound on what a rank sends, and a worker receives, in one round.
        timeout_s: deadline of every wait, in seconds.
    """

    carrier: str
    device: torch.device
    backend: str
    bucket_bytes: int
    timeout_s: float


class Load(Wire, frozen=True, kw_only=True):
    """One handoff.

    Attributes:
        group: names the group through which it comes.
        handoff: its number in the group.
        plan: number of the transfer plan.
    """

    group: str
    handoff: Count
    plan: Count


class End:
    """A member of the group.

    Args:
        settings: of the transport.
        address, port: where trainer rank 0 is reached.
        secret: as in `VLLMCollectiveTransport`.

    Attributes:
        member: meets the others.
        own: this member's part of the last plan; None where none is valid.
        number: of that plan.
    """

    def __init__(self, settings: Settings, address: str, port: int, secret: str) -> None:
        self.settings = settings
        self.member = self._membership(address, port, secret)
        self.own: MemberPlan | None = None
        self.number = 0
        self._pool = BufferPool(settings.device)

    def _membership(self, address: str, port: int, secret: str) -> Membership:
        own = self.settings
        return Membership(address, port, secret, device=own.device, backend=own.backend, timeout_s=own.timeout_s)

    def _read_plan(self, group: PeerGroup, number: int, params: Sequence[ParamMeta]) -> MemberPlan:
        """Return this member's part of a plan, from the notes where it is not that of the last update."""
        if self.own is None or self.number != number or self.own.params != tuple(params):
            self.own = read_plan(group, number, params, self.settings.timeout_s)
            self.number = number
        return self.own
