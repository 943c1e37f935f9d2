"""Buckets, in which parameters travel: a layout that both ends compute from the same list, packing, and landing.

Parameters keep their order, and each begins at a multiple of its element size, so no offset is ever taken from a
message. A broadcast gives every large tensor a bucket of its own, in which it travels as it lies in memory; a staging
buffer has no such buckets, and splits a tensor that does not fit into the rest of one. Copies of tensors as bytes, and
the memory for them, are pooled.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.base.types import ParamMeta

__all__ = [
    "HOST",
    "Bucket",
    "BufferPool",
    "Lander",
    "Packer",
    "Span",
    "as_bytes",
    "copy_each",
    "copy_memory",
    "is_plain",
    "layout",
    "plain",
]

_KEPT = 8
"""Idle buffers of a pool that are kept for another use."""

HOST = torch.device("cpu")
_LARGE_ELEMENTS = 32768
"""Elements from which torch's CPU copies use several threads (at::internal::GRAIN_SIZE)."""


def plain(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``, contiguous, not lazily conjugated or negated; itself where it is so already."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():  # pending, so that memory does not hold the values
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.device != device:
        tensor = tensor.to(device)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as a flat uint8 tensor."""
    return tensor.view(-1).view(torch.uint8)


copy_memory = ctypes.memmove
"""Copies so many bytes between two addresses of the host: (target, source, nbytes). For small tensors a view costs more
than the copy."""


@torch.no_grad()
def copy_each(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each source into its target, of the same dtype and shape.

    numpy copies large ones on the host, in this thread and without the interpreter lock. torch would share such a copy
    among its OpenMP threads, and where cores are busy, as they are while a backend moves bytes, waiting for the slowest
    of these threads was measured to take twenty times as long as the copy.
    """
    small_sources, small_targets = [], []
    for source, target in zip(sources, targets, strict=True):
        if target.numel() >= _LARGE_ELEMENTS and is_plain(source, HOST) and is_plain(target, HOST):
            as_bytes(target.detach()).numpy()[:] = as_bytes(source.detach()).numpy()
        else:
            byte = target.dtype.itemsize == 1  # the kernel for many on CUDA does not know each of these dtypes
            small_sources.append(source.view(torch.uint8) if byte else source)
            small_targets.append(target.view(torch.uint8) if byte else target)
    if small_targets:
        torch._foreach_copy_(small_targets, small_sources)


def is_plain(tensor: Tensor, device: torch.device) -> bool:
    """Return whether memory of ``device`` holds the values of a tensor, one after the other."""
    there = tensor.is_cpu if device is HOST else tensor.device == device  # small tensors come by the ten thousand
    return there and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


class BufferPool:
    """A pool of buffers, used again once nothing refers to them: fresh memory costs a page fault every 4 KiB.

    A buffer is handed out as a tensor over an array of its own; when the tensor and every view of it are gone, so is
    that array, which a weak reference tells. On CUDA torch's allocator does the same job.

    Args:
        device: where buffers live.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []

    def take(self, nbytes: int) -> Tensor:
        """Return a uint8 tensor of ``nbytes`` that nothing else refers to; its content is undefined."""
        if self._device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        array, idle, kept = None, [], []
        for entry in self._buffers:
            if entry[1]() is not None:
                kept.append(entry)
            elif array is None and nbytes <= entry[0].nbytes <= 2 * nbytes:
                array = entry[0]
            else:
                idle.append(entry)
        if array is None:
            array = np.empty(max(nbytes, 1), dtype=np.uint8)
        handed_out = array[:nbytes]
        self._buffers = [*idle[-_KEPT:], *kept, (array, weakref.ref(handed_out))]
        return torch.from_numpy(handed_out)


_SPLIT_BYTES = 128 << 10
"""Bytes that a bucket must have left to take a part of a tensor; a smaller rest stays empty."""

_AT_ONCE_BYTES = 1 << 20
"""Bytes of tensors that are held at once while they are packed; a source may make each of them on request."""


@dataclass(frozen=True)
class Span:
    """Consecutive parameters of one dtype that lie in a bucket without a gap, or a part of one parameter.

    Attributes:
        first, stop: indices of the parameters: ``first <= index < stop``.
        begin, end: which of their bytes these are, counted from the beginning of the first one.
        at: where they begin in the bucket, in bytes.
        part: the span is a part of one parameter, which goes on in the next bucket or began in the one before.
    """

    first: int
    stop: int
    begin: int
    end: int
    at: int
    part: bool = False

    def bytes_in(self, buffer: Tensor) -> Tensor:
        """Return the bytes of this span in a buffer that holds its bucket."""
        return buffer[self.at : self.at + self.end - self.begin]

    def tensors_in(self, buffer: Tensor, metas: Sequence[ParamMeta]) -> list[Tensor]:
        """Return views of a buffer that holds the bucket, one for each of ``metas``, the parameters of this span."""
        flat = self.bytes_in(buffer).view(metas[0].dtype)
        parts = flat.split([meta.numel for meta in metas])
        return [part.view(meta.shape) for meta, part in zip(metas, parts, strict=True)]


@dataclass(frozen=True)
class Bucket:
    """Parameters that travel together, as one run of bytes.

    Attributes:
        spans: what lies in it, in order.
        nbytes: bytes that travel; 0 when all its tensors are empty.
        direct: it is one whole tensor, which travels as it lies in memory.
    """

    spans: tuple[Span, ...]
    nbytes: int
    direct: bool = False


@lru_cache(maxsize=16)  # lists of parameters rarely change from one update to the next
def layout(params: tuple[ParamMeta, ...], capacity: int, direct_bytes: int | None = None) -> tuple[Bucket, ...]:
    """Lay ``params`` out in buckets; only the arguments decide, so two processes agree.

    Args:
        params: what travels.
        capacity: size of a bucket, in bytes.
        direct_bytes: tensors of so many bytes and more are direct, and none is split; ``capacity`` or less. With None
            no tensor is direct, and those that do not fit are split.
    """
    buckets: list[Bucket] = []
    spans: list[Span] = []
    split_bytes = min(_SPLIT_BYTES, capacity // 4) if direct_bytes is None else capacity + 1
    cursor = 0

    def close() -> None:
        nonlocal spans, cursor
        if spans:
            buckets.append(Bucket(tuple(spans), cursor))
        spans, cursor = [], 0

    for index, meta in enumerate(params):
        nbytes, itemsize = meta.nbytes, meta.dtype.itemsize
        if direct_bytes is not None and nbytes >= direct_bytes:
            close()
            buckets.append(Bucket((Span(index, index + 1, 0, nbytes, 0),), nbytes, direct=True))
            continue
        at, done = -(-cursor // itemsize) * itemsize, 0
        if at + nbytes > capacity and capacity - at < split_bytes:
            close()
            at = 0
        while at + nbytes - done > capacity:
            end = done + capacity - at
            spans.append(Span(index, index + 1, done, end, at, part=True))
            cursor = capacity
            close()
            at, done = 0, end
        before = spans[-1] if spans else None
        if done:
            spans.append(Span(index, index + 1, done, nbytes, at, part=True))
        elif before and not before.part and params[before.first].dtype is meta.dtype and before.at + before.end == at:
            spans[-1] = replace(before, stop=index + 1, end=before.end + nbytes)
        else:
            spans.append(Span(index, index + 1, 0, nbytes, at))
        cursor = at + nbytes - done
    close()
    return tuple(buckets)


class Packer:
    """Packs a stream of tensors into buckets, one after the other (trainer end).

    Args:
        params: what the stream yields.
        stream: a checked pass over the source (`torchrl_ext.data.weights.source.checked`).
    """

    def __init__(self, params: Sequence[ParamMeta], stream: Iterator[tuple[ParamMeta, Tensor]]) -> None:
        self._params, self._stream = params, stream
        self._split: Tensor | None = None

    def direct(self, device: torch.device) -> Tensor:
        """Return the bytes of a direct bucket on ``device``: the tensor's own memory, where that is possible.

        Raises:
            ManifestError: the stream is not what was declared.
        """
        return as_bytes(plain(next(self._stream)[1], device))

    def fill(self, bucket: Bucket, slots: Sequence[Tensor]) -> None:
        """Copy what belongs into ``bucket`` to each of ``slots``, uint8 tensors of its size or larger.

        Raises:
            ManifestError: the stream is not what was declared.
        """
        hosts = [slot.data_ptr() for slot in slots if slot.is_cpu]
        in_memory = len(hosts) == len(slots)
        for span in bucket.spans:
            if span.part:
                self._fill_part(span, slots)
                continue
            at, held = span.at, 0
            sources: list[Tensor] = []
            targets: list[Tensor] = []
            for _, tensor in islice(self._stream, span.stop - span.first):
                nbytes = tensor.nbytes
                if in_memory and is_plain(tensor, HOST):
                    address = tensor.data_ptr()
                    for host in hosts:
                        copy_memory(host + at, address, nbytes)
                else:
                    for slot in slots:
                        sources.append(tensor)
                        targets.append(slot[at : at + nbytes].view(tensor.dtype).view(tensor.shape))
                    held += nbytes
                    if held >= _AT_ONCE_BYTES:
                        copy_each(sources, targets)
                        sources, targets, held = [], [], 0
                at += nbytes
            copy_each(sources, targets)

    def finish(self) -> None:
        """Read on to the end of the stream, which raises a ManifestError if it has more than it declared."""
        next(self._stream, None)

    def _fill_part(self, span: Span, slots: Sequence[Tensor]) -> None:
        if self._split is None:
            tensor = next(self._stream)[1]
            self._split = as_bytes(plain(tensor, tensor.device))
        for slot in slots:
            copy_each([self._split[span.begin : span.end]], [span.bytes_in(slot)])
        if span.end == self._params[span.first].nbytes:
            self._split = None


class Lander:
    """Takes tensors out of buckets as they arrive (worker end).

    Args:
        params: what arrives.
        into: tensors that are filled directly where that is possible.
        device: where the bytes arrive.
    """

    def __init__(self, params: Sequence[ParamMeta], into: Mapping[str, Tensor], device: torch.device) -> None:
        self._params, self._into, self._device = params, into, device
        self._pool = BufferPool(device)
        self._begun: dict[int, Tensor] = {}

    def begin(self, index: int) -> Tensor:
        """Return bytes to write parameter ``index`` to: those of its tensor in ``into``, or memory of its own."""
        meta = self._params[index]
        target = self._alike(meta)
        if target is None or not is_plain(target, self._device):
            target = self._pool.take(meta.nbytes).view(meta.dtype).view(meta.shape)
        self._begun[index] = target = target.detach()
        return as_bytes(target)

    def end(self, index: int) -> tuple[str, Tensor]:
        """Return the pair of a parameter, now that its bytes from `begin` are written."""
        meta, arrived = self._params[index], self._begun.pop(index)
        target = self._alike(meta)
        if target is None:
            return meta.name, arrived
        if target.data_ptr() != arrived.data_ptr():  # it is strided, or on another device
            copy_each([arrived], [target])
        return meta.name, target

    def take(self, bucket: Bucket, slot: Tensor, *, lasting: bool = False) -> list[tuple[str, Tensor]]:
        """Return the pairs that are complete with what arrived in ``slot``.

        Args:
            bucket: what arrived.
            slot: its bytes.
            lasting: nobody writes ``slot`` again, so what has no target may stay there; else it gets memory of its own.
        """
        pairs: list[tuple[str, Tensor]] = []
        kept = slot if lasting else None
        for span in bucket.spans:
            if span.part:
                pairs += self._part(span, slot)
                continue
            metas = self._params[span.first : span.stop]
            given = [self._alike(meta) for meta in metas]
            ready = [target for target in given if target is not None and is_plain(target, HOST)]
            if slot.is_cpu and len(ready) == len(metas):
                address = slot.data_ptr() + span.at
                for own in ready:
                    nbytes = own.nbytes
                    copy_memory(own.data_ptr(), address, nbytes)
                    address += nbytes
                pairs += zip([meta.name for meta in metas], ready, strict=True)
                continue
            if kept is None and any(target is None for target in given):
                kept, last = self._pool.take(slot.numel()), bucket.spans[-1]
                end = last.at if last.part else bucket.nbytes
                copy_each([slot[span.at : end]], [kept[span.at : end]])
            sources, targets = [], []
            tensors = span.tensors_in(slot if kept is None else kept, metas)
            for meta, tensor, target in zip(metas, tensors, given, strict=True):
                if target is not None:
                    sources.append(tensor)
                    targets.append(target)
                pairs.append((meta.name, tensor if target is None else target))
            copy_each(sources, targets)
        return pairs

    def _part(self, span: Span, slot: Tensor) -> list[tuple[str, Tensor]]:
        flat = as_bytes(self._begun[span.first]) if span.begin else self.begin(span.first)
        copy_each([span.bytes_in(slot)], [flat[span.begin : span.end]])
        return [self.end(span.first)] if span.end == self._params[span.first].nbytes else []

    def _alike(self, meta: ParamMeta) -> Tensor | None:
        target = self._into.get(meta.name)
        alike = target is not None and target.dtype is meta.dtype and target.shape == meta.shape
        return target if alike else None
