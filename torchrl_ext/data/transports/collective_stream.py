"""The two ends of a stream of broadcasts, with several in flight so that packing, sending and unpacking overlap."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.group.process_group import Group
from torchrl_ext.data.transports.buckets import Bucket, Lander, Packer, layout
from torchrl_ext.data.transports.copies import BufferPool

__all__ = ["BUCKET_BYTES", "DIRECT_BYTES", "SLICE_BYTES", "Incoming", "buckets_of", "send_buckets"]

BUCKET_BYTES = 8 << 20
"""Default size of a bucket, in bytes."""

DIRECT_BYTES = 1 << 20
"""From this size on a copy into a bucket costs more than a broadcast of its own (measured with gloo)."""

_SPARE = 8
"""An eighth of a bucket stays free: two in flight, with the lists that go along, then take less than two buckets."""

SLICE_BYTES = 8 << 20
"""Size of the slices of large tensors; several in flight keep every connection of the group busy."""

_PACKED = 2
"""Filled buckets in flight, in sizes of a bucket: a send holds no more memory of its own. Small ones between large
tensors may be more."""

_FLYING = 16
_FLYING_BUCKETS = 8
"""Buckets in flight, and their bytes in sizes of a bucket (or two tensors, if they are larger): what travels as it lies
in memory costs none, unless the source makes its tensors on the way (a gather, a cast)."""


def buckets_of(params: tuple[ParamMeta, ...], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Return the buckets in which ``params`` are broadcast; a ``bucket_bytes`` of 0 gives each tensor its own."""
    capacity = bucket_bytes - bucket_bytes // _SPARE
    return layout(params, capacity, min(DIRECT_BYTES, capacity) or 1)


class _Window:
    """The broadcasts in flight, of which there is a limit, and the memory of packed buckets.

    Args:
        broadcasts: what they run on.
        buckets: all that will be broadcast.
        bucket_bytes: size of a bucket; 0 lets nothing overlap.
        slice_bytes: size of a broadcast, of which a large tensor takes several; None broadcasts every bucket as one.

    Attributes:
        flying: buckets that were started and did not land yet, with their works and bytes, oldest first.
    """

    def __init__(
        self, broadcasts: Group, buckets: Sequence[Bucket], bucket_bytes: int, slice_bytes: int | None
    ) -> None:
        self._broadcasts, self._pool = broadcasts, BufferPool(broadcasts.device)
        self._slice_bytes = slice_bytes
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
    broadcasts: Group,
    buckets: Sequence[Bucket],
    packer: Packer,
    *,
    bucket_bytes: int,
    slice_bytes: int | None = SLICE_BYTES,
) -> None:
    """Broadcast everything that ``packer`` packs (trainer end).

    Raises:
        TransportError, DeadlineError: as `Group.wait`.
        ManifestError: the source is not what was declared.
    """
    window = _Window(broadcasts, buckets, bucket_bytes, slice_bytes)
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
        bucket_bytes, slice_bytes: of the sender.
    """

    def __init__(
        self,
        broadcasts: Group,
        buckets: Sequence[Bucket],
        params: Sequence[ParamMeta],
        into: Mapping[str, Tensor],
        *,
        bucket_bytes: int,
        slice_bytes: int | None = SLICE_BYTES,
    ) -> None:
        self._rest = deque(buckets)  # that were not started yet
        self._window = _Window(broadcasts, buckets, bucket_bytes, slice_bytes)
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
