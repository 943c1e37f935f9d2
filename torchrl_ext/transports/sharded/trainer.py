"""The trainer's end of the sharded transport: rank 0 drives, the other ranks follow its orders."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from torchrl_ext.errors import ManifestError, NotConnectedError, TransportError, WeightSyncError, why
from torchrl_ext.transports.base import TransferStats, deadline
from torchrl_ext.transports.group import handoffs
from torchrl_ext.transports.group.meeting import Membership
from torchrl_ext.transports.group.peers import Carrier
from torchrl_ext.transports.ranks import TrainerRanks
from torchrl_ext.transports.sharded.agreement import (
    Description,
    Needs,
    described,
    digest_of,
    first_difference,
    plan_of,
    put_shares,
    rows_of,
)
from torchrl_ext.transports.sharded.ends import End, Settings
from torchrl_ext.transports.sharded.plans.plan import TransferPlan
from torchrl_ext.transports.sharded.plans.shares import Share
from torchrl_ext.transports.sharded.rounds import Outgoing
from torchrl_ext.types import Info, ParamMeta
from torchrl_ext.weights.source import WeightSource

__all__ = ["TrainerEnd"]

_LAST_WORDS_S = 3.0
"""How long other trainer ranks have, after a failure, to say what they met."""


class TrainerEnd(End):
    """One rank of a sharded trainer.

    Args:
        settings, address, port, secret: as for `End`.
        name: of the transport.

    Attributes:
        ranks: all ranks of the trainer.
    """

    def __init__(self, settings: Settings, address: str, port: int, secret: str, name: str) -> None:
        super().__init__(settings, address, port, secret)
        self.ranks = TrainerRanks(name, settings.timeout_s)
        self._name = name
        self._needs: list[Needs] = []
        self._held: list[Share] = []
        self._description: Description | None = None
        self._agreed = True  # every worker has made the plan
        self._handoffs = 0

    # rank 0

    def host(self, room: str, workers: int, params: tuple[ParamMeta, ...]) -> None:
        """Form the group with the other ranks and the workers in ``room``, and hear what each worker needs.

        Raises:
            DeadlineError, ConfigError, TransportError: as `Membership.host`.
            ManifestError: what a worker needs is not of ``params``.
        """
        notes, size = self.member.notes(room), self.ranks.size
        where = {"address": notes.host, "port": notes.port, "secret": notes.secret}
        self.ranks.order("enter", room=room, workers=workers, **where)
        self.member.host(room, workers + size, params)
        self.ranks.answers()
        group = _with_workers(self.member, workers)
        told = group.notes.collect(f"needs/{group.generation}/", group.workers, deadline(self.settings.timeout_s))
        silent = [rank for rank in group.workers if rank not in told]
        if silent:
            raise TransportError(f"{group.call(silent)} did not say what it needs", state="nothing was sent")
        self._needs = [Needs.from_json(told[rank], params) for rank in group.workers]
        self._held, self.plan = [], None

    def prepare(self, source: WeightSource, version: int) -> tuple[Info, Callable[[], TransferStats]]:
        """Agree on a plan for what all ranks hold now.

        Returns:
            The info of the handoff, and what sends it on all ranks; that returns what it took.

        Raises:
            ManifestError: ranks disagree on parameters, nobody holds an element, or plans differ; named.
        """
        group, own = self.member.carrier(), described(source)
        plan = self._planned(group, own)
        self._handoffs += 1
        info = {
            "transport": self._name,
            "version": version,
            "group": group.generation,
            "handoff": self._handoffs,
            "plan": self.number,
            "digest": plan.digest,
            "params": [meta.to_json() for meta in own.params],
        }
        return info, partial(self._send, group, plan, own, info)

    def _planned(self, group: Carrier, own: Description) -> TransferPlan:
        """Return the plan for what all ranks hold now; make and compare it where something has changed."""
        ask = partial(self.ranks.ask, "describe", digest=digest_of(own.params))
        answers = ask(known=0 if self.plan is None else self.number)
        for rank, answer in enumerate(answers, 1):
            if "params" in answer:
                raise first_difference(rank, own.params, answer["params"])
        known = self.plan is not None and self.plan.params == own.params and self._held[0] == own.share
        if known and self.plan is not None and not any("share" in answer for answer in answers):
            return self.plan
        if any("share" not in answer for answer in answers):
            answers = ask(known=0)
        held = [own.share, *(Share.from_json(answer["share"], own.params) for answer in answers)]
        self.number += 1
        put_shares(group, self.number, held, [needs.blocks(own.params) for needs in self._needs])
        plan = self._made(group, own, self.number)
        for rank, answer in enumerate(self.ranks.ask("plan", number=self.number, digest=plan.digest), 1):
            if answer:
                raise _other_plan(f"trainer rank {rank}", plan, answer)
        self._held, self.plan, self._agreed = held, plan, False
        return plan

    def _send(self, group: Carrier, plan: TransferPlan, own: Description, info: Info) -> TransferStats:
        began, before = time.perf_counter(), group.sent.total()
        ordered = answered = False
        outgoing = Outgoing(plan, 0, own.shards, group, self._pool)
        try:
            if not self._agreed:
                self._await_plans(group, plan)
            self.ranks.order("send")
            ordered = True
            outgoing.send()
            sent = [group.sent.total() - before]
            said = handoffs.await_workers(group, info)
            refused = {rank: words for rank, words in said.items() if type(words) is not int}
            answered = True
            sent += [answer["sent"] for answer in self.ranks.answers(_LAST_WORDS_S if refused else None)]
        except BaseException as error:
            handoffs.tell_stopped(group, why(error))
            group.sever()
            if ordered:  # else no other rank has begun
                outgoing.drain()
            if ordered and not answered:
                with suppress(TransportError):  # of a broken group, as all ranks see it
                    self.ranks.answers(_LAST_WORDS_S)
            if isinstance(error, WeightSyncError):
                raise handoffs.sending_failed(group, info, error) from error
            raise
        self._agreed = True
        if refused:
            raise handoffs.refused(group, info, refused)
        return TransferStats(
            bytes=int(plan.rank_bytes.sum()),
            spans={"transfer": time.perf_counter() - began},
            rank_bytes=tuple(sent),
            worker_bytes=tuple(count for count in said.values() if type(count) is int),
            whole={name: reason for needs in self._needs for name, reason in needs.whole.items()}
            | {shard.meta.name: shard.why for shard in own.shards if shard.gathers},
        )

    def _await_plans(self, group: Carrier, plan: TransferPlan) -> None:
        """Wait until every worker has made the same plan.

        Raises:
            ManifestError: one has made another one; names the first parameter that differs.
            TransportError: one does not say so in time.
        """
        key = f"plan/{group.generation}/{self.number}/"
        said = group.notes.collect(key, group.workers, deadline(self.settings.timeout_s))
        for rank in group.workers:
            if rank not in said:
                raise TransportError(f"{group.call([rank])} did not say that it has made the transfer plan")
            if said[rank]:
                raise _other_plan(group.call([rank]), plan, said[rank])
        group.notes.sweep(key)

    # the other ranks

    def meet(self) -> None:
        """Follow rank 0 into a group."""
        self.ranks.serve({"enter": self._enter})

    def follow(self, source: WeightSource) -> None:
        """As `Transport.follow`."""
        try:
            self.ranks.serve(
                {
                    "enter": self._enter,
                    "describe": partial(self._describe, source),
                    "plan": self._make_plan,
                    "send": self._send_own,
                }
            )
        finally:
            self._description = None

    def _enter(self, order: Info) -> None:
        self.member.close()
        self.member = self._membership(order["address"], order["port"], order["secret"])
        workers, rank = order["workers"], self.ranks.rank
        self.member.enter(order["room"], workers + rank, workers + self.ranks.size, ())
        _with_workers(self.member, workers)
        self.plan = None

    def _describe(self, source: WeightSource, order: Info) -> Info:
        """Say what this rank holds, and which parameters where they are not those of rank 0, if that is news."""
        own = self._description = described(source)
        if digest_of(own.params) != order["digest"]:
            return {"params": [meta.to_json() for meta in own.params]}
        known = self.plan is not None and order["known"] == self.number and self.plan.params == own.params
        return {} if known and self._held == [own.share] else {"share": own.share.to_json()}

    def _make_plan(self, order: Info) -> Info:
        own = self._described()
        self.plan, self.number = self._made(self.member.carrier(), own, order["number"]), order["number"]
        self._held = [own.share]
        return {} if self.plan.digest == order["digest"] else rows_of(self.plan)

    def _send_own(self, order: Info) -> Info:
        group, own = self.member.carrier(), self._described()
        if self.plan is None:
            raise NotConnectedError("this trainer rank has made no transfer plan")
        outgoing, before = Outgoing(self.plan, self.ranks.rank, own.shards, group, self._pool), group.sent.total()
        try:
            outgoing.send()
        except BaseException:
            group.sever()
            outgoing.drain()
            raise
        return {"sent": group.sent.total() - before}

    def _described(self) -> Description:
        if self._description is None:
            raise NotConnectedError("this trainer rank has not said what it holds")
        return self._description

    # all ranks

    def _made(self, group: Carrier, own: Description, number: int) -> TransferPlan:
        until, bucket_bytes = deadline(self.settings.timeout_s), self.settings.bucket_bytes
        return plan_of(group, number, own.params, until, bucket_bytes=bucket_bytes, own=own.share)


def _with_workers(member: Membership, workers: int) -> Carrier:
    """Return the group of ``member``, in which the first ranks after 0 receive; other trainer ranks come behind."""
    group = member.carrier()
    group.workers = range(1, 1 + workers)
    return group


def _other_plan(who: str, plan: TransferPlan, said: Mapping[str, Any]) -> ManifestError:
    """Return the error that names the first row in which another member's plan differs from this one."""
    own, theirs = plan.rows_digest().tolist(), list(said.get("rows", ()))
    place = next((at for at, row in enumerate(own) if theirs[at : at + 1] != [row]), None)
    first = "its rounds differ" if place is None else f"the first difference is in row {plan.row(place)}"
    return ManifestError(
        f"{who} has not made the same transfer plan as trainer rank 0: {said.get('error') or first}",
        state="nothing was moved; engines hold their old weights",
        hint="use one release of torchrl_ext on every rank and engine",
    )
