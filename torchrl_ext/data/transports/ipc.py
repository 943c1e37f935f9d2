"""`IPCTransport` carries weights through memory that a trainer shares with engines on its machine.

The ends form a group over gloo at 127.0.0.1, as for a broadcast; only the bytes of tensors lie in a staging buffer, of
which a handoff has the handles. At a barrier of the group a bucket is filled, and the one before it copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, ClassVar, final

import msgspec
import torch
from torch import Tensor

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.devices import usable_device
from torchrl_ext.base.errors import ConfigError
from torchrl_ext.base.types import ParamMeta, decoded
from torchrl_ext.data.group.buckets import Bucket, Lander, Packer, layout
from torchrl_ext.data.group.group import Group, GroupLoad, GroupWorker, Member
from torchrl_ext.data.group.memory import HOST, SEGMENT_BYTES, Handle, SharedSegment, create, local_devices
from torchrl_ext.data.transports.base import Arrival, Handoff, Update, Worker
from torchrl_ext.data.transports.collective import VLLMCollectiveTransport, handoff_of

__all__ = ["IPCTransport"]

_SMALLEST_BYTES = 2048
_HOST_BYTES, _DEVICE_BYTES = 16 << 20, 512 << 20
_MOST_BUCKETS = 1 << 20


class IPCLoad(GroupLoad, frozen=True, kw_only=True):
    """One handoff.

    Attributes:
        segments: the handle of the staging buffer on each device; one at least.
    """

    segments: Annotated[dict[str, Handle], msgspec.Meta(min_length=1)]


@final
class IPCWorker(GroupWorker):
    """Copies buckets out of the trainer's staging buffer."""

    load: ClassVar[type[IPCLoad]] = IPCLoad

    def __init__(self, member: Member, here: Worker) -> None:
        super().__init__(member, here)
        self._devices = local_devices()

    @classmethod
    def about(cls, here: Worker) -> list[str]:
        """Return the devices from which this process can take weights, best first."""
        return local_devices()

    def incoming(self, group: Group, load: IPCLoad, arrival: Arrival, into: Mapping[str, Tensor]) -> _Staged:
        segment = load.segments[next((one for one in self._devices if one in load.segments), HOST)].attach()
        return _Staged(group, arrival.params, into, segment)


