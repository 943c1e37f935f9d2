"""`ShardedTransport` sends each worker the slices that it needs, from the trainer ranks that hold them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchrl_ext.errors import (
    ConcurrentUpdateError,
    ConfigError,
    ManifestError,
    NotConnectedError,
    TransportError,
    WeightSyncError,
    why,
)
from torchrl_ext.transports.base import TransferStats, deadline
from torchrl_ext.transports.collective import handoffs
from torchrl_ext.transports.collective.backends import choose_backend
from torchrl_ext.transports.collective.group import Group
from torchrl_ext.transports.collective.meeting import LOBBY, Membership
from torchrl_ext.transports.copies import BufferPool
from torchrl_ext.transports.ranks import TrainerRanks
from torchrl_ext.transports.sharded.agreement import (
    Description,
    Needs,
    described,
    digest_of,
    first_difference,
    plan_of,
    put_shares,
)
from torchrl_ext.transports.sharded.plan import Share, TransferPlan
from torchrl_ext.transports.sharded.rounds import Incoming, Outgoing
from torchrl_ext.transports.standalone import StandaloneTransport
from torchrl_ext.types import Handoff, Info, ParamMeta
from torchrl_ext.weights.shards.blocks import Block
from torchrl_ext.weights.source import WeightSource, as_source

__all__ = ["ShardedTransport"]

BUCKET_BYTES = 8 << 20
"""Default bound on what a trainer rank sends, and a worker receives, in one round, in bytes; two are in flight."""

_LAST_WORDS_S = 3.0
"""How long other trainer ranks have, after a failure, to say what they met."""


class ShardedTransport(StandaloneTransport):
    """Sends each worker its slices, straight from the trainer ranks that hold them: no gather, no full tensor.

    Every rank of the trainer (of torch's process group; or one process without any) makes one, and calls
    `update_weights` or `send_weights`. Ranks say which blocks they hold (`WeightSource.shards`), workers which ones
    they need, and all make the same transfer plan of it, whose digest is compared before a byte moves.

    Args:
        master_address: where workers and other trainer ranks reach trainer rank 0.
        master_port: of its store; 0 picks a free one (with a control layer, which passes it on).
        worker: without a control layer, the number of this worker, 0 to ``workers - 1``; None for a trainer rank.
        workers: without a control layer, how many workers there are.
        device: where tensors travel from and to; by default the current CUDA device, or the CPU without one.
        carrier: ``"group"`` sends point to point over NCCL or gloo; ``"nixl"`` lets workers read from registered memory
            of the trainer (``pip install torchrl_ext[nixl]``).
        backend: of carrier ``"group"``: ``"nccl"`` or ``"gloo"``; by default nccl on CUDA and gloo on the CPU.
        bucket_bytes: what a trainer rank sends, and a worker receives, in one round, at most; two are in flight.
        secret: as in `VLLMCollectiveTransport`.
        timeout_s: deadline of every wait, in seconds.

    Raises:
        ConfigError: settings that cannot work.

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
    proves: ClassVar[bool] = True
    slices: ClassVar[bool] = True

    def __init__(
        self,
        master_address: str = "127.0.0.1",
        master_port: int = 0,
        worker: int | None = None,
        workers: int | None = None,
        device: torch.device | str | int | None = None,
        *,
        carrier: str = "group",
        backend: str | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        secret: str = "",
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        if carrier not in ("group", "nixl"):
            raise ConfigError(f"there is no carrier {carrier!r}", expected="'group' or 'nixl'")
        if bucket_bytes < 1 or not timeout_s > 0 or not 0 <= int(master_port) < 1 << 16:
            raise ConfigError(
                f"bucket_bytes={bucket_bytes}, timeout_s={timeout_s}, master_port={master_port}",
                expected="1 or more; more than 0; 0 to 65535",
            )
        if worker is not None and not 0 <= worker < (worker + 1 if workers is None else workers):
            raise ConfigError(f"worker {worker} does not exist among {workers}", expected="0 to workers - 1")
        if carrier == "nixl" and backend is not None:
            raise ConfigError(f"carrier 'nixl' takes no backend {backend!r}", hint="leave it out")
        self.device, self.backend = choose_backend(device, backend)
        if carrier == "nixl":
            self.backend = carrier
        self.carrier, self.bucket_bytes = carrier, bucket_bytes
        self._worker, self._workers = worker, workers
        self._member = self._membership(master_address, int(master_port), secret)
        self._pool = BufferPool(self.device)
        self._ranks = TrainerRanks(self.name, timeout_s) if worker is None else None
        self._handoffs = 0
        self._room = 0  # workers in the group
        self._number = 0  # of the plan
        self._plan: TransferPlan | None = None
        self._agreed = True  # all members have made that plan
        # a trainer rank
        self._needs: list[Needs] = []
        self._held: list[Share] = []
        self._source: WeightSource | None = None
        self._description: Description | None = None
        # a worker
        self._slices: Mapping[str, tuple[Block, ...]] = {}
        self._whole: Mapping[str, str] = {}
        self._params: tuple[ParamMeta, ...] = ()
        self._rows: list[Any] = []

    def _membership(self, address: str, port: int, secret: str) -> Membership:
        return Membership(address, port, secret, device=self.device, backend=self.backend, timeout_s=self.timeout_s)

    @classmethod
    def from_info(cls, info: Info) -> ShardedTransport:
        try:
            return cls(
                info["master_address"],
                info["master_port"],
                worker=info.get("rank", 1) - 1,
                device="cpu" if info["backend"] == "gloo" else None,
                carrier=info["carrier"],
                backend=None if info["carrier"] == "nixl" else info["backend"],
                secret=info["secret"],
                bucket_bytes=info["bucket_bytes"],
                timeout_s=info["timeout_s"],
            )
        except TypeError as error:
            raise TransportError(f"the trainer's offer cannot be read: {error}", state="nothing was joined") from error

    # forming the group

    def init_all_workers_group(self, model_metadata: Mapping[str, tuple[Any, Any]]) -> None:
        """Form the group without a control layer; every trainer rank and every worker calls this at the same time.

        Args:
            model_metadata: ``{name: (dtype, shape)}``, the same everywhere; empty to agree on nothing.

        Raises:
            DeadlineError: names the ranks that did not arrive within `timeout_s`.
            ManifestError: names the parameter on which ranks disagree.
        """
        params = tuple(ParamMeta(name, dtype, tuple(shape)) for name, (dtype, shape) in model_metadata.items())
        self._member.stop.clear()
        if self._worker is not None:
            self._member.enter(LOBBY, 1 + self._worker, None, params)
            self._entered(params)
        elif self._trainer.rank:
            self._trainer.serve({"compare": lambda order: self._compare(order, params), "enter": self._enter})
        else:
            try:
                self._host(LOBBY, self._standalone_workers(), params)
            except BaseException as error:
                self._trainer.dismiss(error)
                raise
            self._trainer.dismiss()

    def open(self, workers: int, params: tuple[ParamMeta, ...]) -> Handoff:
        if self._worker is not None or self._trainer.rank:
            raise self._no_driver("open")
        self._member.stop.clear()
        if workers == 0:
            if self.check_connection():
                return Handoff(info={"transport": self.name})
            room, workers = LOBBY, self._standalone_workers()
        else:
            room = f"room/{uuid.uuid4().hex}"
        notes = self._member.notes(room)
        info = {
            "transport": self.name,
            "master_address": notes.host,
            "master_port": notes.port,
            "secret": notes.secret,
            "room": room,
            "members": workers + self._trainer.size,
            "carrier": self.carrier,
            "backend": self.backend,
            "bucket_bytes": self.bucket_bytes,
            "timeout_s": self.timeout_s,
        }
        return Handoff(info=info, transfer=partial(self._host, room, workers, params))

    def want(self, slices: Mapping[str, tuple[Block, ...]], whole: Mapping[str, str]) -> None:
        self._slices, self._whole = slices, whole

    def join(self, info: Info) -> None:
        """As `Transport.join`; ``info["rank"]`` is this worker's rank, 1 or more.

        Raises:
            DeadlineError: names the ranks that did not arrive.
        """
        self._worker = info["rank"] - 1
        self._member.stop.clear()
        self._member.enter(info["room"], info["rank"], info["members"], ())
        self._entered(tuple(ParamMeta.from_json(row) for row in info.get("params", ())))

    def _host(self, room: str, workers: int, params: tuple[ParamMeta, ...]) -> None:
        """Form the group (trainer rank 0), and hear what each worker needs."""
        notes = self._member.notes(room)
        self._trainer.order(
            "enter", room=room, address=notes.host, port=notes.port, secret=notes.secret, workers=workers
        )
        self._member.host(room, workers + self._trainer.size, params)
        self._trainer.answers()
        group = self._group(workers)
        told = group.notes.collect(f"needs/{group.generation}/", group.workers, deadline(self.timeout_s))
        silent = [rank for rank in group.workers if rank not in told]
        if silent:
            raise TransportError(f"{group.call(silent)} did not say what it needs", state="nothing was sent")
        self._needs = [Needs.from_json(told[rank], params) for rank in group.workers]
        self._held, self._plan = [], None

    def _compare(self, order: Info, params: tuple[ParamMeta, ...]) -> Info:
        """Say which parameters this rank has, unless they are those of rank 0."""
        return {} if digest_of(params) == order["digest"] else {"params": [meta.to_json() for meta in params]}

    def _enter(self, order: Info) -> None:
        """Join the group as another trainer rank."""
        self._member.close()
        self._member = self._membership(order["address"], order["port"], order["secret"])
        workers, rank = order["workers"], self._trainer.rank
        self._member.enter(order["room"], workers + rank, workers + self._trainer.size, ())
        self._group(workers)
        self._plan = None

    def _entered(self, params: tuple[ParamMeta, ...]) -> None:
        """Say what this worker needs."""
        group, self._plan, self._params = self._member.group(), None, params
        share = None
        if self._slices:
            share = Share.of_blocks(self._slices.get(meta.name, (Block.whole(meta.shape),)) for meta in params)
        self._share = share
        group.notes.put(f"needs/{group.generation}/{group.rank}", Needs(share, self._whole).to_json())

    def _group(self, workers: int) -> Group:
        self._room, group = workers, self._member.group()
        group.workers = range(1, 1 + workers)
        return group

    def _standalone_workers(self) -> int:
        if self._workers is None:
            raise ConfigError(
                "the number of workers is not known",
                hint="give workers=, or connect through an engine client",
            )
        return self._workers

    # an update, on a trainer rank

    def prepare(self, source: WeightSource, version: int) -> Handoff:
        if self._worker is not None or self._trainer.rank:
            raise self._no_driver("send_weights")
        group = self._member.group()
        own = self._description = described(source)
        plan = self._planned(group, own)
        self._handoffs += 1
        info = {
            "transport": self.name,
            "version": version,
            "group": group.generation,
            "handoff": self._handoffs,
            "plan": self._number,
            "digest": plan.digest,
            "params": [meta.to_json() for meta in own.params],
        }
        return Handoff(info=info, transfer=partial(self._send, group, plan, own, info))

    def _planned(self, group: Group, own: Description) -> TransferPlan:
        """Return the plan for what all ranks hold now; make and compare it where something has changed."""
        digest = digest_of(own.params)
        answers = self._trainer.ask("describe", known=self._number if self._plan is not None else 0, digest=digest)
        for rank, answer in enumerate(answers, 1):
            if "params" in answer:
                raise first_difference(rank, own.params, answer["params"])
        same = self._plan is not None and self._plan.params == own.params and self._held[:1] == [own.share]
        if same and self._plan is not None and not any("share" in answer for answer in answers):
            return self._plan
        if any("share" not in answer for answer in answers):
            answers = self._trainer.ask("describe", known=0, digest=digest)
        held = [own.share, *(Share.from_json(answer["share"], own.params) for answer in answers)]
        needed = [needs.blocks(own.params) for needs in self._needs]
        self._number += 1
        put_shares(group, self._number, held, needed)
        plan = plan_of(
            group, self._number, own.params, deadline(self.timeout_s), bucket_bytes=self.bucket_bytes, own=own.share
        )
        for rank, answer in enumerate(self._trainer.ask("plan", number=self._number, digest=plan.digest), 1):
            if answer:
                raise _other_plan(f"trainer rank {rank}", plan, answer)
        self._held, self._plan, self._agreed = held, plan, False
        return plan

    def _send(self, group: Group, plan: TransferPlan, own: Description, info: Info) -> None:
        began = time.perf_counter()
        outgoing = Outgoing(plan, 0, own.shards, group, self._pool)
        ordered = False
        try:
            if not self._agreed:
                self._await_plans(group, plan)
            self._trainer.order("send")
            ordered = True
            before = group.sent.total()
            outgoing.send()
            sent = [group.sent.total() - before]
            said = handoffs.await_workers(group, info)
            refused = {rank: words for rank, words in said.items() if type(words) is not int}
            sent += [answer["sent"] for answer in self._trainer.answers(_LAST_WORDS_S if refused else None)]
        except BaseException as error:
            handoffs.tell_stopped(group, why(error))
            group.sever()
            if ordered:
                outgoing.drain()
                self._raise_cause()
            if isinstance(error, WeightSyncError):
                raise handoffs.sending_failed(group, info, error) from error
            raise
        self._agreed = True
        self.stats = TransferStats(
            bytes=int(plan.rank_bytes.sum()),
            spans={"transfer": time.perf_counter() - began},
            rank_bytes=tuple(sent),
            worker_bytes=tuple(count for count in said.values() if type(count) is int),
            whole={name: reason for needs in self._needs for name, reason in needs.whole.items()}
            | {shard.meta.name: shard.why for shard in own.shards if shard.gathers},
        )
        if refused:
            raise handoffs.refused(group, info, refused)

    def _raise_cause(self) -> None:
        """Raise what another trainer rank met, unless it is that of a broken group, as all ranks see it."""
        with suppress(TransportError):
            self._trainer.answers(_LAST_WORDS_S)

    def _await_plans(self, group: Group, plan: TransferPlan) -> None:
        """Wait until every worker has made the same plan.

        Raises:
            ManifestError: one has made another one; names the first parameter that differs.
        """
        key = f"plan/{group.generation}/{self._number}/"
        said = group.notes.collect(key, group.workers, deadline(self.timeout_s))
        for rank in group.workers:
            if rank not in said:
                raise TransportError(f"{group.call([rank])} did not say that it has made the plan")
            if said[rank]:
                raise _other_plan(group.call([rank]), plan, said[rank])
        group.notes.sweep(key)

    # another trainer rank

    def follow(self, source: WeightSource) -> None:
        self._source = source
        try:
            self._trainer.serve(
                {
                    "compare": lambda order: self._compare(order, source.params()),
                    "enter": self._enter,
                    "describe": partial(self._describe, source),
                    "plan": self._make_plan,
                    "send": self._send_own,
                }
            )
        finally:
            self._description = None

    def _describe(self, source: WeightSource, order: Info) -> Info:
        own = self._description = described(source)
        told = self._compare(order, own.params)
        known = self._plan is not None and order["known"] == self._number
        if not (known and self._plan is not None and self._plan.params == own.params and self._held == [own.share]):
            told["share"] = own.share.to_json()
        return told

    def _make_plan(self, order: Info) -> Info:
        own, group = self._own(), self._member.group()
        plan = plan_of(
            group, order["number"], own.params, deadline(self.timeout_s), bucket_bytes=self.bucket_bytes, own=own.share
        )
        self._plan, self._number, self._held = plan, order["number"], [own.share]
        return {} if plan.digest == order["digest"] else _rows(plan)

    def _send_own(self, order: Info) -> Info:
        group, own = self._member.group(), self._own()
        if self._plan is None:
            raise NotConnectedError("this trainer rank has made no plan")
        before = group.sent.total()
        outgoing = Outgoing(self._plan, self._trainer.rank, own.shards, group, self._pool)
        try:
            outgoing.send()
        except BaseException:
            group.sever()
            outgoing.drain()
            raise
        return {"sent": group.sent.total() - before}

    def _own(self) -> Description:
        if self._description is None:
            raise NotConnectedError("this trainer rank has not said what it holds")
        return self._description

    def dismiss(self, source: WeightSource, error: BaseException | None = None) -> None:
        self._description = None
        self._trainer.dismiss(error)

    # an update, on a worker

    def receive(self, info: Info, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        pairs = self._receiving(info, into)
        next(pairs)  # from here on the handoff is taken or refused, also by a loader that asks for nothing
        return pairs

    def _receiving(self, info: Info, into: Mapping[str, Tensor]) -> Iterator[Any]:
        """Yield None once the handoff has begun, and then its pairs."""
        group = self._member.group()
        incoming = self._incoming(group, info, into)
        name, told, before = None, False, group.received.total()
        try:
            yield None
            for name, tensor in incoming.pairs():
                yield name, tensor
            self._arrived(group, info, group.received.total() - before)
            told = True
        except WeightSyncError as error:
            raise handoffs.receiving_failed(group, info, error) from error
        except (GeneratorExit, Exception) as error:
            stopped = "it loaded nothing" if name is None else f"it stopped loading after {name!r}"
            self._drain(group, incoming, info, stopped if type(error) is GeneratorExit else why(error))
            told = True
            raise
        finally:
            if not told:
                group.sever()

    def _arrived(self, group: Group, info: Info, said: int | str) -> None:
        group.notes.put(f"arrived/{group.generation}/{info['handoff']}/{group.rank}", said)

    def decline(self, info: Info, error: BaseException) -> None:
        group = self._member.group()
        self._drain(group, self._incoming(group, info, {}), info, why(error))

    def _drain(self, group: Group, incoming: Incoming, info: Info, words: str) -> None:
        """Receive and drop the rest of a handoff, so that the group stays in step, and tell the trainer why."""
        if not group.alive:
            return
        try:
            incoming.drain()
            self._arrived(group, info, words)
        except WeightSyncError:
            group.sever()

    def _incoming(self, group: Group, info: Info, into: Mapping[str, Tensor]) -> Incoming:
        if info["group"] != group.generation:
            raise NotConnectedError(
                f"the trainer sends through group {info['group']}, this worker is in group {group.generation}",
                hint="connect again",
            )
        if info["params"] != self._rows:
            self._rows, self._params = info["params"], tuple(ParamMeta.from_json(row) for row in info["params"])
        params = self._params
        if self._plan is None or self._number != info["plan"] or self._plan.params != params:
            self._plan, self._number = self._plan_of(group, info, params), info["plan"]
        needed = [self._slices.get(meta.name, (Block.whole(meta.shape),)) for meta in params]
        workers = self._plan.workers
        trainers = [0, *range(1 + workers, workers + self._plan.ranks)]
        return Incoming(self._plan, group.rank - 1, needed, into, group, trainers, self._pool)

    def _plan_of(self, group: Group, info: Info, params: tuple[ParamMeta, ...]) -> TransferPlan:
        """Make the plan, and tell the trainer that it is the same, or what differs.

        Raises:
            ManifestError: it is another one.
        """
        key = f"plan/{group.generation}/{info['plan']}/{group.rank}"
        try:
            plan = plan_of(
                group,
                info["plan"],
                params,
                deadline(self.timeout_s),
                bucket_bytes=self.bucket_bytes,
                own=self._share,
            )
        except WeightSyncError as error:
            group.notes.put(key, {"error": why(error)})
            raise
        differs = plan.digest != info["digest"]
        group.notes.put(key, _rows(plan) if differs else {})
        if differs:
            raise ManifestError(
                "this worker makes another transfer plan than the trainer",
                state="nothing was moved; the engine stays paused with its old weights",
                hint="use one release of torchrl_ext on both ends",
            )
        return plan

    # without a control layer

    def send_weights(self, model_id: Any, weights: Any = None) -> None:
        if self._worker is None and self._trainer.rank:
            self.follow(as_source(model_id if weights is None else weights))
            return
        try:
            super().send_weights(model_id, weights)
        except ConcurrentUpdateError:
            raise  # other ranks take part in the send that runs
        except BaseException as error:
            if self._worker is None:
                self._trainer.dismiss(error)
            raise
        self._trainer.dismiss()

    def announce(self, info: Info) -> None:
        self._member.announcements().put(info)

    def poll(self, timeout_s: float) -> Info | None:
        if self._worker is None:
            raise TransportError("receive_weights was called on a trainer rank", expected="a worker: give worker=")
        return self._member.announcements().get(timeout_s)

    # both ends

    def abort(self) -> None:
        self._member.abort()

    def check_connection(self) -> bool:
        return self._member.connected

    def shutdown(self) -> None:
        self._member.close()

    @property
    def _trainer(self) -> TrainerRanks:
        if self._ranks is None:
            raise self._no_driver("a trainer's part")
        return self._ranks

    def _no_driver(self, what: str) -> TransportError:
        return TransportError(
            f"{what} was called on a worker"
            if self._worker is not None
            else f"{what} was called on another trainer rank",
            expected="trainer rank 0, which drives; the others call send_weights or update_weights",
            state="nothing was sent",
        )


def _rows(plan: TransferPlan) -> Info:
    return {"digest": plan.digest, "rows": plan.rows_digest().tolist()}


def _other_plan(who: str, plan: TransferPlan, said: Mapping[str, Any]) -> ManifestError:
    """Return the error that names the first row in which another member's plan differs from this one."""
    own, theirs = list(plan.rows_digest()), list(said.get("rows", ()))
    place = next((at for at, row in enumerate(own) if theirs[at : at + 1] != [row]), None)
    where = said.get("error") or (
        "its rounds differ"
        if place is None
        else f"the first difference is in {plan.params[place].name!r}: {plan.row(place)}"
    )
    return ManifestError(
        f"{who} has not made the same transfer plan as trainer rank 0: {where}",
        state="nothing was moved; engines hold their old weights",
        hint="use one release of torchrl_ext on every rank and engine",
    )
