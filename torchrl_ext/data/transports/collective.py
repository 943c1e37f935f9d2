"""`VLLMCollectiveTransport` broadcasts weights from the trainer to every worker, over NCCL or gloo.

Several broadcasts are in flight, so that packing, sending and unpacking overlap.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import ConfigError, DeadlineError, TransportError, why
from torchrl_ext.base.types import Count, Info, ParamMeta
from torchrl_ext.data.group.backends import carrier_of, choose_backend
from torchrl_ext.data.group.buckets import Bucket, BufferPool, Lander, Packer, layout
from torchrl_ext.data.group.carrier import Sizes
from torchrl_ext.data.group.group import Group, GroupLoad, GroupOffer, GroupWorker, Member
from torchrl_ext.data.transports.base import Arrival, Handoff, TransferStats, Update, Worker
from torchrl_ext.data.transports.standalone import StandaloneTransport
from torchrl_ext.data.weights.source import checked

__all__ = [
    "CollectiveWorker",
    "Incoming",
    "VLLMCollectiveTransport",
    "buckets_of",
    "handoff_of",
    "send_buckets",
]

_SPARE = 8
"""An eighth of a bucket stays free: two in flight, with the lists that go along, then take less than two buckets."""

_PACKED = 2
"""Filled buckets in flight, in sizes of a bucket: a send holds no more memory of its own. Small ones between large
tensors may be more."""

_FLYING = 16
_FLYING_BUCKETS = 8
"""Buckets in flight, and their bytes in sizes of a bucket (or two tensors, if they are larger): what travels as it lies
in memory costs none, unless the source makes its tensors on the way (a gather, a cast)."""


def buckets_of(params: tuple[ParamMeta, ...], bucket_bytes: int, sizes: Sizes) -> tuple[Bucket, ...]:
    """Return the buckets in which ``params`` are broadcast; a ``bucket_bytes`` of 0 gives each tensor its own."""
    capacity = bucket_bytes - bucket_bytes // _SPARE
    return layout(params, capacity, min(sizes.direct_bytes, capacity) or 1)


class _Window:
    """The broadcasts in flight, of which there is a limit, and the memory of packed buckets.

    Args:
        broadcasts: what they run on.
        buckets: all that will be broadcast.
        bucket_bytes: size of a bucket; 0 lets nothing overlap.
        sliced: whether large buckets take several broadcasts, as the carrier likes it.

    Attributes:
        flying: buckets that were started and did not land yet, with their works and bytes, oldest first.
    """

    def __init__(self, broadcasts: Group, buckets: Sequence[Bucket], bucket_bytes: int, sliced: bool) -> None:
        self._broadcasts, self._pool = broadcasts, BufferPool(broadcasts.device)
        self._slice_bytes = broadcasts.carrier.sizes.slice_bytes if sliced else None
        self.flying: deque[tuple[Bucket, list[Any], Tensor]] = deque()
        self._limit, self._limit_bytes = (_FLYING, _FLYING_BUCKETS * bucket_bytes) if bucket_bytes else (0, 0)
        self._bytes = self._packed = 0
        self._largest = max((bucket.nbytes for bucket in buckets if not bucket.direct), default=0)
        capacity = bucket_bytes - bucket_bytes // _SPARE
        self._most_packed = max(_PACKED, _PACKED * capacity // max(1, self._largest))

    def admits(self, bucket: Bucket) -> bool:
        """Return whether ``bucket`` may start before the oldest one has landed."""
        flying = len(self.flying)
        if flying > self._limit or (flying > 2 and self._bytes > self._limit_bytes):
            return False
        return bucket.direct or self._packed < self._most_packed

    def buffer(self, bucket: Bucket) -> Tensor:
        """Return memory for ``bucket``; packed ones all get one size, so that memory is used again after landing."""
        return self._pool.take(bucket.nbytes if bucket.direct else self._largest)[: bucket.nbytes]

    def start(self, bucket: Bucket, flat: Tensor) -> None:
        """Begin to broadcast ``flat``, the bytes of ``bucket``."""
        works = []
        for part in flat.split(self._slice_bytes or bucket.nbytes) if bucket.nbytes else ():
            works.append(self._broadcasts.broadcast(part))
        self.flying.append((bucket, works, flat))
        self._bytes += bucket.nbytes
        self._packed += not bucket.direct

    def land(self) -> tuple[Bucket, Tensor]:
        """Wait for the oldest bucket, and return it with its bytes.

        Raises:
            TransportError, DeadlineError: as `Group.wait`.
        """
        bucket, works, flat = self.flying[0]
        for work in works:
            self._broadcasts.wait(work)
        self.flying.popleft()
        self._bytes -= bucket.nbytes
        self._packed -= not bucket.direct
        return bucket, flat


def send_buckets(
    broadcasts: Group, buckets: Sequence[Bucket], packer: Packer, *, bucket_bytes: int, sliced: bool = True
) -> None:
    """Broadcast everything that ``packer`` packs (trainer end).

    Raises:
        TransportError, DeadlineError: as `Group.wait`.
        ManifestError: the source is not what was declared.
    """
    window = _Window(broadcasts, buckets, bucket_bytes, sliced)
    for bucket in buckets:
        while not window.admits(bucket):
            window.land()
        if bucket.direct:
            flat = packer.direct(broadcasts.device)
        else:
            flat = window.buffer(bucket)
            packer.fill(bucket, [flat])
        window.start(bucket, flat)
        del flat
    packer.finish()
    while window.flying:
        window.land()


class Incoming:
    """Receives the pairs of one handoff (worker end).

    Args:
        broadcasts: what they arrive on.
        buckets: layout of ``params``.
        params: what arrives.
        into: tensors that may be filled directly.
        bucket_bytes, sliced: of the sender.
    """

    def __init__(
        self,
        broadcasts: Group,
        buckets: Sequence[Bucket],
        params: Sequence[ParamMeta],
        into: Mapping[str, Tensor],
        *,
        bucket_bytes: int,
        sliced: bool = True,
    ) -> None:
        self._rest = deque(buckets)  # that were not started yet
        self._window = _Window(broadcasts, buckets, bucket_bytes, sliced)
        self._lander = Lander(params, into, broadcasts.device)

    def pairs(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the pairs in order.

        Raises:
            TransportError, DeadlineError: as `Group.wait`.
        """
        rest, window = self._rest, self._window
        while rest or window.flying:
            while rest and window.admits(rest[0]):
                window.start(bucket := rest.popleft(), self._memory(bucket))
            bucket, flat = window.land()
            if bucket.direct:
                yield self._lander.end(bucket.spans[0].first)
            else:
                yield from self._lander.take(bucket, flat, lasting=True)
            del flat  # so that its memory can be used for the next bucket

    def _memory(self, bucket: Bucket) -> Tensor:
        return self._lander.begin(bucket.spans[0].first) if bucket.direct else self._window.buffer(bucket)


