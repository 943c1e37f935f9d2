"""`ShardedTransport` sends each worker the slices that it needs, from the trainer ranks that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import (
    ConfigError,
    ManifestError,
    StaleBaseError,
    TransportError,
    WeightSyncError,
    why,
)
from torchrl_ext.base.types import Info, ParamMeta, Params, Wire
from torchrl_ext.data.group.buckets import BufferPool
from torchrl_ext.data.group.group import Group, GroupLoad, GroupOffer, GroupWorker, Member, ranks_text
from torchrl_ext.data.group.ranks import Steps
from torchrl_ext.data.sharded.plan import Agreement, Blocks, Shares, TransferPlan, group_rank
from torchrl_ext.data.sharded.rounds import RoundReceiver, RoundSender
from torchrl_ext.data.transports.base import Abilities, Arrival, Handoff, TransferStats, Update, Worker
from torchrl_ext.data.transports.collective import VLLMCollectiveTransport
from torchrl_ext.data.weights.blocks import Block, Shard, checked_shards
from torchrl_ext.data.weights.source import WeightSource

__all__ = ["ShardedTransport"]


class ShardedLoad(GroupLoad, frozen=True, kw_only=True):
    """One handoff.

    Attributes:
        plan: digest of the transfer plan.
    """

    plan: str


class Needs(Wire, frozen=True, kw_only=True):
    """What a worker that joins says of itself.

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
    """One worker, which receives `Worker.slices`."""

    load: ClassVar[type[ShardedLoad]] = ShardedLoad

    def __init__(self, member: Member, here: Worker) -> None:
        super().__init__(member, here)
        self._slices, self._pool = here.slices, BufferPool(member.device)
        self._group: Group | None = None
        self._agreement: Agreement

    @classmethod
    def about(cls, here: Worker) -> Info:
        """Return its `Needs`."""
        share = None
        if here.slices:
            share = Blocks.of_blocks(_needed(here.slices, meta) for meta in here.params).to_text()
        return Needs(share=share, whole=dict(here.whole)).to_json()

    def incoming(self, group: Group, load: ShardedLoad, arrival: Arrival, into: Mapping[str, Tensor]) -> RoundReceiver:
        if group is not self._group:
            self._group, self._agreement = group, read_agreement(group, arrival.params)
        plan = self._agreement.plan(arrival.params, load.plan)
        needed = [_needed(self._slices, meta) for meta in arrival.params]
        return RoundReceiver(plan, needed, into, group, self._pool)


def _needed(slices: Mapping[str, tuple[Block, ...]], meta: ParamMeta) -> tuple[Block, ...]:
    return slices.get(meta.name, (Block.whole(meta.shape),))


