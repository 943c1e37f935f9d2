"""`NativeTransport` sends full weights to engines that run nothing of ours, on the wires that they have themselves.

The control layer says `Offer` and `Load` to engines in their own words. A worker end of ours receives in an engine
that has our plugin, in a fleet of which some have not, or without any control layer.

Both wires carry the bytes of tensors one after the other, without padding, and take a tensor out by a view of its
dtype. So none may begin where its element size does not divide its place.

* SGLang (``load_format="flattened_bucket"`` of ``/update_weights_from_distributed``, `sglang.srt.weight_sync`): one
  call, one broadcast. We end a bucket before the tensor that does not fit, or would not be aligned.
* vLLM (backend ``nccl`` with ``packed``, `vllm.distributed.weight_transfer.packed_tensor`): a call has any number of
  broadcasts, each of which ends with the tensor that makes it larger than the size agreed on. We end a call, too,
  before a tensor that would not be aligned, since every call begins a new broadcast.

The port has no secret, since stock engines send none: whoever reaches it while a group is formed can take a rank.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, DeadlineError, NotConnectedError, TransportError, WeightSyncError
from torchrl_ext.transports.base import Arrival, Handoff, TransferStats, Update, Worker, WorkerEnd
from torchrl_ext.transports.buckets import Bucket, Packer, Span
from torchrl_ext.transports.collective.stream import Incoming, send_buckets
from torchrl_ext.transports.group.backends import choose_backend
from torchrl_ext.transports.native.meeting import NAME, Group, Meeting
from torchrl_ext.transports.standalone import StandaloneTransport
from torchrl_ext.types import Info, ParamMeta, Wire
from torchrl_ext.weights.source import checked

__all__ = ["NativeTransport"]


Make = Literal["sglang", "vllm"]
MAKES: tuple[Make, ...] = get_args(Make)
"""Engines whose wires are known."""


class Offer(Wire, frozen=True):
    """Where workers of one make meet the trainer, and how large a broadcast may become, in bytes."""

    make: Make
    group: Group
    bucket_bytes: int


class Load(Wire, frozen=True):
    """How the parameters of a version travel: the arguments of `layout_of`, and the calls that it returns."""

    make: Make
    bucket_bytes: int
    calls: list[tuple[int, int]]


def layout_of(
    params: Sequence[ParamMeta], make: str, bucket_bytes: int
) -> tuple[tuple[Bucket, ...], list[tuple[int, int]]]:
    """Return how ``params`` travel; a function of its arguments only, so that two processes agree.

    Args:
        params: what travels, in this order. One without elements has no bytes, and belongs in no call's body.
        make: ``"sglang"`` or ``"vllm"``.
        bucket_bytes: size of a broadcast; a larger tensor travels alone to SGLang, and ends a broadcast to vLLM.

    Returns:
        The buckets, one broadcast each, but for those without bytes; and the parameters that each call names, as
        ``(first, stop)``: ``first <= index < stop``.
    """
    buckets: list[Bucket] = []
    calls: list[tuple[int, int]] = []
    spans: list[Span] = []
    filled = 0

    def close(stop: int, *, call: bool) -> None:
        nonlocal spans, filled
        if spans:
            alone = spans[0].stop - spans[0].first == 1 == len(spans)
            buckets.append(Bucket(tuple(spans), filled, direct=alone and filled > 0))
        spans, filled = [], 0
        first = calls[-1][1] if calls else 0
        if call and first < stop:
            calls.append((first, stop))

    for index, meta in enumerate(params):
        askew = bool(filled % meta.dtype.itemsize)
        if askew or (make == "sglang" and filled and filled + meta.nbytes > bucket_bytes):
            close(index, call=True)
        before = spans[-1] if spans else None
        if before and params[before.first].dtype is meta.dtype:
            spans[-1] = replace(before, stop=index + 1, end=before.end + meta.nbytes)
        else:
            spans.append(Span(index, index + 1, 0, meta.nbytes, filled))
        filled += meta.nbytes
        if make == "vllm" and filled > bucket_bytes:
            close(index + 1, call=False)
    close(len(params), call=True)
    return tuple(buckets), calls


class NativeTransport(StandaloneTransport):
    """Broadcasts full versions from the trainer (rank 0) to workers of stock engines (ranks 1 and up), all of one make.

    Args:
        make: whose wire it is: ``"sglang"`` or ``"vllm"``.
        master_address: where workers reach the trainer.
        master_port: of the trainer's store; 0 picks a free port (with a control layer, which passes it on).
        rank: of this process; 0 is the trainer. others are workers without a control layer.
        world_size: 1 + number of workers; None takes it from `open`.
        device: where tensors travel from and to; by default the current CUDA device, or the CPU without one.
        backend: ``"nccl"`` or ``"gloo"``; by default nccl on CUDA and gloo on CPU. Stock vLLM speaks only NCCL.
        bucket_bytes: size of a broadcast; an engine holds one or two at a time.
        timeout_s: deadline of every wait, in seconds. Engines have deadlines of their own, up to half an hour.

    Raises:
        ConfigError: settings that cannot work.
    """

    name: ClassVar[str] = "native"

    def __init__(
        self,
        make: str = "sglang",
        master_address: str = "127.0.0.1",
        master_port: int = 0,
        rank: int = 0,
        world_size: int | None = None,
        device: torch.device | str | int | None = None,
        *,
        backend: str | None = None,
        bucket_bytes: int = 256 << 20,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        if make not in MAKES:
            raise ConfigError(f"no wire of {make!r} is known", expected=" or ".join(map(repr, MAKES)))
        self.make: Make = make
        self.master_address, self.master_port = master_address, int(master_port)
        self.rank, self.world_size, self.bucket_bytes = rank, world_size, bucket_bytes
        self.device, self.backend = choose_backend(device, backend)
        if make == "vllm" and backend is None and self.backend != "nccl":
            raise ConfigError(
                "stock vLLM takes broadcasts only by NCCL, and this process uses no CUDA device",
                expected="a CUDA device, for a trainer that stock vLLM follows",
                hint="use transport 'disk', or install our plugin in the engines; backend='gloo' is for tests",
            )
        if bucket_bytes < 1 or not timeout_s > 0 or not 0 <= self.master_port < 1 << 16:
            given = f"bucket_bytes={bucket_bytes}, timeout_s={timeout_s}, master_port={master_port}"
            raise ConfigError(given, expected="1 or more; more than 0; 0 to 65535")
        if world_size is not None and not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} does not exist in world_size {world_size}")
        self._meeting: Meeting | None = None  # of rank 0
        self._groups = 0

    # the trainer's end

    def open(self, workers: int, params: tuple[ParamMeta, ...], within: Deadline) -> Handoff:
        """As `Transport.open`; a new group at a new store, and the last one ends.

        Raises:
            ConfigError: the world size given at construction is another one.
            TransportError: the port is taken.
        """
        if workers == 0:
            self._met()  # by workers that called init_all_workers_group
            return Handoff()
        if self.world_size not in (None, 1 + workers):
            what = f"this transport was given world_size {self.world_size}, but the engines have {workers} workers"
            raise ConfigError(what, expected=f"world_size {1 + workers}, or None to take it from the engines")
        self._leave()
        self._groups += 1
        name = f"{NAME}-{self._groups}" if self.make == "sglang" else NAME  # it may still hold the last one by its name
        group = self._group_of(1 + workers, name)
        meeting = self._meeting = Meeting(self.make, group, self.rank, device=self.device, within=within)
        offer = Offer(make=self.make, group=meeting.invite(within), bucket_bytes=self.bucket_bytes)
        return Handoff(info=offer.to_json(), transfer=lambda within: meeting.form(within.again()))

    def _group_of(self, size: int, name: str) -> Group:
        return Group(
            master_address=self.master_address,
            master_port=self.master_port,
            world_size=size,
            group_name=name,
            backend=self.backend,
        )

    def _met(self) -> Meeting:
        if self._meeting is None:
            raise NotConnectedError(f"rank {self.rank} is the trainer of no group", hint="connect first, from rank 0")
        return self._meeting

    def _leave(self) -> None:
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.close()

    def prepare(self, update: Update, within: Deadline) -> Handoff:
        source, params, stats = update.source, update.params, TransferStats()
        buckets, calls = layout_of(params, self.make, self.bucket_bytes)

        def transfer(within: Deadline) -> None:
            began = time.perf_counter()
            try:
                packer = Packer(params, checked(source, params))
                group = self._met().broadcasts(within)
                send_buckets(group, buckets, packer, bucket_bytes=self.bucket_bytes, slice_bytes=None)
            except BaseException as error:
                self._leave()  # frees the workers that wait for the rest
                if not isinstance(error, (TransportError, DeadlineError)):
                    raise
                raise type(error)(
                    f"version {update.version} was not sent to every engine: {error.what}",
                    state="the group is ended; engines may hold a part of this version",
                    hint="look at the engines' logs, and call update_weights again",
                ) from error
            stats.spans["transfer"] = time.perf_counter() - began

        load = Load(make=self.make, bucket_bytes=self.bucket_bytes, calls=calls)
        return Handoff(info=load.to_json(), transfer=transfer, stats=stats)

    def check_connection(self) -> bool:
        if self._end is not None:
            return self._end.check_connection()
        return self._meeting is not None and self._meeting.check_connection()

    def shutdown(self) -> None:
        super().shutdown()
        self._leave()

    # without a control layer

    def init_all_workers_group(self, model_metadata: Mapping[str, tuple[Any, Any]]) -> None:
        """Form the group without a control layer; every rank calls this at the same time.

        Args:
            model_metadata: not used: ranks agree on nothing but who they are.

        Raises:
            DeadlineError: not every rank arrived within `timeout_s`.
        """
        if self.world_size is None or self.master_port == 0:
            what = "without a control layer every rank needs to know the trainer's port and the number of ranks"
            raise ConfigError(what, expected="master_port and world_size")
        self.shutdown()
        within = self._within = Deadline(self.timeout_s, "the ranks of a group")
        kind = NativeWorker if self.rank else Meeting
        meeting = kind(self.make, self._group_of(self.world_size, NAME), self.rank, device=self.device, within=within)
        if isinstance(meeting, NativeWorker):
            self._end = meeting
        else:
            self._meeting = meeting
            meeting.invite(within)  # begins what has to begin before the others join
        meeting.form(within)

    @property
    def mailbox(self) -> Meeting:
        return self._end if isinstance(self._end, NativeWorker) else self._met()

    def attend(self, within: Deadline) -> NativeWorker:
        raise NotConnectedError(f"rank {self.rank} is a worker of no group", hint="connect first, from rank 1 on")

    @classmethod
    def join(cls, info: Info, here: Worker, within: Deadline) -> NativeWorker:
        """As `Transport.join`.

        Raises:
            DeadlineError: the trainer, or another rank, was not there in time.
        """
        offer = Offer.from_json(info, "the offer of a native transport")
        group = offer.group
        if not 0 < here.rank < group.world_size:
            raise ConfigError(f"worker rank {here.rank} does not exist in world_size {group.world_size}")
        device, _ = choose_backend(None, group.backend)
        worker = NativeWorker(offer.make, group, here.rank, device=device, within=within)
        worker.form(within.again())
        return worker


class NativeWorker(Meeting, WorkerEnd):
    """Receives the broadcasts of a group that was formed."""

    def receive(self, arrival: Arrival, into: Mapping[str, Tensor], within: Deadline) -> Iterator[tuple[str, Tensor]]:
        pairs = self._receiving(arrival, into, within)
        next(pairs)  # from here on the version is taken or drained, also by a loader that asks for nothing
        return pairs

    def _receiving(self, arrival: Arrival, into: Mapping[str, Tensor], within: Deadline) -> Iterator[Any]:
        """Yield None once the version has begun, and then its pairs."""
        incoming, whole = self._incoming(arrival, into, within), False
        try:
            yield None
            yield from incoming.pairs()
            whole = True
        except WeightSyncError as error:
            self.close()
            raise type(error)(
                f"version {arrival.version} did not arrive: {error.what}",
                state="a part of it may be in the model",
                hint="connect again, and send the next version",
            ) from error
        finally:
            if not whole and self.check_connection():
                self._drain(incoming)

    def _incoming(self, arrival: Arrival, into: Mapping[str, Tensor], within: Deadline) -> Incoming:
        load = Load.from_json(arrival.info, "the handoff of a native transport")
        buckets, _ = layout_of(arrival.params, load.make, load.bucket_bytes)
        how: dict[str, Any] = {"bucket_bytes": load.bucket_bytes, "slice_bytes": None}
        return Incoming(self.broadcasts(within), buckets, arrival.params, into, **how)

    def _drain(self, incoming: Incoming) -> None:
        """Receive and drop the rest of a version, so that the group stays in step."""
        try:
            incoming.drain()
        except WeightSyncError:
            self.close()

    def refuse(self, arrival: Arrival, error: BaseException) -> None:
        self._drain(self._incoming(arrival, {}, Deadline(self._within.timeout_s, "the trainer")))
