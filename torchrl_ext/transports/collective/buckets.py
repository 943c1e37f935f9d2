"""How parameters become broadcasts: a layout that both ends compute from the same list, and memory to go through.

Small tensors share a bucket: one uint8 buffer in which each tensor begins at a multiple of its element size. Tensors
of `DIRECT_BYTES` and more travel as they lie in memory, in slices of at most `CHUNK_BYTES`. The order of parameters is
kept, so the worker can hand each one on as soon as its piece is there.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.types import ParamMeta

__all__ = [
    "BUCKET_BYTES",
    "BufferPool",
    "Piece",
    "Plan",
    "as_bytes",
    "chunks",
    "copy_each",
    "landing",
    "layout",
    "plain",
    "views",
]

BUCKET_BYTES = 8 << 20
"""Default size of a bucket."""

DIRECT_BYTES = 1 << 20
"""From this size on a copy into a bucket costs more than a broadcast of its own (measured with gloo)."""

_SPARE = 8
"""An eighth of a bucket stays free: two in flight, with the lists that go along, then take less than two buckets."""

_SHARED_ELEMENTS = 32768
"""From here on torch's CPU copies use several threads (at::internal::GRAIN_SIZE)."""

CHUNK_BYTES = 8 << 20
"""Slices of large tensors; several in flight keep every connection of the group busy."""


@dataclass(frozen=True)
class Piece:
    """Consecutive parameters that travel together.

    Attributes:
        first, stop: indices of the parameters: ``first <= index < stop``.
        nbytes: bytes that travel; 0 when all its tensors are empty.
        direct: one tensor that travels as it lies in memory.
        runs: ``(first, stop, begin, end)``: parameters of one dtype that fill bytes ``begin`` to ``end`` without a gap.
    """

    first: int
    stop: int
    nbytes: int
    direct: bool
    runs: tuple[tuple[int, int, int, int], ...] = ()


