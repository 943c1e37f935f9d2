"""Kernels for the host, loops compiled by numba; for any device, by torch's operators; and which work where."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.data.deltas.kernels import (
    ROW,
    SEED,
    UNSIGNED,
    Kernels,
    Landed,
    Piece,
    Words,
    Writes,
    linear_keys,
    unsigned,
)

__all__ = ["HostKernels", "TorchKernels", "kernels_on"]

_PIECE = 1 << 22  # elements whose words are held at a time, 8 bytes each in a handful of temporaries


def _signed(constant: int) -> int:
    """Return a 64-bit word as torch's int64 has it; int64 multiplication and addition wrap as unsigned ones do."""
    return constant - 2**64 if constant >= 2**63 else constant


_GOLDEN, _M1, _M2, _M3 = map(
    _signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
)  # as in `torchrl_ext.data.deltas.host_loops`


def _down(words: Tensor, count: int) -> Tensor:
    """Shift logically to the right, as torch's own shift is arithmetic."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _wide(bits: Tensor) -> Tensor:
    """Return bits as int64, filled up with zeros."""
    width = 8 * bits.element_size()
    return bits.to(torch.int64) & ((1 << width) - 1) if width < 64 else bits


def _factors(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the sums of rows of words are multiplied by."""
    one = rows * _GOLDEN + _signed(SEED)
    one = (one ^ _down(one, 30)) * _M1
    one = (one ^ _down(one, 27)) * _M2
    one = one ^ _down(one, 31)
    two = (one ^ _down(one, 32)) * _M3
    return one | 1, (two ^ _down(two, 29)) | 1


@functools.cache
def _keys_on(device: torch.device) -> Tensor:
    return torch.from_numpy(linear_keys().astype("int64")).to(device)


def _sums(positions: Tensor, bits: Tensor) -> Tensor:
    """Return the words that elements add to a digest: int64, shape (2,)."""
    byte, wide = positions * bits.element_size(), _wide(bits)
    word, shift = byte >> 2, (byte & 3) << 3
    keys, at = _keys_on(positions.device), word & (ROW - 1)
    factors = _factors(torch.div(word, ROW, rounding_mode="floor"))
    one, two = (((wide & 0xFFFFFFFF) + 1 << shift) * row[at] for row in keys)
    if bits.element_size() == 8:
        high = _down(wide, 32) + 1
        one, two = one + high * keys[0, at + 1], two + high * keys[1, at + 1]
    return torch.stack([(one * factors[0]).sum(), (two * factors[1]).sum()])


def _words(total: Tensor) -> Words:
    one, two = total.tolist()
    return one % 2**64, two % 2**64


@final
class TorchKernels(Kernels):
    """Kernels made of torch's operators, for any device."""

    def _change_words(self, positions: Tensor, before: Tensor, after: Tensor) -> Words:
        total = torch.zeros(2, dtype=torch.int64, device=positions.device)
        for at in range(0, positions.numel(), _PIECE):
            end = at + _PIECE
            here = positions[at:end].to(torch.int64)
            total += _sums(here, after[at:end]) - _sums(here, before[at:end])
        return _words(total)

    def words(self, piece: Piece) -> Words:
        device, count = piece.memory.device, piece.destination.numel()
        total = torch.zeros(2, dtype=torch.int64, device=device)
        for at in range(0, count, _PIECE):
            rest = torch.arange(at, min(at + _PIECE, count), device=device)
            positions, offsets = torch.full_like(rest, piece.offset), torch.zeros_like(rest)
            for size, stride, to in reversed(piece.by_memory):
                coordinate = rest % size
                positions += coordinate * stride
                offsets += coordinate * to
                rest = torch.div(rest, size, rounding_mode="floor")
            total += _sums(positions, piece.memory.index_select(0, offsets))
        return _words(total)

    def land(self, piece: Piece, positions: Tensor, payload: Tensor, ordered: bool | None) -> Landed:
        positions, payload = positions.to(piece.memory.device), payload.to(piece.memory.device)
        rest = positions.to(torch.int64) - piece.offset
        offsets, fits = torch.zeros_like(rest), torch.ones_like(rest, dtype=torch.bool)
        for size, stride, to in piece.dims:
            coordinate = torch.div(rest, stride, rounding_mode="floor")
            fits &= coordinate < size
            offsets += coordinate * to
            rest = rest - coordinate * stride
        if not piece.dense:
            fits &= rest == 0
            positions, payload, offsets = positions[fits], payload[fits], offsets[fits]
        before = piece.memory.index_select(0, offsets)
        values = payload if ordered is None else _moved(before, payload, ordered)
        words = self._change_words(positions, before, values)
        return Landed(offsets=offsets, values=values, words=words)

    def scatter(self, target: Tensor, offsets: Tensor, values: Tensor) -> None:
        target.index_copy_(0, offsets.to(torch.int64), values)  # it takes no other; those of `land` are

    def sums(self, ends: Tensor, offsets: Tensor, values: Tensor) -> Tensor:
        keys, wide = (offsets.to(torch.int64) + 1) * _GOLDEN, _wide(values)
        total = (((wide ^ _down(wide, 32)) + 1) * (keys ^ _down(keys, 32) | 1)).cumsum(0)
        upto = torch.cat([total.new_zeros(1), total]).index_select(0, ends)
        return upto.diff(prepend=total.new_zeros(1))

    def write(self, writes: Writes) -> Tensor:
        found = []
        for target, (at, end) in zip(writes.targets, itertools.pairwise([0, *writes.ends.tolist()]), strict=True):
            self.scatter(target, writes.offsets[at:end], writes.values[at:end])
            found.append(target.index_select(0, writes.offsets[at:end]))
        return self.sums(writes.ends, writes.offsets, torch.cat(found))


def _moved(before: Tensor, steps: Tensor, ordered: bool) -> Tensor:
    """Return the bits that are ``steps`` places after ``before``."""
    width = 8 * before.element_size()
    top, mask = _signed(1 << (width - 1)), _signed((1 << width) - 1)
    if not ordered:
        return before + steps  # wraps at the width
    old = _wide(before)
    line = torch.where((old & top) != 0, old ^ mask, old ^ top)
    place = (line + _wide(steps)) & mask
    return torch.where((place & top) != 0, place ^ top, place ^ mask).to(before.dtype)


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
