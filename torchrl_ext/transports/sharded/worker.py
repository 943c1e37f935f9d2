"""The worker's end of the sharded transport: it names its slices, and receives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from torchrl_ext.errors import NotConnectedError, WeightSyncError, why
from torchrl_ext.transports.collective import handoffs
from torchrl_ext.transports.collective.carrier import Carrier
from torchrl_ext.transports.sharded.agreement import Needs
from torchrl_ext.transports.sharded.ends import End, Settings
from torchrl_ext.transports.sharded.plans.shares import Share
from torchrl_ext.transports.sharded.rounds import RoundReceiver
from torchrl_ext.types import Info, ParamMeta
from torchrl_ext.weights.shards.blocks import Block

__all__ = ["ShardedWorker"]


class ShardedWorker(End):
    """One worker.

    Args:
        settings, address, port, secret: as for `End`.
        worker: its number without a control layer.

    Attributes:
        slices, whole: the arguments of `Transport.want`.
    """

    def __init__(self, settings: Settings, address: str, port: int, secret: str, worker: int) -> None:
        super().__init__(settings, address, port, secret)
        self._rank = 1 + worker
        self.slices: Mapping[str, tuple[Block, ...]] = {}
        self.whole: Mapping[str, str] = {}
        self._params: tuple[ParamMeta, ...] = ()
        self._rows: list[Any] = []

    def enter(self, room: str, rank: int | None, members: int | None, params: tuple[ParamMeta, ...]) -> None:
        """Join the group that trainer rank 0 forms in ``room``, and leave a note of the needs of this worker.

        Args:
            room: where the members meet.
            rank: of this worker in the group; None for the rank of its number.
            members: how many there are; None leaves that to the trainer.
            params: of the model; without a control layer the trainer has to agree on them.

        Raises:
            DeadlineError, ConfigError, ManifestError: as `Membership.enter`.
        """
        self.member.stop.clear()
        alone = members is None
        self.member.enter(room, self._rank if rank is None else rank, members, params if alone else ())
        group, self.own, self._params = self.member.carrier(), None, params
        share = Share.of_blocks(self._needed(meta) for meta in params) if self.slices else None
        group.notes.put(f"needs/{group.generation}/{group.rank}", Needs(share, self.whole).to_json())

    def _needed(self, meta: ParamMeta) -> tuple[Block, ...]:
        return self.slices.get(meta.name, (Block.whole(meta.shape),))

    def receive(self, info: Info, into: Mapping[str, Tensor]) -> Iterator[Any]:
        """Yield None once the handoff has begun, and then the pairs of `Transport.receive`."""
        group = self._group_of(info)
        name, acknowledged, before = None, False, group.received.total()
        receiver: RoundReceiver | None = None
        try:
            receiver = self._receiver(group, info, into)
            yield None
            for name, tensor in receiver.pairs():
                yield name, tensor
            handoffs.acknowledge(group, info, group.received.total() - before)
            acknowledged = True
        except WeightSyncError as error:
            raise handoffs.receiving_failed(group, info, error) from error
        except (GeneratorExit, Exception) as error:
            if receiver is not None:
                stopped = "it loaded nothing" if name is None else f"it stopped loading after {name!r}"
                self._drain(group, receiver, info, stopped if type(error) is GeneratorExit else why(error))
                acknowledged = True
            raise
        finally:
            if not acknowledged:
                group.sever()

    def decline(self, info: Info, error: BaseException) -> None:
        """As `StandaloneTransport.decline`."""
        group = self._group_of(info)
        self._drain(group, self._receiver(group, info, {}), info, why(error))

    def _drain(self, group: Carrier, receiver: RoundReceiver, info: Info, words: str) -> None:
        """Receive and drop the rest of a handoff, so that the group stays in step, and tell the trainer why."""
        if not group.alive:
            return
        try:
            receiver.drain()
            handoffs.acknowledge(group, info, words)
        except WeightSyncError:
            group.sever()

    def _group_of(self, info: Info) -> Carrier:
        group = self.member.carrier()
        if info["group"] != group.generation:
            raise NotConnectedError(
                f"the trainer sends through group {info['group']}, this worker is in group {group.generation}",
                hint="connect again",
            )
        return group

    def _receiver(self, group: Carrier, info: Info, into: Mapping[str, Tensor]) -> RoundReceiver:
        if info["params"] != self._rows:
            self._rows, self._params = info["params"], tuple(ParamMeta.from_json(row) for row in info["params"])
        plan = self._read_plan(group, info["plan"], self._params)
        return RoundReceiver(plan, [self._needed(meta) for meta in self._params], into, group, self._pool)