def layout(params: Sequence[ParamMeta], bucket_bytes: int) -> tuple[Piece, ...]:
    """Pieces of ``params``, in order; a function of its arguments alone, so that two processes agree.

    Args:
        params: what travels.
        bucket_bytes: size of a bucket; 0 gives every tensor a piece of its own.
    """
    bucket_bytes -= bucket_bytes // _SPARE
    direct_bytes = min(DIRECT_BYTES, bucket_bytes) or 1
    pieces: list[Piece] = []
    runs: list[tuple[int, int, int, int]] = []
    first = cursor = 0
    dtype = None

    def flush(stop: int) -> None:
        nonlocal runs, first, cursor, dtype
        if stop > first:
            pieces.append(Piece(first, stop, cursor, False, tuple(runs)))
        runs, first, cursor, dtype = [], stop, 0, None

    for index, meta in enumerate(params):
        nbytes = meta.nbytes
        if nbytes >= direct_bytes:
            flush(index)
            pieces.append(Piece(index, index + 1, nbytes, True))
            first = index + 1
            continue
        begin = -(-cursor // meta.dtype.itemsize) * meta.dtype.itemsize
        if begin + nbytes > bucket_bytes:
            flush(index)
            begin = 0
        if meta.dtype is dtype and begin == cursor:
            start, _, offset, _ = runs[-1]
            runs[-1] = (start, index + 1, offset, begin + nbytes)
        else:
            runs.append((index, index + 1, begin, begin + nbytes))
        dtype, cursor = meta.dtype, begin + nbytes
    flush(len(params))
    return tuple(pieces)


class Plan:
    """The layout and the JSON form of a parameter list, kept from one update to the next: lists rarely change."""

    def __init__(self) -> None:
        self._params: tuple[ParamMeta, ...] | None = None
        self._rows: list[Any] = []
        self._pieces: dict[int, tuple[Piece, ...]] = {}

    def _know(self, params: tuple[ParamMeta, ...], rows: list[Any]) -> None:
        self._params, self._rows, self._pieces = params, rows, {}

    def rows(self, params: tuple[ParamMeta, ...]) -> list[Any]:
        """`ParamMeta.to_json` of each parameter."""
        if params != self._params:
            self._know(params, [meta.to_json() for meta in params])
        return self._rows

    def metas(self, rows: list[Any]) -> tuple[ParamMeta, ...]:
        """Inverse of `rows`.

        Raises:
            ManifestError: a row is malformed.
        """
        if self._params is None or rows != self._rows:
            self._know(tuple(ParamMeta.from_json(row) for row in rows), rows)
        return self._params or ()

    def pieces(self, params: tuple[ParamMeta, ...], bucket_bytes: int) -> tuple[Piece, ...]:
        """`layout` of ``params``."""
        self.rows(params)
        if bucket_bytes not in self._pieces:
            self._pieces[bucket_bytes] = layout(params, bucket_bytes)
        return self._pieces[bucket_bytes]


def plain(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``, contiguous, without lazy conjugation or negation; itself where it is so already."""
    tensor = tensor.detach()
    if _lazy(tensor):
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.device != device:
        tensor = tensor.to(device)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as a flat uint8 tensor."""
    return tensor.view(-1).view(torch.uint8)


def chunks(flat: Tensor, limit: int = CHUNK_BYTES) -> Sequence[Tensor]:
    """Slices of equal size (but for the last), each of at most ``limit`` bytes."""
    return flat.split(limit) if flat.numel() > limit else (flat,)


def views(piece: Piece, params: Sequence[ParamMeta], buffer: Tensor) -> list[Tensor]:
    """Views of ``buffer``, one per parameter of ``piece``, with the parameter's dtype and shape."""
    found: list[Tensor] = []
    for first, stop, begin, end in piece.runs:
        metas = params[first:stop]
        typed = buffer[begin:end].view(metas[0].dtype)
        found += [
            part.view(meta.shape) for meta, part in zip(metas, typed.split([meta.numel for meta in metas]), strict=True)
        ]
    return found


@torch.no_grad()
def copy_each(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each source into its target, of the same dtype and shape.

    Large ones are copied by numpy, in this thread. torch would share such a copy among its OpenMP threads, and on a
    machine whose cores are busy (they are: the backend moves bytes) waiting for the slowest of them was measured to
    take twenty times as long as the copy.
    """
    pairs = list(zip(sources, targets, strict=True))
    shared = [(source, target) for source, target in pairs if target.numel() >= _SHARED_ELEMENTS]
    rest = [(source, target) for source, target in pairs if target.numel() < _SHARED_ELEMENTS]
    for source, target in shared:
        if _plain_memory(source) and _plain_memory(target):
            as_bytes(target.detach()).numpy()[:] = as_bytes(source.detach()).numpy()
        else:
            rest.append((source, target))
    if rest:
        torch._foreach_copy_([target for _, target in rest], [source for source, _ in rest])


def landing(meta: ParamMeta, into: Mapping[str, Tensor], device: torch.device) -> Tensor | None:
    """The tensor of ``into`` that takes ``meta`` as it comes off the wire, if there is one."""
    target = into.get(meta.name)
    if target is None or target.device != device or not target.is_contiguous() or _lazy(target):
        return None
    return target.detach() if ParamMeta.of(meta.name, target) == meta else None


def _plain_memory(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not _lazy(tensor)


def _lazy(tensor: Tensor) -> bool:
    """Whether the values are not those in memory."""
    return tensor.is_conj() or tensor.is_neg()


class BufferPool:
    """Buffers that are used again once nothing refers to them: fresh memory costs a page fault every 4 KiB.

    A buffer is lent as a tensor over an array of its own; when the tensor and every view of it are gone, so is that
    array, which a weak reference tells. On CUDA torch's allocator does the same job.

    Args:
        device: where buffers live.
        keep: most buffers that are kept for another use.
    """

    def __init__(self, device: torch.device, *, keep: int = 8) -> None:
        self._device, self._keep = device, keep
        self._buffers: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []

    def take(self, nbytes: int) -> Tensor:
        """A uint8 tensor of ``nbytes`` that nothing else refers to; its content is undefined."""
        if self._device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        array = self._free(nbytes)
        if array is None:
            array = np.empty(max(nbytes, 1), dtype=np.uint8)
        lent = array[:nbytes]
        self._buffers.append((array, weakref.ref(lent)))
        return torch.from_numpy(lent)

    def _free(self, nbytes: int) -> np.ndarray | None:
        idle = [entry for entry in self._buffers if entry[1]() is None]
        for entry in idle:
            if nbytes <= entry[0].nbytes <= 2 * nbytes:
                self._drop(entry)
                return entry[0]
        for entry in idle[: max(0, len(self._buffers) - self._keep)]:
            self._drop(entry)
        return None

    def _drop(self, entry: tuple[np.ndarray, weakref.ref[np.ndarray]]) -> None:
        self._buffers = [other for other in self._buffers if other is not entry]
