"""Kernels for the host, loops compiled by numba; and which kernels work on which device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.data.deltas.kernels import UNSIGNED, Kernels, Landed, Piece, Words, Writes, linear_keys, unsigned
from torchrl_ext.data.deltas.torch_ops import TorchKernels

__all__ = ["HostKernels", "kernels_on"]


@final
class HostKernels(Kernels):
    """Kernels made of numba's loops, each in one thread; a caller cuts its work for several."""

    on_host: ClassVar[bool] = True

    def words(self, piece: Piece) -> Words:
        from torchrl_ext.data.deltas.host_loops import digest_piece

        bits, total = piece.memory.numpy(), np.zeros(2, np.uint64)
        if bits.size:
            bits = bits.view(UNSIGNED[bits.itemsize])
            dims = np.array(piece.by_memory, np.int64).reshape(-1, 3)
            digest_piece(bits, dims, piece.offset, linear_keys(), total)
        return int(total[0]), int(total[1])

    def words_of(self, pieces: Sequence[Piece]) -> list[Words]:
        from torchrl_ext.data.deltas.host_loops import digest_runs

        straight = [piece for piece in pieces if piece.straight]
        words = np.zeros((len(straight), 2), np.uint64)
        if straight:
            addresses = np.array([piece.memory.data_ptr() for piece in straight])
            offsets = np.array([piece.offset for piece in straight])
            sizes = np.array([piece.end - piece.offset for piece in straight])
            like = np.empty(0, UNSIGNED[straight[0].memory.element_size()])
            digest_runs(addresses, offsets, sizes, like, linear_keys(), words)
        found = zip(words[:, 0].tolist(), words[:, 1].tolist(), strict=True)
        return [next(found) if piece.straight else self.words(piece) for piece in pieces]

    def land(self, piece: Piece, positions: Tensor, payload: Tensor, ordered: bool | None) -> Landed:
        from torchrl_ext.data.deltas.host_loops import land, write

        target, where, total = piece.memory.numpy(), positions.numpy(), np.zeros(2, np.uint64)
        unit, dims = UNSIGNED[target.itemsize], np.array(piece.dims, np.int64).reshape(-1, 3)
        index = np.dtype(np.int32 if target.size < 2**31 else np.int64)
        same = piece.straight and not piece.offset and where.dtype == index
        offsets, values = where if same else np.empty(where.size, index), np.empty(where.size, unit)
        how = piece.straight, same, ordered is not None, bool(ordered)
        changes = where, payload.numpy().view(unit)
        found = land(target.view(unit), dims, piece.offset, *changes, *how, offsets, values, linear_keys(), total)
        if found < where.size:  # the memory that waits for a pause is as long as what will be written in it
            offsets, values = offsets[:found].copy(), values[:found].copy()
        none = np.empty(0, np.int64)
        write(none, none, offsets[:0], values[:0], none)  # compiled before a pause needs it
        listed, words = torch.from_numpy(values.view(target.dtype)), (int(total[0]), int(total[1]))
        return Landed(offsets=torch.from_numpy(offsets), values=listed, words=words)

    def scatter(self, target: Tensor, offsets: Tensor, values: Tensor) -> None:
        from torchrl_ext.data.deltas.host_loops import write

        run = np.array([target.data_ptr()]), np.array([offsets.numel()])
        write(*run, offsets.numpy(), unsigned(values), np.empty(1, np.int64))

    def sums(self, ends: Tensor, offsets: Tensor, values: Tensor) -> Tensor:
        from torchrl_ext.data.deltas.host_loops import sums

        found = torch.empty_like(ends)
        sums(ends.numpy(), offsets.numpy(), unsigned(values), found.numpy())
        return found

    def write(self, writes: Writes) -> Tensor:
        from torchrl_ext.data.deltas.host_loops import write

        found, (addresses, ends, offsets) = torch.empty_like(writes.ends), writes[1:4]
        write(addresses.numpy(), ends.numpy(), offsets.numpy(), unsigned(writes.values), found.numpy())
        return found


@functools.cache
def kernels_on(device: torch.device) -> Kernels:
    """Return the kernels for tensors on ``device``: numba's loops on the host, else torch's operators."""
    if device.type == "cpu":
        return HostKernels()
    return TorchKernels()