class ShardedTransport(VLLMCollectiveTransport):
    """Sends each worker its slices, straight from the trainer ranks that hold them: no gather, no full tensor.

    Every rank of the trainer (of torch's process group, or a single process without a group) creates a transport, and
    calls `update_weights` or `send_weights`. Once for each connection, ranks report to rank 0 the blocks that they hold
    (`WeightSource.shards`) and workers the blocks that they need; every member makes the same transfer plans of them.

    Args:
        master_address: address of trainer rank 0, as workers and other trainer ranks reach it.
        master_port: port of its store; 0 picks a free one, which a control layer passes on.
        worker: without a control layer, the number of this worker, 0 to ``workers - 1``; None for a trainer rank.
        workers: without a control layer, the number of workers.
        device: device of the tensors that are sent and received; by default this thread's accelerator, or the CPU
            without one.
        backend: ``"nccl"`` or ``"gloo"``, which copies through the host; by default that of the device.
        bucket_bytes: largest number of bytes that a trainer rank sends, and a worker receives, in one round; two rounds
            overlap. None takes 8 MiB over gloo, and 256 MiB between devices.
        secret: as in `VLLMCollectiveTransport`.
        timeout_s: deadline of every wait, in seconds.

    Raises:
        ConfigError: the settings are invalid.

    Example:
        >>> from threading import Thread
        >>> trainer = tx.ShardedTransport("127.0.0.1", port, workers=1)
        >>> worker = tx.ShardedTransport("127.0.0.1", port, worker=0, workers=1)
        >>> shapes = {"weight": (torch.float32, (2, 4)), "bias": (torch.float32, (2,))}
        >>> beside = Thread(target=lambda: (trainer.init_all_workers_group(shapes), trainer.send_weights(policy)))
        >>> beside.start()
        >>> worker.init_all_workers_group(shapes)
        >>> received = worker.receive_weights(timeout=30.0)
        >>> beside.join()
        >>> bool((received["weight"] == policy.weight).all())
        True
    """

    name: ClassVar[str] = "sharded"
    abilities: ClassVar[Abilities] = Abilities(digests=True, slices=True, gathers=False)
    worker: ClassVar[type[GroupWorker]] = ShardedWorker

    def __init__(
        self,
        master_address: str = "127.0.0.1",
        master_port: int = 0,
        worker: int | None = None,
        workers: int | None = None,
        device: torch.device | str | int | None = None,
        *,
        backend: str | None = None,
        bucket_bytes: int | None = None,
        secret: str = "",
        timeout_s: float = 60.0,
    ) -> None:
        if worker is not None and not 0 <= worker < (worker + 1 if workers is None else workers):
            raise ConfigError(f"worker {worker} does not exist among {workers}", expected="0 to workers - 1")
        rank, size = (0, workers and 1 + workers) if worker is None else (1 + worker, None)
        how: dict[str, Any] = {"backend": backend, "bucket_bytes": bucket_bytes, "secret": secret}
        super().__init__(master_address, master_port, rank, size, device, timeout_s=timeout_s, **how)
        if self.bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes={bucket_bytes}", expected="1 or more")
        self._pool = BufferPool(self.device)
        self._sending: _Sending | None = None

    # forming the group

    def init_all_workers_group(self, model_metadata: Mapping[str, tuple[Any, Any]]) -> None:
        """Form the group without a control layer; every trainer rank and every worker calls this at the same time.

        Args:
            model_metadata: ``{name: (dtype, shape)}``, the same everywhere; empty to agree on nothing.

        Raises:
            DeadlineError: ranks, which the message names, did not arrive within `timeout_s`.
            ManifestError: ranks disagree on a parameter, which the message names.
        """
        if self.rank:
            super().init_all_workers_group(model_metadata)
        elif self.ranks.drives:
            with self.ranks.leading():
                super().init_all_workers_group(model_metadata)
        else:
            self._within = Deadline(float("inf"), "the other ranks")
            self.ranks.following(lambda: {"enter": self._enter}, self._within)

    def _open(self, size: int, params: Params, *, private: bool) -> Handoff:
        offer = self.member.open(size - 1 + self.ranks.size, private=private)
        return Handoff(info=offer.to_json(), transfer=lambda within: self._host(offer, size - 1, params, within))

    def _host(self, offer: GroupOffer, workers: int, params: Params, within: Deadline) -> None:
        """Form the group with the other ranks and the workers that were offered it, and read what each worker needs.

        Raises:
            DeadlineError, ConfigError, TransportError: as `Member.host`.
            ConfigError: the needs of a worker are malformed.
        """
        session = self.ranks.session
        session.order("enter", offer=offer.to_json(), workers=workers)
        group = self.member.host(offer.members, params, within)
        session.answers()
        group.workers = range(1, 1 + workers)  # other trainer ranks come behind
        needs = [Needs.from_json(group.about[rank], f"the needs of {group.call([rank])}") for rank in group.workers]
        self._sending = _Sending(group, 0, self._pool, params, needs)

    def _enter(self, order: Info) -> None:
        """Join the group of rank 0's offer, on another rank of the trainer."""
        before, offer = self.member, GroupOffer.from_json(order["offer"], "an order of trainer rank 0")
        before.close()
        how: dict[str, Any] = {"device": before.device, "backend": before.backend, "timeout_s": before.timeout_s}
        self.member = Member(offer.master_address, offer.master_port, offer.secret, **how)
        rank, within = self.ranks.rank, Deadline(before.timeout_s)
        group = self.member.enter(group_rank(rank, order["workers"]), offer.members, (), within)
        self._sending = _Sending(group, rank, self._pool)

    # an update

    def prepare(self, update: Update, within: Deadline) -> Handoff:
        """See `Transport.prepare`; a failure closes the connection.

        Raises:
            ManifestError: ranks disagree on parameters, or nobody holds an element; named.
            StaleBaseError: a rank holds something else than what the connection was made for.
        """
        self._require_trainer("send_weights")
        sending, session = self._connected_at(within), self.ranks.session
        try:
            plan = self._planned(sending, update)
        except BaseException as error:
            self.member.close(why(error))
            raise
        sending.handoffs += 1
        load = ShardedLoad(handoff=sending.handoffs, plan=plan.digest)
        stats, group = TransferStats(bytes=0), sending.group  # until something is sent
        stats.whole = {name: reason for needs in sending.needs for name, reason in needs.whole.items()}
        stats.whole |= {shard.meta.name: shard.why for own in sending.held for shard in own if shard.gathers}

        def transfer(within: Deadline) -> None:
            group.stop = within.stop
            try:
                with stats.spans.of("transfer"):
                    session.order("send")
                    sent = [sending.send()]
                    received = group.await_workers(load.handoff)
                    sent += [answer["sent"] for answer in session.answers()]
            except WeightSyncError as error:
                raise group.sending_failed(load.handoff, update.version, error) from error
            except BaseException as error:
                group.sever(why(error))
                raise
            stats.bytes, stats.worker_bytes, stats.rank_bytes = plan.nbytes, tuple(received.values()), tuple(sent)

        return Handoff(info=load.to_json(), transfer=transfer, stats=stats)

    def _planned(self, sending: _Sending, update: Update) -> TransferPlan:
        """Return the plan of an update, which every rank then has, too."""
        session, params = self.ranks.session, update.params
        session.order("hold")
        held = [sending.hold(update.source), *session.answers()]
        moved = [rank for rank, one in enumerate(held) if one.get("plan", "") is None]
        if moved or any(one.get("plan") != held[0].get("plan") for one in held):
            raise StaleBaseError(
                f"trainer {ranks_text(moved or range(len(held)))} send other parameters or blocks than before",
                expected="the ones for which the connection was made, the same parameters on every rank",
                state="nothing was sent, and the connection was closed",
                hint="connect again (init_all_workers_group on every rank); a WeightSender does so in the same update",
            )
        if sending.agreement is None:
            for rank, one in enumerate(held):
                if one["params"] != held[0]["params"]:
                    raise _first_difference(rank, held[0]["params"], one["params"])
            whole = Blocks.of_blocks([Block.whole(meta.shape)] for meta in params).to_text()
            shares = Shares(
                held=tuple(one["share"] for one in held),
                needed=tuple(needs.share or whole for needs in sending.needs),
                bucket_bytes=self.bucket_bytes,
            )
            sending.agreement = Agreement(shares, params, 0)
            plan = sending.agreement.plan(params).plan  # names what nobody holds
            sending.group.store.set("shares", shares.to_json())
            session.ask("agree", plan=plan.digest)
        return sending.agreement.plan(params).plan

    def rank_steps(self, source: WeightSource) -> Steps:
        def own() -> _Sending:
            return self._connected_at(Deadline(self.timeout_s))

        return {
            "enter": self._enter,
            "hold": lambda order: own().hold(source),
            "agree": lambda order: own().agree(order["plan"]),
            "send": lambda order: {"sent": own().send()},
        }

    def _connected_at(self, within: Deadline) -> _Sending:
        self.member.group(within)  # or the reason for which there is none
        assert self._sending is not None
        return self._sending

    def _require_trainer(self, what: str) -> None:
        super()._require_trainer(what)
        if not self.ranks.drives:
            raise TransportError(
                f"{what} was called on trainer rank {self.ranks.rank}",
                expected="trainer rank 0; the others call update_weights or send_weights, and follow",
                state="nothing was sent",
            )


