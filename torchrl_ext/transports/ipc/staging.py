"""How parameters go through a staging buffer of bounded size: a layout that both ends compute, packing, landing.

Unlike a broadcast's pieces (`torchrl_ext.transports.collective.buckets`) every bucket is full: a tensor that does not
fit into the rest of one goes on in the next, so that the number of hand-overs depends on the bytes alone.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.errors import ConfigError
from torchrl_ext.transports.collective.buckets import (
    BufferPool,
    Piece,
    Plan,
    as_bytes,
    copy_each,
    landing,
    plain,
    views,
)
from torchrl_ext.types import ParamMeta

__all__ = ["Bucket", "Lander", "Packer", "Span", "StagePlan", "stage_layout", "streaming_copy", "warm_copies"]

_SPLIT_BYTES = 128 << 10
"""A rest of a bucket that is smaller stays empty rather than take a part of a tensor."""

_AT_ONCE_BYTES = 1 << 20
"""Tensors that are held beside each other while they are packed; a source may make each of them for the occasion."""

_STREAM_UPDATE_BYTES, _STREAM_TENSOR_BYTES = 64 << 20, 64 << 10
"""Updates and tensors from which on copies around the caches pay (the first one compiles a loop)."""


@dataclass(frozen=True)
class Span:
    """A part of one tensor: its bytes ``begin`` to ``end``, at ``at`` in the bucket."""

    index: int
    begin: int
    end: int
    at: int


@dataclass(frozen=True)
class Bucket:
    """What fills the buffer once: the rest (or more) of a tensor, whole ones, the beginning of another one."""

    head: Span | None
    piece: Piece | None
    tail: Span | None


def stage_layout(params: Sequence[ParamMeta], capacity: int) -> tuple[Bucket, ...]:
    """Buckets of ``params``, in order; a function of its arguments alone, so that two processes agree.

    Args:
        params: what travels.
        capacity: bytes of a bucket.
    """
    buckets: list[Bucket] = []
    runs: list[tuple[int, int, int, int]] = []
    head: Span | None = None
    cursor = 0
    split_bytes = min(_SPLIT_BYTES, capacity // 4)

    def flush(tail: Span | None = None) -> None:
        nonlocal runs, head, cursor
        piece = Piece(runs[0][0], runs[-1][1], runs[-1][3], False, tuple(runs)) if runs else None
        if head or piece or tail:
            buckets.append(Bucket(head, piece, tail))
        runs, head, cursor = [], None, 0

    for index, meta in enumerate(params):
        nbytes, itemsize = meta.nbytes, meta.dtype.itemsize
        begin = -(-cursor // itemsize) * itemsize
        if begin + nbytes > capacity:
            done = 0
            if capacity - begin >= split_bytes:
                done = capacity - begin
                flush(Span(index, 0, done, begin))
            elif nbytes <= capacity:
                flush()
            else:
                flush()
                done = capacity
                flush(Span(index, 0, done, 0))
            while done and nbytes - done > capacity:
                head = Span(index, done, done + capacity, 0)
                done += capacity
                flush()
            if done:
                head, cursor = Span(index, done, nbytes, 0), nbytes - done
                continue
            begin = 0
        if runs and begin == runs[-1][3] and meta.dtype is params[index - 1].dtype:
            first, _, start, _ = runs[-1]
            runs[-1] = (first, index + 1, start, begin + nbytes)
        else:
            runs.append((index, index + 1, begin, begin + nbytes))
        cursor = begin + nbytes
    flush()
    return tuple(buckets)


class StagePlan:
    """The JSON form and the layout of a parameter list, kept from one update to the next."""

    def __init__(self) -> None:
        self._plan = Plan()
        self.rows, self.metas = self._plan.rows, self._plan.metas
        self._laid_out: tuple[tuple[ParamMeta, ...], int, tuple[Bucket, ...]] = ((), 0, ())

    def buckets(self, params: tuple[ParamMeta, ...], capacity: int) -> tuple[Bucket, ...]:
        """`stage_layout` of ``params``."""
        if self._laid_out[:2] != (params, capacity):
            self._laid_out = (params, capacity, stage_layout(params, capacity))
        return self._laid_out[2]


class Packer:
    """Trainer end: a stream of tensors into buckets.

    Args:
        params: what the stream yields.
        stream: a checked pass over the source (`torchrl_ext.weights.source.checked`).
    """

    def __init__(self, params: Sequence[ParamMeta], stream: Iterator[tuple[ParamMeta, Tensor]]) -> None:
        self._params, self._stream = params, stream
        self._flat: Tensor | None = None

    def fill(self, bucket: Bucket, slots: Sequence[Tensor]) -> None:
        """Copy what belongs into ``bucket`` to each of ``slots``, uint8 tensors of the bucket's capacity.

        Raises:
            ManifestError: the stream is not what was declared.
        """
        if bucket.head is not None:
            self._copy(bucket.head, slots)
        if bucket.piece is not None:
            self._copy_piece(bucket.piece, slots)
        if bucket.tail is not None:
            tensor = next(self._stream)[1]
            self._flat = as_bytes(plain(tensor, tensor.device))
            self._copy(bucket.tail, slots)

    def finish(self) -> None:
        """Let the stream say that it has more than it declared."""
        next(self._stream, None)

    def _copy(self, span: Span, slots: Sequence[Tensor]) -> None:
        source = self._flat
        assert source is not None, "a layout begins every tensor before it goes on with it"
        for slot in slots:
            copy_each([source[span.begin : span.end]], [slot[span.at : span.at + span.end - span.begin]])
        if span.end == self._params[span.index].nbytes:
            self._flat = None

    def _copy_piece(self, piece: Piece, slots: Sequence[Tensor]) -> None:
        targets = [views(piece, self._params, slot) for slot in slots]
        batch: list[Tensor] = []
        first = held = 0
        for index in range(piece.first, piece.stop):
            batch.append(next(self._stream)[1])
            held += batch[-1].nbytes
            if held >= _AT_ONCE_BYTES or index + 1 == piece.stop:
                for rows in targets:
                    copy_each(batch, rows[first : first + len(batch)])
                first, batch, held = first + len(batch), [], 0


class Lander:
    """Worker end: tensors out of buckets.

    Args:
        params: what arrives.
        into: tensors that are filled directly.
        device: where the buckets are.
        capacity: bytes of a bucket.
    """

    def __init__(
        self, params: Sequence[ParamMeta], into: Mapping[str, Tensor], device: torch.device, capacity: int
    ) -> None:
        self._params, self._into, self._device, self._capacity = params, into, device, capacity
        self._pool = BufferPool(device)
        on_host = device.type == "cpu"
        self._copy_bytes = streaming_copy(sum(meta.nbytes for meta in params)) if on_host else None
        self._target = self._flat = torch.empty(0)

    def take(self, bucket: Bucket, slot: Tensor) -> list[tuple[str, Tensor]]:
        """Copy everything out of ``slot``; the tensors that are complete now, none of them memory of the slot."""
        complete: list[tuple[str, Tensor]] = []
        if bucket.head is not None:
            complete += self._append(bucket.head, slot)
        if bucket.piece is not None:
            complete += self._unpack(bucket.piece, slot)
        if bucket.tail is not None:
            meta = self._params[bucket.tail.index]
            target = landing(meta, self._into, self._device)
            if target is None:
                self._flat = self._pool.take(meta.nbytes)
                self._target = self._flat.view(meta.dtype).view(meta.shape)
            else:
                self._target, self._flat = target, as_bytes(target)
            self._append(bucket.tail, slot)
        return complete

    def _append(self, span: Span, slot: Tensor) -> list[tuple[str, Tensor]]:
        self._copy([slot[span.at : span.at + span.end - span.begin]], [self._flat[span.begin : span.end]])
        meta, tensor = self._params[span.index], self._target
        if span.end < meta.nbytes:
            return []
        self._target = self._flat = torch.empty(0)
        return [(meta.name, self._placed(meta, tensor))]

    def _unpack(self, piece: Piece, slot: Tensor) -> list[tuple[str, Tensor]]:
        metas = self._params[piece.first : piece.stop]
        arrived = views(piece, self._params, slot)
        found = [self._alike(meta) for meta in metas]
        filled = [(tensor, target) for tensor, target in zip(arrived, found, strict=True) if target is not None]
        self._copy([tensor for tensor, _ in filled], [target for _, target in filled])
        if len(filled) < len(found):
            begin, end = piece.runs[0][2], piece.nbytes
            own = self._pool.take(self._capacity)
            self._copy([slot[begin:end]], [own[begin:end]])
            kept = views(piece, self._params, own)
            found = [tensor if target is None else target for tensor, target in zip(kept, found, strict=True)]
        return [(meta.name, target) for meta, target in zip(metas, found, strict=True) if target is not None]

    def _copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        rest = []
        for source, target in zip(sources, targets, strict=True):
            if self._copy_bytes is not None and target.nbytes >= _STREAM_TENSOR_BYTES and target.is_contiguous():
                self._copy_bytes(as_bytes(source).numpy(), as_bytes(target.detach()).numpy())
            else:
                rest.append((source, target))
        copy_each([source for source, _ in rest], [target for _, target in rest])

    def _placed(self, meta: ParamMeta, tensor: Tensor) -> Tensor:
        """``tensor``, or the tensor of ``into`` that is not contiguous and could not be filled byte by byte."""
        target = self._alike(meta)
        if target is None or target.data_ptr() == tensor.data_ptr():
            return tensor
        copy_each([tensor], [target])
        return target

    def _alike(self, meta: ParamMeta) -> Tensor | None:
        target = self._into.get(meta.name)
        return target if target is not None and ParamMeta.of(meta.name, target) == meta else None


def streaming_copy(nbytes: int) -> Callable[[np.ndarray, np.ndarray], None]:
    """The way to copy one uint8 array into another in an update of ``nbytes`` in all; it gives way to other threads."""
    return _load_streaming() if nbytes >= _STREAM_UPDATE_BYTES else _copy_plainly


def warm_copies(nbytes: int) -> threading.Thread | None:
    """Have the copy for updates of ``nbytes`` compiled before they come, in a thread, where it is one to compile."""
    if nbytes < _STREAM_UPDATE_BYTES:
        return None

    def once() -> None:
        _load_streaming()(np.zeros(1024, np.uint8), np.zeros(1024, np.uint8))

    thread = threading.Thread(target=once, name="torchrl-ext-warm", daemon=True)
    thread.start()
    return thread


def _copy_plainly(source: np.ndarray, target: np.ndarray) -> None:
    target[:] = source


@functools.cache
def _load_streaming() -> Callable[[np.ndarray, np.ndarray], None]:
    """The compiled copy; an ordinary one where nothing can compile it."""
    try:
        from torchrl_ext.transports.ipc.streaming_copy import copy_streaming
    except (ImportError, ConfigError):
        return _copy_plainly
    return copy_streaming
