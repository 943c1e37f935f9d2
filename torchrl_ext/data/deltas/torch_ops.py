"""Loops over bits by torch's operators, on any device; and which loops work where.

The functions without an underscore are `torchrl_ext.data.deltas.bits.Kernels`.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.base.devices import upload
from torchrl_ext.data.deltas.bits import ROW, SEED, Kernels, Piece, Places, Range, Writes, linear_keys
from torchrl_ext.data.weights.view import View

__all__ = ["exchange", "kernels_on", "land", "on_host", "scatter", "sums", "words"]

on_host = False

_AT_ONCE = 1 << 20  # elements whose words are held at a time, 8 bytes each in a dozen temporaries
_ROW_BYTES = 4 * ROW
_CHUNK_BYTES = 4096 * _ROW_BYTES  # bytes whose words are: twice as many in a temporary


def _signed(constant: int) -> int:
    """Return a 64-bit word as torch's int64 has it; int64 multiplication and addition wrap as unsigned ones do."""
    return constant - 2**64 if constant >= 2**63 else constant


_GOLDEN, _M1, _M2, _M3 = map(
    _signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
)  # as in `torchrl_ext.data.deltas.loops`


def _down(words: Tensor, count: int) -> Tensor:
    """Shift logically to the right, as torch's own shift is arithmetic."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _wide(bits: Tensor) -> Tensor:
    """Return bits as int64, filled up with zeros."""
    width = 8 * bits.element_size()
    return bits.to(torch.int64) & ((1 << width) - 1) if width < 64 else bits


def _factors(rows: Tensor) -> Tensor:
    """Return what the two sums of each of these rows of words are multiplied by: int64, shape (k, 2)."""
    one = rows * _GOLDEN + _signed(SEED)
    one = (one ^ _down(one, 30)) * _M1
    one = (one ^ _down(one, 27)) * _M2
    one = one ^ _down(one, 31)
    two = (one ^ _down(one, 32)) * _M3
    return torch.stack([one, two ^ _down(two, 29)], 1) | 1


@functools.cache
def _keys_on(device: torch.device) -> Tensor:
    return torch.from_numpy(linear_keys().astype("int64").T.copy()).to(device)


def _terms(positions: Tensor, width: int, low: Tensor, high: Tensor) -> Tensor:
    """Return what elements add to a digest: int64, shape (k, 2).

    Args:
        positions: int64, shape (k,).
        width: bytes of an element.
        low, high: int64, shape (k,): what their lower and their upper 32 bits count for.
    """
    byte = positions * width
    word, shift = byte >> 2, (byte & 3) << 3
    keys, at = _keys_on(positions.device), word & (ROW - 1)
    terms = (low << shift).unsqueeze(1) * keys.index_select(0, at)
    if width == 8:
        terms += high.unsqueeze(1) * keys.index_select(0, at + 1)
    return terms.mul_(_factors(torch.div(word, ROW, rounding_mode="floor")))


def _halves(bits: Tensor) -> tuple[Tensor, Tensor]:
    wide = _wide(bits)
    return wide & 0xFFFFFFFF, _down(wide, 32)


def _by_run(terms: Tensor, ends: Tensor) -> Tensor:
    """Return the sums of runs of rows: int64, shape (runs, ...); ``ends``, on the host, says where each ends."""
    upto = torch.cat([terms.new_zeros(1, *terms.shape[1:]), terms.cumsum(0)])
    return upto.index_select(0, upload(ends, terms.device)).diff(dim=0, prepend=upto[:1])


def words(pieces: Sequence[Piece]) -> Tensor:
    """As `torchrl_ext.data.deltas.bits.Kernels`."""
    runs = [piece for piece in pieces if not piece.dims]
    if len(runs) == len(pieces):
        return _words_of_runs(runs)
    own = iter(_words_of_runs(runs) if runs else ())
    return torch.stack([_words_of_view(piece) if piece.dims else next(own) for piece in pieces])


def land(places: Places, changes: Range) -> Writes | None:
    """As `torchrl_ext.data.deltas.bits.Kernels`."""
    from torchrl_ext.data.deltas.loops import translate

    found = translate(places, changes, here=False)
    if found is None:
        return None
    writes, where = found
    device, width, ends = writes.targets[0].device, writes.values.element_size(), writes.ends
    offsets, values = upload(writes.offsets, device), upload(writes.values, device)
    parts = zip(writes.targets, offsets.split(ends.diff(prepend=ends.new_zeros(1)).tolist()), strict=True)
    before = torch.cat([target.index_select(0, own) for target, own in parts])
    if changes.ordered is not None:
        values = _moved(before, values, changes.ordered)
    terms = []
    for own, old, new in zip(*(one.split(_AT_ONCE) for one in (upload(where, device), before, values)), strict=True):
        (low, high), (more, upper) = _halves(old), _halves(new)
        terms.append(_terms(own.to(torch.int64), width, more - low, upper - high))
    words, sums = _by_run(torch.cat(terms), ends), _sums(ends, offsets, values)
    return writes._replace(offsets=offsets, values=values, words=words, sums=sums)


def scatter(target: Tensor, offsets: Tensor, values: Tensor) -> None:
    """As `torchrl_ext.data.deltas.bits.Kernels`."""
    target.index_copy_(0, offsets.to(torch.int64), values)  # it takes no other; those of `land` are


def exchange(writes: Writes) -> Tensor:
    """As `torchrl_ext.data.deltas.bits.Kernels`."""
    stood, found = [], []
    for target, (at, end) in zip(writes.targets, itertools.pairwise([0, *writes.ends.tolist()]), strict=True):
        own = writes.offsets[at:end]
        stood.append(target.index_select(0, own))
        scatter(target, own, writes.values[at:end])
        found.append(target.index_select(0, own))
    writes.values.copy_(torch.cat(stood))
    return _sums(writes.ends, writes.offsets, torch.cat(found))


def sums(writes: Writes) -> Tensor:
    """Return what the values of each run add up to now, as ``sums`` of `torchrl_ext.data.deltas.bits.Writes`."""
    return _sums(writes.ends, writes.offsets, writes.values)


def _sums(ends: Tensor, offsets: Tensor, values: Tensor) -> Tensor:
    """Return ``sums`` of a list; arguments as in `Writes`."""
    keys, wide = (offsets.to(torch.int64) + 1) * _GOLDEN, _wide(values)
    return _by_run(((wide ^ _down(wide, 32)) + 1) * (keys ^ _down(keys, 32) | 1), ends)


def _words_of_view(piece: Piece) -> Tensor:
    """Return the words of a piece that is not straight: of a copy that is, or where it has gaps of each element."""
    device, count, (sizes, strides, to) = piece.memory.device, piece.destination.numel(), zip(*piece.dims, strict=True)
    if count == piece.end - piece.offset:
        copy = piece.memory.as_strided(sizes, to).contiguous().view(-1)
        return _words_of_runs([Piece(destination=copy, offset=piece.offset, strides=(1,))])[0]
    total = torch.zeros(2, dtype=torch.int64, device=device)
    for at in range(0, count, _AT_ONCE):
        index = torch.arange(at, min(at + _AT_ONCE, count), device=device)
        low, high = _halves(piece.memory.index_select(0, View(sizes, to).positions(index)))
        positions = View(sizes, strides, piece.offset).positions(index)
        total += _terms(positions, piece.memory.element_size(), low + 1, high + 1).sum(0)
    return total


def _words_of_runs(pieces: Sequence[Piece]) -> Tensor:
    """Return the words of straight pieces, at the speed of memory: by whole words, and rows of them.

    Bytes of a row that no element has count as zeros, and a word ``w`` as ``w - 2^31``, which is how an integer of 32
    bits with its top bit flipped reads. What is missing then depends on places alone, and is added at the end: for each
    row that, and what elements count for apart from their bits; less that for the ends of a run that are not there.
    """
    device, width = pieces[0].memory.device, pieces[0].memory.element_size()
    begins, ends = (torch.tensor([(piece.offset, piece.end) for piece in pieces]) * width).T
    first, last = begins // _ROW_BYTES, -(-ends // _ROW_BYTES)
    counts = torch.where(begins < ends, last - first, 0)
    stops = counts.cumsum(0)
    numbers = torch.arange(int(counts.sum())) + (first - stops + counts).repeat_interleave(counts)
    if not numbers.numel():
        return torch.zeros(len(pieces), 2, dtype=torch.int64, device=device)
    every = _ones(torch.tensor([_ROW_BYTES]), width)
    absent = (every - _ones(ends - (last - 1) * _ROW_BYTES, width)) * _factors(last - 1)
    absent += _ones(begins % _ROW_BYTES, width) * _factors(first)
    absent *= (counts > 0).unsqueeze(1)
    keys = _keys_on(device).T.contiguous()
    sums = [torch.stack([(rows * key).sum(1) for key in keys], 1) for rows in _rows(pieces, width, device)]
    flipped = torch.from_numpy(linear_keys().astype(np.int64)).sum(1) << 31
    terms = (torch.cat(sums) + upload(every + flipped, device)).mul_(_factors(upload(numbers, device)))
    return _by_run(terms, stops).sub_(upload(absent, device))


def _ones(end: Tensor, width: int) -> Tensor:
    """Return what elements in the bytes of a row below ``end`` add apart from their bits: int64, shape (n, 2)."""
    keys = torch.from_numpy(np.pad(linear_keys().astype(np.int64).T, ((0, 1), (0, 0))))
    each, word = {1: 0x1010101, 2: 0x10001}.get(width, 1), end >> 2  # of the elements of a word
    part = (torch.ones_like(end) << (8 * (end & 3))) - 1 & each
    return (keys.cumsum(0) - keys)[word] * each + keys[word] * part.unsqueeze(1)


def _rows(pieces: Sequence[Piece], width: int, device: torch.device) -> Iterator[Tensor]:
    """Yield rows of words, top bits flipped, that hold straight pieces one after the other: int32, shape (r, ROW)."""
    zeros = torch.zeros(_ROW_BYTES, dtype=torch.uint8, device=device)
    parts, filled = list[Tensor](), 0
    for piece in pieces:
        flat = piece.memory.view(torch.uint8)
        if not flat.numel():
            continue
        lead = piece.offset * width % _ROW_BYTES
        for own in (zeros[:lead], flat, zeros[: -(lead + flat.numel()) % _ROW_BYTES]):
            while own.numel():
                part, own = own.tensor_split([_CHUNK_BYTES - filled])
                parts.append(part)
                filled += part.numel()
                if filled == _CHUNK_BYTES:
                    yield _flipped(parts)
                    parts, filled = [], 0
    if parts:
        yield _flipped(parts)


def _flipped(parts: list[Tensor]) -> Tensor:
    own = parts[0]
    if len(parts) > 1 or own.data_ptr() % 4 or own.storage_offset() % 4:
        own = torch.cat(parts)
    return own.view(torch.int32).view(-1, ROW) ^ -(2**31)


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


def kernels_on(device: torch.device) -> Kernels:
    """Return the loops for tensors on ``device``: numba's on the host, else torch's operators."""
    if device.type != "cpu":
        return cast(Kernels, sys.modules[__name__])
    from torchrl_ext.data.deltas import loops

    return loops