@final
class _Sending:
    """One trainer rank in one connection.

    Args:
        group: of this connection.
        rank: in the trainer.
        pool: of memory for messages.
        joined, needs: on rank 0, the parameters for which workers joined, and what each of them needs.

    Attributes:
        agreement: of all members, from the first update on.
        held: this rank's shards of each parameter, from `hold` to `send`.
        handoffs: how many there were.
    """

    def __init__(
        self, group: Group, rank: int, pool: BufferPool, joined: Params = (), needs: Sequence[Needs] = ()
    ) -> None:
        self.group, self.needs, self.handoffs = group, needs, 0
        self.agreement: Agreement | None = None
        self.held: Sequence[Sequence[Shard]] = ()
        self._rank, self._pool, self._params = rank, pool, joined

    def hold(self, source: WeightSource) -> Info:
        """Take what this rank holds for an update.

        Returns:
            In the first update of a connection ``params`` and ``share``; in a later one the digest of the ``plan``,
            None where this rank has declared something else, or workers have joined for something else.
        """
        joined, self._params = self._params, source.params()
        self.held = [own for _, own in checked_shards(source.shards(), self._params)]
        share = Blocks.of_blocks([shard.block for shard in own] for own in self.held)
        if self.agreement is not None:
            same = self.agreement.holds(self._rank, self._params, share)
            return {"plan": self.agreement.plan(self._params).plan.digest if same else None}
        if joined != self._params and any(needs.share for needs in self.needs):
            return {"plan": None}
        return {"params": [meta.to_json() for meta in self._params], "share": share.to_text()}

    def agree(self, digest: str) -> None:
        """Read what all members hold and need, and make the plan, on a rank other than 0."""
        self.agreement = read_agreement(self.group, self._params)
        self.agreement.plan(self._params, digest)

    def send(self) -> int:
        """Send this rank's part of the update; errors as `RoundSender.send`, and the same result."""
        assert self.agreement is not None  # rank 0 orders "hold" and "agree" first
        held, self.held = self.held, ()  # which refers to the trainer's memory
        return RoundSender(self.agreement.plan(self._params), held, self.group, self._pool).send()


def _first_difference(rank: int, own: Sequence[Any], rows: Sequence[Any]) -> ManifestError:
    """Return the error that names the first parameter on which a trainer rank and rank 0 disagree."""
    place, pair = next((place, pair) for place, pair in enumerate(zip_longest(own, rows)) if pair[0] != pair[1])
    mine, other = ("nothing" if row is None else ParamMeta.from_json(row) for row in pair)
    return ManifestError(
        f"trainer rank {rank} has {other} as parameter {place}, and rank 0 has {mine}",
        expected="the same parameters, in the same order, on every trainer rank",
        state="nothing was sent; engines still serve their previous weights",
        hint="give every rank the same model, and WeightSender the same mapper and dtype",
    )
