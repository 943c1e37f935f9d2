"""Kernels for CUDA devices: programs written in Triton, one pass each."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from torchrl_ext.kernels.base import Diff, Kernels, Landed, Piece, Words, Writes

__all__ = ["TritonKernels"]

_BLOCK = 1024  # elements of one program


@final
class TritonKernels(Kernels):
    """Kernels made of Triton programs, for CUDA devices.

    Args:
        loops: another edition of `torchrl_ext.kernels.cuda_programs` (tests run one in Triton's interpreter, whose
            tensors lie on the host).
    """

    name: ClassVar[str] = "triton"

    def __init__(self, loops: ModuleType | None = None) -> None:
        self._loops: Any = loops or importlib.import_module("torchrl_ext.kernels.cuda_programs")

    def diff(self, old: Tensor, new: Tensor, start: int = 0) -> Diff:
        size, blocks = old.numel(), _blocks(old.numel())
        dtype = torch.int32 if size < 2**31 else torch.int64
        ends, total = torch.zeros(blocks, dtype=torch.int64, device=old.device), 0
        with torch.cuda.device_of(old):
            if blocks:
                self._loops.count_changes[(blocks,)](old, new, ends, size, BLOCK=_BLOCK)
                ends = ends.cumsum(0)
                total = int(ends[-1])
            places = torch.empty(total, dtype=dtype, device=old.device)
            before, after = old.new_empty(total), new.new_empty(total)
            if total:
                self._loops.list_changes[(blocks,)](old, new, ends, places, before, after, size, BLOCK=_BLOCK)
        words = self._change_words(places, before, after, start)
        return Diff(places=places, before=before, after=after, words=words)

    def _change_words(self, places: Tensor, before: Tensor, after: Tensor, start: int) -> Words:
        size = places.numel()
        out = _out(size, places.device)
        with torch.cuda.device_of(places):
            if size:
                self._loops.change_words[(_blocks(size),)](
                    places, before, after, start, size, out, BLOCK=_BLOCK, WIDTH=before.element_size()
                )
        return _words(out)

    def words(self, piece: Piece) -> Words:
        memory, size = piece.memory, piece.destination.numel()
        out, dims = _out(size, memory.device), _dims(piece.by_memory, memory.device)
        with torch.cuda.device_of(memory):
            if size:
                self._loops.view_words[(_blocks(size),)](
                    memory,
                    dims,
                    piece.offset,
                    size,
                    out,
                    BLOCK=_BLOCK,
                    DIMS=len(piece.dims),
                    WIDTH=memory.element_size(),
                )
        return _words(out)

    def land(self, piece: Piece, positions: Tensor, payload: Tensor, ordered: bool | None) -> Landed:
        target, size, device = piece.memory, positions.numel(), piece.memory.device
        positions, payload = positions.to(device).contiguous(), payload.to(device).contiguous()
        offsets = torch.empty(size, dtype=torch.int32 if target.numel() < 2**31 else torch.int64, device=device)
        values, inside = torch.empty_like(payload), torch.empty(size, dtype=torch.int8, device=device)
        out = _out(size, device)
        with torch.cuda.device_of(target):
            if size:
                self._loops.land[(_blocks(size),)](
                    target,
                    _dims(piece.dims, device),
                    piece.offset,
                    positions,
                    payload,
                    size,
                    offsets,
                    values,
                    inside,
                    out,
                    BLOCK=_BLOCK,
                    DIMS=0 if piece.straight else len(piece.dims),
                    WIDTH=target.element_size(),
                    STEPS=ordered is not None,
                    ORDERED=bool(ordered),
                )
            for program in (self._loops.write, self._loops.read):  # compiled before a pause needs them
                program[(1,)](offsets[:0].to(torch.int64), values[:0], 0, BLOCK=_BLOCK)
        if not piece.dense:
            fits = inside.to(torch.bool)
            offsets, values = offsets[fits], values[fits]
        return Landed(offsets=offsets, values=values, words=_words(out))

    def scatter(self, target: Tensor, offsets: Tensor, values: Tensor) -> Tensor:
        addresses = target.data_ptr() + offsets.to(torch.int64) * values.element_size()
        return (self._stored(addresses, values) == values).all()

    def write(self, writes: Writes) -> int:
        sizes, count = writes.ends.diff(prepend=writes.ends.new_zeros(1)), writes.values.numel()
        addresses = writes.addresses.repeat_interleave(sizes, output_size=count)
        addresses = addresses.add_(writes.offsets.to(torch.int64) * writes.values.element_size())
        fits = self._stored(addresses, writes.values) == writes.values
        if fits.all():
            return len(writes.targets)
        return int(torch.searchsorted(writes.ends, fits.to(torch.int8).argmin(), right=True))

    def _stored(self, addresses: Tensor, values: Tensor) -> Tensor:
        """Write values to their addresses, and return what stands there then."""
        size, found = values.numel(), torch.empty_like(values)
        with torch.cuda.device_of(values):
            if size:
                self._loops.write[(_blocks(size),)](addresses, values, size, BLOCK=_BLOCK)
                self._loops.read[(_blocks(size),)](addresses, found, size, BLOCK=_BLOCK)
        return found


def _blocks(size: int) -> int:
    return -(-size // _BLOCK)


def _dims(dims: tuple[tuple[int, int, int], ...], device: torch.device) -> Tensor:
    return torch.tensor(dims or ((1, 1, 1),), dtype=torch.int64).to(device)


def _out(size: int, device: torch.device) -> Tensor:
    return torch.zeros(2, _blocks(size), dtype=torch.int64, device=device)


def _words(out: Tensor) -> Words:
    one, two = out.sum(1).tolist()
    return one % 2**64, two % 2**64
