"""Kernels for CUDA devices: programs written in Triton, one pass each."""

from __future__ import annotations

import functools
import importlib
import threading
from types import ModuleType
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from torchrl_ext.kernels.base import LINEAR, POSITION, Diff, Kernels, Landed, Piece, Words, Writes, linear_keys
from torchrl_ext.kernels.torch_ops import sums_of

__all__ = ["TritonKernels"]

_BLOCK = 1024  # elements of one program
_LAUNCH = threading.Lock()  # a program is compiled when it first runs, which is for one thread at a time


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

    def _run(self, program: str, size: int, on: Tensor, *args: Any, **settings: Any) -> None:
        """Run a program over ``size`` elements, on the device of a tensor, which is its first argument."""
        if size:
            with _LAUNCH, torch.cuda.device_of(on):
                getattr(self._loops, program)[(_blocks(size),)](on, *args, BLOCK=_BLOCK, **settings)

    def diff(self, old: Tensor, new: Tensor) -> Diff:
        size, total = old.numel(), 0
        ends = torch.zeros(_blocks(size), dtype=torch.int64, device=old.device)
        self._run("count_changes", size, old, new, ends, size)
        if size:
            ends = ends.cumsum(0)
            total = int(ends[-1])
        places = torch.empty(total, dtype=torch.int32 if size < 2**31 else torch.int64, device=old.device)
        before, after = old.new_empty(total), new.new_empty(total)
        self._run("list_changes", size if total else 0, old, new, ends, places, before, after, size)
        return Diff(places, before, after)

    def words(self, piece: Piece, digest: str = POSITION) -> Words:
        memory, size = piece.memory, piece.destination.numel()
        out, dims = _out(size, memory.device), _dims(piece.by_memory, memory.device)
        args = memory, dims, piece.offset, size, _keys_on(memory.device), out
        how: dict[str, Any] = {"DIMS": len(piece.dims), "WIDTH": memory.element_size(), "LINEAR": digest == LINEAR}
        self._run("view_words", size, *args, **how)
        return _words(out)

    def land(
        self, piece: Piece, positions: Tensor, payload: Tensor, ordered: bool | None, digest: str = POSITION
    ) -> Landed:
        target, size, device = piece.memory, positions.numel(), piece.memory.device
        positions, payload = positions.to(device).contiguous(), payload.to(device).contiguous()
        offsets = torch.empty(size, dtype=torch.int32 if target.numel() < 2**31 else torch.int64, device=device)
        values, inside = torch.empty_like(payload), torch.empty(size, dtype=torch.int8, device=device)
        out, dims = _out(size, device), _dims(piece.dims, device)
        args = target, dims, piece.offset, positions, payload, size, offsets, values, inside, _keys_on(device), out
        how: dict[str, Any] = {"DIMS": 0 if piece.straight else len(piece.dims), "WIDTH": target.element_size()}
        how |= {"STEPS": ordered is not None, "ORDERED": bool(ordered), "LINEAR": digest == LINEAR}
        self._run("land", size, *args, **how)
        with _LAUNCH, torch.cuda.device_of(target):
            for program in (self._loops.write, self._loops.read):  # compiled before a pause needs them
                program[(1,)](offsets[:0].to(torch.int64), values[:0], 0, BLOCK=_BLOCK)
        if not piece.dense:
            fits = inside.to(torch.bool)
            offsets, values = offsets[fits], values[fits]
        return Landed(offsets=offsets, values=values, words=_words(out))

    def scatter(self, target: Tensor, offsets: Tensor, values: Tensor) -> None:
        self._stored(target.data_ptr() + offsets.to(torch.int64) * values.element_size(), values)

    def sums(self, ends: Tensor, offsets: Tensor, values: Tensor) -> Tensor:
        return sums_of(ends, offsets, values)

    def write(self, writes: Writes) -> Tensor:
        sizes, count = writes.ends.diff(prepend=writes.ends.new_zeros(1)), writes.values.numel()
        addresses = writes.addresses.repeat_interleave(sizes, output_size=count)
        addresses = addresses.add_(writes.offsets.to(torch.int64) * writes.values.element_size())
        return self.sums(writes.ends, writes.offsets, self._stored(addresses, writes.values))

    def _stored(self, addresses: Tensor, values: Tensor) -> Tensor:
        """Write values to their addresses, and return what stands there then."""
        size, found = values.numel(), torch.empty_like(values)
        self._run("write", size, addresses, values, size)
        self._run("read", size, addresses, found, size)
        return found


def _blocks(size: int) -> int:
    return -(-size // _BLOCK)


@functools.cache
def _keys_on(device: torch.device) -> Tensor:
    return torch.from_numpy(linear_keys().view("int32").copy()).to(device)


def _dims(dims: tuple[tuple[int, int, int], ...], device: torch.device) -> Tensor:
    return torch.tensor(dims or ((1, 1, 1),), dtype=torch.int64).to(device)


def _out(size: int, device: torch.device) -> Tensor:
    return torch.zeros(2, _blocks(size), dtype=torch.int64, device=device)


def _words(out: Tensor) -> Words:
    one, two = out.sum(1).tolist()
    return one % 2**64, two % 2**64
