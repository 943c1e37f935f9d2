"""The trainer's end of the sharded transport: rank 0 plans and drives, the other ranks follow its orders."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec
import xxhash

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import DeadlineError, ManifestError, TransportError, WeightSyncError, why
from torchrl_ext.base.types import Info, ParamMeta, dtype_name
from torchrl_ext.data.group.group import Group, GroupOffer, Member
from torchrl_ext.data.group.ranks import Steps, TrainerRanks
from torchrl_ext.data.sharded.plan import (
    Blocks,
    MemberPlan,
    Shares,
    TransferPlan,
    group_rank,
    make_plan,
    packed,
    unpacked,
)
from torchrl_ext.data.sharded.rounds import RoundSender
from torchrl_ext.data.sharded.worker import Needs, ShardedLoad, read_plan
from torchrl_ext.data.transports.base import Handoff, TransferStats, Update
from torchrl_ext.data.transports.buckets import BufferPool
from torchrl_ext.data.weights.blocks import Shard, checked_shards
from torchrl_ext.data.weights.source import WeightSource

__all__ = ["ShardedTrainer"]

_LAST_WORDS_S = 3.0
"""How long other trainer ranks have, after a failure, to answer why."""


class _KeptTensor(NamedTuple):
    """What this rank holds of a source."""

    params: tuple[ParamMeta, ...]
    shards: list[Shard]
    share: Blocks

    @classmethod
    def of(cls, source: WeightSource) -> _KeptTensor:
        params, shards = source.params(), list(source.shards())
        held = checked_shards(shards, params)
        return cls(params, shards, Blocks.of_blocks([shard.block for shard in own] for _, own in held))


class ShardedTrainer:
    """One rank of a sharded trainer.

    Args:
        member: meets the others.
        ranks: returns all ranks of the trainer.
        bucket_bytes: the most that a rank sends, or a worker gets from the trainer, in one round.
    """

    def __init__(self, member: Member, ranks: Callable[[], TrainerRanks], bucket_bytes: int) -> None:
        self.member, self._ranks, self._bucket_bytes = member, ranks, bucket_bytes
        self._pool = BufferPool(member.device)
        self._own: MemberPlan | None = None  # this rank's part of the last plan
        self._held: _KeptTensor | None = None  # on ranks other than 0
        # on rank 0:
        self._params: tuple[ParamMeta, ...] = ()  # for which workers joined
        self._needs: list[Needs] = []
        self._shares: list[Blocks] = []  # of every rank, as the last plan has them
        self._plan: TransferPlan | None = None
        self._handoffs = 0

    # rank 0

    def host(self, offer: GroupOffer, workers: int, params: tuple[ParamMeta, ...], within: Deadline) -> None:
        """Form the group with the other ranks and the workers that were offered it, and read what each worker needs.

        Raises:
            DeadlineError, ConfigError, TransportError: as `Member.host`.
            TransportError: the needs of a worker are missing or malformed.
        """
        session = self._ranks().session
        session.order("enter", workers=workers, offer=offer.to_json())
        group = self.member.host(offer.members, params, within)
        session.answers()
        group.workers = range(1, 1 + workers)  # other trainer ranks come behind
        needs = group.store.collect("needs/", group.workers, within.again())
        silent = [rank for rank in group.workers if rank not in needs]
        if silent:
            raise TransportError(
                f"{group.call(silent)} did not report the slices that it needs", state="nothing was sent"
            )
        self._needs = [unpacked(needs[rank], Needs, f"{group.call([rank])} sent needs") for rank in group.workers]
        self._params, self._plan = params, None

    def prepare(self, update: Update, within: Deadline) -> Handoff:
        """Plan what all ranks hold now, unless the last plan is still good.

        Raises:
            ManifestError: ranks disagree on parameters, or nobody holds an element; named.
        """
        group, held = self.member.group(within), _KeptTensor.of(update.source)
        plan, sender = self._planned(group, held), self._sender(group, held)
        self._handoffs += 1
        load = ShardedLoad(handoff=self._handoffs, plan=plan.digest)
        stats = TransferStats(bytes=0)  # until something is sent

        def transfer(within: Deadline) -> None:
            group.stop = within.stop
            began = time.perf_counter()
            self._send(group, sender, load.handoff, update.version, stats)
            stats.spans.since("transfer", began)
            stats.bytes = plan.nbytes
            stats.whole = {name: reason for needs in self._needs for name, reason in needs.whole.items()}
            stats.whole |= {shard.meta.name: shard.why for shard in held.shards if shard.gathers}

        return Handoff(info=load.to_json(), transfer=transfer, stats=stats)

    def _planned(self, group: Group, held: _KeptTensor) -> TransferPlan:
        """Return the plan for what all ranks hold now; where something has changed, every member makes a new one."""
        known, session = list(map(_digest, self._shares)), self._ranks().session
        answers = session.ask("describe", params=_digest(held.params), known=known)
        shares = [held.share]
        for rank, answer in enumerate(answers, 1):
            if "params" in answer:
                raise _first_difference(rank, held.params, answer["params"])
            sent = answer.get("share")
            shares.append(unpacked(sent, Blocks, f"trainer rank {rank} sent a share") if sent else self._shares[rank])
        plan = self._plan
        if plan is None or plan.params != held.params or shares != self._shares:
            self._plan = None
            needed = [needs.of(held.params, self._params) for needs in self._needs]
            plan = make_plan(held.params, shares, needed, bucket_bytes=self._bucket_bytes)
            group.store.drop("needs/")
            group.store.set("shares", Shares.of(shares, needed, self._bucket_bytes).to_json())
            session.ask("plan", digest=plan.digest)
            self._own, self._shares, self._plan = plan.member(0), shares, plan
        return plan

    def _send(self, group: Group, sender: RoundSender, handoff: int, version: int, stats: TransferStats) -> None:
        """Send beside the other ranks; note the bytes that each worker received, and those that each rank sent."""
        session = self._ranks().session
        try:
            session.order("send")
            sent = [sender.send()]
            received = group.await_workers(handoff)
            sent += [answer["sent"] for answer in session.answers()]
        except BaseException as error:
            failure = error
            if isinstance(error, WeightSyncError):
                failure = group.sending_failed(handoff, version, error)
            group.sever(why(error))
            with suppress(TransportError, DeadlineError):  # of a broken group, as all ranks see it
                session.answers(Deadline(_LAST_WORDS_S))
            raise failure from error
        stats.worker_bytes, stats.rank_bytes = tuple(received.values()), tuple(sent)

    # the other ranks

    def steps(self, source: WeightSource | None) -> Steps:
        """Return what this rank does when rank 0 orders it; without a source, it can only enter a group."""
        if source is None:
            return {"enter": self._enter}
        describe = partial(self._describe, source)
        return {"enter": self._enter, "describe": describe, "plan": self._take_plan, "send": self._send_own}

    def _enter(self, order: Info) -> None:
        before, offer = self.member, GroupOffer.from_json(order["offer"], "an order of trainer rank 0")
        before.close()
        how: dict[str, Any] = {"device": before.device, "backend": before.backend, "timeout_s": before.timeout_s}
        self.member = Member(offer.master_address, offer.master_port, offer.secret, **how)
        workers, rank = order["workers"], self._ranks().rank
        group = self.member.enter(group_rank(rank, workers), offer.members, (), Deadline(before.timeout_s))
        group.workers = range(1, 1 + workers)

    def _describe(self, source: WeightSource, order: Info) -> Info:
        """Answer with the share of this rank, unless rank 0 has it; or with its parameters, if rank 0 has others."""
        held = self._held = _KeptTensor.of(source)
        if _digest(held.params) != order["params"]:
            return {"params": [meta.to_json() for meta in held.params]}
        rank, known = self._ranks().rank, order["known"]
        return {} if rank < len(known) and known[rank] == _digest(held.share) else {"share": packed(held.share)}

    def _take_plan(self, order: Info) -> None:
        assert self._held is not None  # rank 0 asks for it first
        self._own = read_plan(self._group(), order["digest"], self._held.params, self.member.timeout_s)

    def _send_own(self, order: Info) -> Info:
        return {"sent": self._sender(self._group(), self._held).send()}

    def _group(self) -> Group:
        return self.member.group(Deadline(self.member.timeout_s))

    def _sender(self, group: Group, held: _KeptTensor | None) -> RoundSender:
        assert held is not None and self._own is not None  # rank 0 orders "describe" and "plan" first
        return RoundSender(self._own, held.shards, group, self._pool)


def _digest(of: Any) -> str:
    """Return 32 hex digits over parameters or a share, by which one rank sees that it has the same as another."""
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(of, enc_hook=dtype_name))


def _first_difference(rank: int, own: Sequence[ParamMeta], rows: Sequence[Any]) -> ManifestError:
    """Return the error that names the first parameter on which a trainer rank and rank 0 disagree."""
    pairs = zip_longest(own, map(ParamMeta.from_json, rows))
    place, (mine, other) = next((place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1])
    return ManifestError(
        f"trainer rank {rank} has {other or 'nothing'} as parameter {place}, and rank 0 has {mine or 'nothing'}",
        expected="the same parameters, in the same order, on every trainer rank",
        state="nothing was sent; engines still serve their previous weights",
        hint="give every rank the same model, and WeightSender the same mapper and dtype",
    )