class CollectiveLoad(GroupLoad, frozen=True, kw_only=True):
    """One handoff.

    Attributes:
        bucket_bytes: size of its buckets.
    """

    bucket_bytes: Count


@final
class CollectiveWorker(GroupWorker):
    """Receives the trainer's broadcasts in a group."""

    load: ClassVar[type[CollectiveLoad]] = CollectiveLoad

    def incoming(self, group: Group, load: CollectiveLoad, arrival: Arrival, into: Mapping[str, Tensor]) -> Incoming:
        buckets = buckets_of(arrival.params, load.bucket_bytes, group.carrier.sizes)
        return Incoming(group, buckets, arrival.params, into, bucket_bytes=load.bucket_bytes)


class VLLMCollectiveTransport(StandaloneTransport):
    """Broadcasts weights from the trainer (rank 0) to the workers (ranks 1 and up), by NCCL on GPUs or gloo on CPUs.

    This is only the data layer; the caller pauses and resumes engines.

    Args:
        master_address: the trainer's address, as workers reach it.
        master_port: port of the trainer's store; 0 picks a free one, which a control layer passes on.
        rank: rank of this process; 0 (or None) is the trainer.
        world_size: 1 + number of workers; None takes it from `open`.
        device: device of the tensors that are sent and received; by default this thread's accelerator, or the CPU
            without one.
        vllm_engine: the engines that receive. The transport itself never calls them; a `TransportWeightUpdater` over it
            drives them, and a `WeightSender` takes them as an argument.
        backend: ``"nccl"`` or ``"gloo"``, which copies through the host; by default that of the device.
        bucket_bytes: size of a bucket for small tensors; 0 sends one tensor at a time; None takes 8 MiB over gloo, and
            256 MiB between devices.
        secret: without a control layer, a secret that only the ranks know; with "", anyone who finds the port can join.
            A control layer passes on a secret that the trainer creates.
        timeout_s: deadline of every wait, in seconds.

    Raises:
        ConfigError: the settings are invalid.

    Example:
        >>> from threading import Thread
        >>> trainer, worker = (tx.VLLMCollectiveTransport("127.0.0.1", port, rank, 2) for rank in (0, 1))
        >>> shapes = {"weight": (torch.float32, (2, 4)), "bias": (torch.float32, (2,))}
        >>> beside = Thread(target=lambda: (trainer.init_all_workers_group(shapes), trainer.send_weights(policy)))
        >>> beside.start()
        >>> worker.init_all_workers_group(shapes)
        >>> received = worker.receive_weights(timeout=30.0)
        >>> beside.join()
        >>> bool((received["weight"] == policy.weight).all())
        True
    """

    name: ClassVar[str] = "collective"
    worker: ClassVar[type[GroupWorker]] = CollectiveWorker
    """The class of a worker's end."""

    def __init__(
        self,
        master_address: str = "127.0.0.1",
        master_port: int = 0,
        rank: int | None = 0,
        world_size: int | None = None,
        device: torch.device | str | int | None = None,
        vllm_engine: Any | None = None,
        *,
        backend: str | None = None,
        bucket_bytes: int | None = None,
        secret: str = "",
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        self.master_port = int(master_port)
        self.rank, self.world_size = rank or 0, world_size
        self.device, self.backend = choose_backend(device, backend)
        if bucket_bytes is None:
            bucket_bytes = carrier_of(self.backend).sizes.bucket_bytes
        self.bucket_bytes, self.vllm_engine = bucket_bytes, vllm_engine
        if bucket_bytes < 0 or not timeout_s > 0 or not 0 <= self.master_port < 1 << 16:
            raise ConfigError(
                f"bucket_bytes={bucket_bytes}, timeout_s={timeout_s}, master_port={master_port}",
                expected="0 or more; more than 0; 0 to 65535",
            )
        if world_size is not None and not 0 <= self.rank < world_size:
            raise ConfigError(f"rank {self.rank} does not exist in world_size {world_size}")
        where = (master_address, self.master_port, secret)
        self.member = Member(*where, device=self.device, backend=self.backend, timeout_s=timeout_s)
        self.master_address = self.member.address
        self._handoffs = 0

    # forming the group

    def init_all_workers_group(self, model_metadata: Mapping[str, tuple[Any, Any]]) -> None:
        """Form the group without a control layer; every rank calls this at the same time.

        Args:
            model_metadata: ``{name: (dtype, shape)}``, the same on every rank; empty to agree on nothing.

        Raises:
            DeadlineError: ranks, which the message names, did not arrive within `timeout_s`.
            ConfigError: ranks have different world sizes.
            ManifestError: ranks disagree on a parameter, which the message names.
        """
        params = tuple(ParamMeta(name, dtype, tuple(shape)) for name, (dtype, shape) in model_metadata.items())
        within = self._within = Deadline(self.timeout_s, "the other ranks")
        if self.rank == 0:
            self._open(self._standalone_size(), params, private=False).transfer(within)
        elif self.master_port == 0:
            raise ConfigError(
                f"rank {self.rank} does not know the trainer's port", hint="give the trainer and every worker one port"
            )
        else:
            about = self.worker.about(Worker(rank=self.rank, params=params))
            self.member.enter(self.rank, self.world_size, params, within, about=about, again=True)

    def open(self, workers: int, params: tuple[ParamMeta, ...], within: Deadline) -> Handoff:
        """See `Transport.open`; 0 workers (no control layer) means those that call `init_all_workers_group`.

        Raises:
            ConfigError: the world size given at construction is another one.
            TransportError: this is not rank 0, or the port is taken.
        """
        self._require_trainer("open")
        if workers == 0:
            return Handoff() if self.check_connection() else self._open(self._standalone_size(), params, private=False)
        if self.world_size not in (None, 1 + workers):
            raise ConfigError(
                f"this transport was given world_size {self.world_size}, but the engines have {workers} workers",
                expected=f"world_size {1 + workers} (1 + workers), or None to take it from the engines",
            )
        return self._open(1 + workers, params, private=True)

    def _open(self, size: int, params: tuple[ParamMeta, ...], *, private: bool) -> Handoff:
        offer = self.member.open(size, private=private)

        def transfer(within: Deadline) -> None:
            self.member.host(size, params, within)

        return Handoff(info=offer.to_json(), transfer=transfer)

    def _standalone_size(self) -> int:
        if self.world_size is None:
            raise ConfigError(
                "the number of workers is not known",
                hint="give world_size=, or connect through an engine client",
            )
        return self.world_size

    @classmethod
    def join(cls, info: Info, here: Worker, within: Deadline) -> GroupWorker:
        """As `Transport.join`.

        Raises:
            DeadlineError: ranks, which the message names, did not arrive.
            ConfigError: the rank does not exist in this world size.
        """
        offer = GroupOffer.from_json(info, f"the offer of a {cls.name} transport")
        if not 0 < here.rank < offer.members:
            raise ConfigError(
                f"worker rank {here.rank} does not exist in world_size {offer.members}",
                hint="give each engine the rank offset 1 + workers of the engines before it",
            )
        member = offer.member()
        member.enter(here.rank, offer.members, (), within, about=cls.worker.about(here))
        return cls.worker(member, here)

    # an update

    def prepare(self, update: Update, within: Deadline) -> Handoff:
        self._require_trainer("send_weights")
        group, params = self.member.group(within), update.params
        self._handoffs += 1
        load = CollectiveLoad(handoff=self._handoffs, bucket_bytes=self.bucket_bytes)
        buckets = buckets_of(params, self.bucket_bytes, group.carrier.sizes)
        send = partial(send_buckets, group, buckets, bucket_bytes=self.bucket_bytes)
        return handoff_of(group, load, update, send)

    def attend(self, within: Deadline) -> GroupWorker:
        if self.rank == 0:
            raise TransportError(
                "receive_weights was called on rank 0, the trainer", expected="a worker, rank 1 to world_size - 1"
            )
        self.member.group(within)
        return self.worker(self.member, Worker(rank=self.rank))

    def announce(self, arrival: Arrival, within: Deadline) -> None:
        self.member.group(within).announce(arrival)

    def check_connection(self) -> bool:
        return self.member.connected

    def close(self) -> None:
        self.member.close()

    def _require_trainer(self, what: str) -> None:
        if self.rank != 0:
            raise TransportError(
                f"{what} was called on rank {self.rank}",
                expected="rank 0, the trainer; other ranks receive",
                state="nothing was sent",
            )


def handoff_of(group: Group, load: GroupLoad, update: Update, send: Callable[[Packer], None]) -> Handoff:
    """Return the handoff of a version that rank 0 sends to all others.

    Args:
        group: of all ranks.
        load: what workers need to receive the version.
        update: the version.
        send: sends what it takes out of the packer.
    """
    stats = TransferStats()

    def transfer(within: Deadline) -> None:
        began, group.stop = time.perf_counter(), within.stop
        try:
            send(Packer(update.params, checked(update.source, update.params)))
            group.await_workers(load.handoff)
        except (TransportError, DeadlineError) as error:
            raise group.sending_failed(load.handoff, update.version, error) from error
        except BaseException as error:
            group.sever(why(error))
            raise
        stats.spans.since("transfer", began)

    return Handoff(info=load.to_json(), transfer=transfer, stats=stats)
