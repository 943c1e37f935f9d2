"""The trainer's end of the sharded transport: rank 0 plans and drives, the other ranks follow its orders."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import DeadlineError, NotConnectedError, TransportError, WeightSyncError, why
from torchrl_ext.transports.base import Handoff, TransferStats, Update
from torchrl_ext.transports.group import handoffs
from torchrl_ext.transports.group.meeting import Membership
from torchrl_ext.transports.group.peers import PeerGroup
from torchrl_ext.transports.ranks import Steps, TrainerRanks
from torchrl_ext.transports.sharded.agreement import (
    Description,
    Needs,
    described,
    digest_of,
    first_difference,
    hand_out,
)
from torchrl_ext.transports.sharded.ends import End, Load
from torchrl_ext.transports.sharded.plans.plan import MemberPlan, TransferPlan, group_rank, make_plan
from torchrl_ext.transports.sharded.plans.shares import Share
from torchrl_ext.transports.sharded.rounds import RoundSender
from torchrl_ext.types import Info, ParamMeta
from torchrl_ext.weights.source import WeightSource

__all__ = ["ShardedTrainer"]

_LAST_WORDS_S = 3.0
"""How long other trainer ranks have, after a failure, to answer why."""


class ShardedTrainer(End):
    """One rank of a sharded trainer.

    Args:
        member: meets the others.
        ranks: returns all ranks of the trainer.
        bucket_bytes: the most that a rank sends, or a worker gets from the trainer, in one round.
    """

    def __init__(self, member: Membership, ranks: Callable[[], TrainerRanks], bucket_bytes: int) -> None:
        super().__init__(member)
        self._ranks, self._bucket_bytes = ranks, bucket_bytes
        self._needs: list[Needs] = []
        self._held: list[Share] = []  # on rank 0 of every rank, on others its own, as the last plan has it
        self._plan: TransferPlan | None = None  # on rank 0
        self._description: Description | None = None
        self._handoffs = 0

    # rank 0

    def host(self, room: str, workers: int, params: tuple[ParamMeta, ...], within: Deadline) -> None:
        """Form the group with the other ranks and the workers in ``room``, and read what each worker needs.

        Raises:
            DeadlineError, ConfigError, TransportError: as `Membership.host`.
            ManifestError: a worker needs a block that is not in ``params``.
        """
        self.member.under(within)
        notes, size, session = self.member.notes(room), self._ranks().size, self._ranks().session
        session.order("enter", room=room, workers=workers, address=notes.host, port=notes.port, secret=notes.secret)
        self.member.host(room, workers + size, params)
        session.answers()
        group = _with_workers(self.member, workers)
        needs = group.notes.collect(f"needs/{group.generation}/", group.workers, within.again().until)
        silent = [rank for rank in group.workers if rank not in needs]
        if silent:
            raise TransportError(f"{group.call(silent)} did not say what it needs", state="nothing was sent")
        self._needs = [Needs.from_json(needs[rank], params) for rank in group.workers]
        self._plan = None

    def prepare(self, update: Update) -> Handoff:
        """Plan what all ranks hold now, unless the last plan is still good.

        Raises:
            ManifestError: ranks disagree on parameters, or nobody holds an element; named.
        """
        group, own = self.member.carrier(), described(update.source)
        plan, rows = self._planned(group, own)
        self._handoffs += 1
        load = Load(group=group.generation, handoff=self._handoffs, plan=self.number)
        sender = RoundSender(rows, own.shards, group, self._pool)
        stats = TransferStats(bytes=0)  # until something is sent

        def transfer(within: Deadline) -> None:
            self.member.under(within)
            began = time.perf_counter()
            stats.worker_bytes, stats.rank_bytes = self._send(group, sender, load.handoff, update.version)
            stats.bytes, stats.spans["transfer"] = int(plan.rank_bytes.sum()), time.perf_counter() - began
            stats.whole = {name: reason for needs in self._needs for name, reason in needs.whole.items()}
            stats.whole |= {shard.meta.name: shard.why for shard in own.shards if shard.gathers}

        return Handoff(info=load.to_json(), transfer=transfer, stats=stats)

    def _planned(self, group: PeerGroup, own: Description) -> tuple[TransferPlan, MemberPlan]:
        """Return the plan for what all ranks hold now, and the part of rank 0; make it where something has changed."""
        known = 0 if self._plan is None else self.number
        answers = self._ranks().session.ask("describe", digest=digest_of(own.params), known=known)
        for rank, answer in enumerate(answers, 1):
            if "params" in answer:
                raise first_difference(rank, own.params, answer["params"])
        held = [own.share] + [
            Share.from_json(answer["share"], own.params) if "share" in answer else self._held[rank]
            for rank, answer in enumerate(answers, 1)
        ]
        plan, rows = self._plan, self.own
        if plan is None or rows is None or plan.params != own.params or held != self._held:
            needed, self._plan = [needs.of(own.params) for needs in self._needs], None
            plan = make_plan(own.params, held, needed, bucket_bytes=self._bucket_bytes)
            self.number += 1
            hand_out(group, self.number, plan)
            self._ranks().session.ask("plan", number=self.number)
            self._held, self._plan = held, plan
            rows = self.own = plan.member(0)
        return plan, rows

    def _send(
        self, group: PeerGroup, sender: RoundSender, handoff: int, version: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Send beside the other ranks; return the bytes that each worker received, and those that each rank sent."""
        before, session = group.sent.total(), self._ranks().session
        ordered = answered = False
        try:
            session.order("send")
            ordered = True
            sender.send()
            sent = [group.sent.total() - before]
            received = handoffs.await_workers(group, handoff)
            refused = {rank: words for rank, words in received.items() if type(words) is not int}
            answered = True
            sent += [answer["sent"] for answer in session.answers(Deadline(_LAST_WORDS_S) if refused else None)]
        except BaseException as error:
            group.sever(why(error))
            if ordered:  # else no other rank has begun
                sender.drain()
            if ordered and not answered:
                with suppress(TransportError, DeadlineError):  # of a broken group, as all ranks see it
                    session.answers(Deadline(_LAST_WORDS_S))
            if isinstance(error, WeightSyncError):
                raise handoffs.sending_failed(group, handoff, version, error) from error
            raise
        if refused:
            raise handoffs.refused(group, version, refused)
        return tuple(count for count in received.values() if type(count) is int), tuple(sent)

    # the other ranks

    def steps(self, source: WeightSource | None) -> Steps:
        """Return what this rank does when rank 0 orders it; without a source, it can only enter a group."""
        self._description = None
        if source is None:
            return {"enter": self._enter}
        describe = partial(self._describe, source)
        return {"enter": self._enter, "describe": describe, "plan": self._take_plan, "send": self._send_own}

    def _enter(self, order: Info) -> None:
        before = self.member
        before.close()
        how: dict[str, Any] = {"device": before.device, "backend": before.backend, "timeout_s": before.timeout_s}
        self.member = Membership(order["address"], order["port"], order["secret"], **how)
        workers, ranks = order["workers"], self._ranks()
        self.member.enter(order["room"], group_rank(ranks.rank, workers), workers + ranks.size, ())
        _with_workers(self.member, workers)
        self.own = None

    def _describe(self, source: WeightSource, order: Info) -> Info:
        """Answer with the share of this rank, unless rank 0 has it; or with its parameters, if rank 0 has others."""
        own = self._description = described(source)
        if digest_of(own.params) != order["digest"]:
            return {"params": [meta.to_json() for meta in own.params]}
        known = self.own is not None and order["known"] == self.number and self.own.params == own.params
        return {} if known and self._held == [own.share] else {"share": own.share.to_json()}

    def _take_plan(self, order: Info) -> None:
        own = self._described()
        self._read_plan(self.member.carrier(), order["number"], own.params)
        self._held = [own.share]

    def _send_own(self, order: Info) -> Info:
        group, own = self.member.carrier(), self._described()
        if self.own is None:
            raise NotConnectedError("this trainer rank has no part of a transfer plan")
        sender, before = RoundSender(self.own, own.shards, group, self._pool), group.sent.total()
        try:
            sender.send()
        except BaseException:
            group.sever()
            sender.drain()
            raise
        return {"sent": group.sent.total() - before}

    def _described(self) -> Description:
        if self._description is None:
            raise NotConnectedError("this trainer rank was not asked what it holds")
        return self._description


def _with_workers(member: Membership, workers: int) -> PeerGroup:
    """Return the group of ``member``, in which the first ranks after 0 receive; other trainer ranks come behind."""
    group = member.carrier()
    group.workers = range(1, 1 + workers)
    return group