@final
class _Staged:
    """Receives the pairs of one handoff.

    Args:
        group: of the trainer and all workers.
        params: what arrives.
        into: tensors that are filled directly.
        segment: the staging buffer, as it is mapped here for as long as this object lives.

    Raises:
        ConfigError: it would take too many buckets.
    """

    def __init__(
        self, group: Group, params: tuple[ParamMeta, ...], into: Mapping[str, Tensor], segment: SharedSegment
    ) -> None:
        self._group, self._segment = group, segment
        self._buckets = _buckets(params, segment.capacity)
        self._lander = Lander(params, into, segment.flat.device)

    def pairs(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the pairs in order.

        Raises:
            TransportError, DeadlineError: as `Group.wait`.
        """
        group, segment = self._group, self._segment
        try:
            filled = group.barrier()
            for number, bucket in enumerate(self._buckets):
                group.wait(filled)
                pairs = self._lander.take(bucket, segment.half(number))
                segment.settle()
                if number + 1 < len(self._buckets):
                    filled = group.barrier()  # and this bucket was taken
                yield from pairs
        except BaseException:  # which refers to this frame, and so to the memory
            segment.close()
            raise


class IPCTransport(VLLMCollectiveTransport):
    """Hands weights to workers on the same machine through shared memory (CPU) or CUDA IPC (GPU).

    One staging buffer has two halves: while workers copy one half into their parameters, the trainer fills the other.
    On a CPU the buffer is anonymous shared memory, on a GPU an allocation that both open; every worker, of however many
    engines, maps the same one. Neither has a name that could outlive its processes. The trainer owns the buffer until
    `shutdown`; workers map it only while they receive.

    Args:
        master_port: port of the trainer's store, at 127.0.0.1; 0 picks a free one, which a control layer passes on.
        rank, world_size, secret: as in `VLLMCollectiveTransport`.
        device: ``"cpu"`` stages on the host even if there are GPUs; by default the trainer stages on the first GPU of a
            worker that both see, or else on the host.
        bucket_bytes: size of the staging buffer, both halves, in bytes; by default 16 MiB on the host, where it fits in
            the processor's caches, and 512 MiB on a GPU. With several GPUs each has a buffer of this size.
        timeout_s: deadline of every wait, in seconds.

    Raises:
        ConfigError: the settings are invalid.

    Example:
        >>> sender = tx.WeightSender(tx.IPCTransport(), tx.connect(address))  # an engine of this machine
        >>> sender.register_model(lm)
        >>> sender.update_weights().verified
        True
        >>> sender.shutdown()
    """

    name: ClassVar[str] = "ipc"
    worker: ClassVar[type[GroupWorker]] = IPCWorker

    def __init__(
        self,
        master_port: int = 0,
        rank: int | None = 0,
        world_size: int | None = None,
        device: torch.device | str | None = None,
        *,
        bucket_bytes: int | None = None,
        secret: str = "",
        timeout_s: float = 60.0,
    ) -> None:
        if bucket_bytes is not None and bucket_bytes < _SMALLEST_BYTES:
            raise ConfigError(f"bucket_bytes={bucket_bytes}", expected=f"{_SMALLEST_BYTES} or more")
        where = ("127.0.0.1", master_port, rank, world_size, "cpu")
        super().__init__(*where, backend="gloo", bucket_bytes=bucket_bytes or 0, secret=secret, timeout_s=timeout_s)
        self._on_host = device is not None and usable_device(device).type == "cpu"
        self._segments = dict[str, SharedSegment]()

    def prepare(self, update: Update, within: Deadline) -> Handoff:
        """As `Transport.prepare`.

        Raises:
            ConfigError: the staging buffer is too small for the model.
            TransportError: there is no memory for the staging buffer.
        """
        self._require_trainer("send_weights")
        group = self.member.group(within)
        segments = self._staging(group)
        buckets = _buckets(update.params, next(iter(segments.values())).capacity)
        self._handoffs += 1
        handles = {device: segment.handle for device, segment in segments.items()}
        load = IPCLoad(handoff=self._handoffs, segments=handles)
        return handoff_of(group, load, update, partial(_fill, group, buckets, [*segments.values()]))

    def _staging(self, group: Group) -> dict[str, SharedSegment]:
        """Return the staging buffer on the first device of each worker that this process can use, too."""
        own = [HOST] if self._on_host else local_devices()
        nbytes = self.bucket_bytes or (_HOST_BYTES if own == [HOST] else _DEVICE_BYTES)
        nbytes = nbytes // SEGMENT_BYTES * SEGMENT_BYTES  # on every device, so that there is one layout
        found = dict[str, SharedSegment]()
        for rank in group.workers:
            devices = decoded(group.about[rank], list[str], f"what {group.call([rank])} says of its devices")
            device = next((device for device in devices if device in own), HOST)
            if device not in self._segments:
                self._segments[device] = create(device, nbytes)
            found[device] = self._segments[device]
        return found

    def shutdown(self) -> None:
        super().shutdown()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()


def _fill(group: Group, buckets: Sequence[Bucket], segments: Sequence[SharedSegment], packer: Packer) -> None:
    """Fill one bucket after the other; a barrier later every worker has copied it."""
    for number, bucket in enumerate(buckets):
        packer.fill(bucket, [segment.half(number) for segment in segments])
        for segment in segments:
            segment.settle()
        group.wait(group.barrier())
    packer.finish()


def _buckets(params: tuple[ParamMeta, ...], capacity: int) -> tuple[Bucket, ...]:
    """Return the buckets of ``capacity`` bytes in which ``params`` travel: one at least.

    Raises:
        ConfigError: there would be so many that it takes too long, and too much memory, to lay them out.
    """
    needed = -(-sum(meta.nbytes for meta in params) // capacity)
    if needed > _MOST_BUCKETS:
        raise ConfigError(
            f"a handoff takes {needed:,} buckets of {capacity:,} bytes",
            expected=f"{_MOST_BUCKETS:,} or fewer",
            state="nothing was sent",
            hint="give IPCTransport a larger bucket_bytes",
        )
    return layout(params, capacity) or (Bucket((), 0),)
