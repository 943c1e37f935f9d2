"""Triton programs of `torchrl_ext.kernels.cuda`; importing this imports triton.

`count_changes` and `list_changes` are the two passes of a compaction that keeps order: how many per block, then (the
host adds the counts up in between) each block writes from where the ones before it end.

What a program returns as words goes to `out`, two rows of one number per program, for the host to add up.
"""  # no `from __future__ import annotations` here: triton reads them

import triton
import triton.language as tl

from torchrl_ext.kernels.base import ROW, SEED

__all__ = ["count_changes", "land", "list_changes", "read", "view_words", "write"]

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # these as in `torchrl_ext.kernels.jit`
_M1 = tl.constexpr(0xBF58476D1CE4E5B9)
_M2 = tl.constexpr(0x94D049BB133111EB)
_M3 = tl.constexpr(0xD6E8FEB86659FD93)
_SEED, _ROW = tl.constexpr(SEED), tl.constexpr(ROW)


@triton.jit
def _block(BLOCK: tl.constexpr):
    return tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _wide(bits, WIDTH: tl.constexpr):
    """Return bits as uint64, filled up with zeros."""
    if WIDTH == 1:
        wide = bits.to(tl.uint8, bitcast=True).to(tl.uint64)
    elif WIDTH == 2:
        wide = bits.to(tl.uint16, bitcast=True).to(tl.uint64)
    elif WIDTH == 4:
        wide = bits.to(tl.uint32, bitcast=True).to(tl.uint64)
    else:
        wide = bits.to(tl.uint64, bitcast=True)
    return wide


@triton.jit
def _narrow(wide, WIDTH: tl.constexpr):
    """Return the lowest bytes of uint64, signed as bits are."""
    if WIDTH == 1:
        bits = wide.to(tl.uint8)
    elif WIDTH == 2:
        bits = wide.to(tl.uint16).to(tl.int16, bitcast=True)
    elif WIDTH == 4:
        bits = wide.to(tl.uint32).to(tl.int32, bitcast=True)
    else:
        bits = wide.to(tl.int64, bitcast=True)
    return bits


@triton.jit
def _fingerprint(positions, wide):
    z = positions.to(tl.uint64) * _GOLDEN + wide
    z = (z ^ (z >> 30)) * _M1
    z = (z ^ (z >> 27)) * _M2
    z = z ^ (z >> 31)
    y = (z ^ (z >> 32)) * _M3
    return z, y ^ (y >> 29)


@triton.jit
def _add_up(one, two, valid, out):
    """Store sums of words in this program's column; int64 sums wrap as unsigned ones do."""
    nothing = tl.zeros_like(one)
    at, programs = tl.program_id(0), tl.num_programs(0)
    tl.store(out + at, tl.sum(tl.where(valid, one, nothing).to(tl.int64, bitcast=True), 0))
    tl.store(out + programs + at, tl.sum(tl.where(valid, two, nothing).to(tl.int64, bitcast=True), 0))


@triton.jit
def _linear(positions, wide, keys, WIDTH: tl.constexpr):
    """Return the words that elements add to a linear digest; ``keys`` (int32) are of shape (2, ROW)."""
    byte = positions * WIDTH
    word, shift = byte >> 2, ((byte & 3) << 3).to(tl.uint64)
    at = word & (_ROW - 1)
    first, second = _fingerprint(word // _ROW, tl.zeros_like(wide) + _SEED)
    low = ((wide & 0xFFFFFFFF) + 1) << shift
    one, two = low * _wide(tl.load(keys + at), 4), low * _wide(tl.load(keys + _ROW + at), 4)
    if WIDTH == 8:
        high = (wide >> 32) + 1
        one += high * _wide(tl.load(keys + at + 1), 4)
        two += high * _wide(tl.load(keys + _ROW + at + 1), 4)
    return one * (first | 1), two * (second | 1)


@triton.jit
def _add_change(positions, before, after, valid, keys, out, WIDTH: tl.constexpr, LINEAR: tl.constexpr):
    if LINEAR:
        f_one, f_two = _linear(positions, before, keys, WIDTH)
        g_one, g_two = _linear(positions, after, keys, WIDTH)
    else:
        f_one, f_two = _fingerprint(positions, before)
        g_one, g_two = _fingerprint(positions, after)
    _add_up(g_one - f_one, g_two - f_two, valid, out)


@triton.jit
def count_changes(old, new, counts, size, BLOCK: tl.constexpr):
    """Count into ``counts`` (int64, one per program) how many elements of a block of ``old`` and ``new`` differ."""
    i = _block(BLOCK)
    valid = i < size
    differ = tl.load(old + i, mask=valid, other=0) != tl.load(new + i, mask=valid, other=0)
    tl.store(counts + tl.program_id(0), tl.sum(differ.to(tl.int32), 0).to(tl.int64))


@triton.jit
def list_changes(old, new, ends, places, before, after, size, BLOCK: tl.constexpr):
    """List places and bits of what differs; ``ends`` (int64) says how many there are up to the end of each block."""
    i = _block(BLOCK)
    valid = i < size
    a, b = tl.load(old + i, mask=valid, other=0), tl.load(new + i, mask=valid, other=0)
    differ = a != b
    rank = tl.cumsum(differ.to(tl.int32), 0)
    at = tl.load(ends + tl.program_id(0)) - tl.sum(differ.to(tl.int32), 0) + rank - 1
    tl.store(places + at, i.to(places.dtype.element_ty), mask=differ)
    tl.store(before + at, a, mask=differ)
    tl.store(after + at, b, mask=differ)


@triton.jit
def view_words(
    memory,
    dims,
    offset,
    size,
    keys,
    out,
    BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
    WIDTH: tl.constexpr,
    LINEAR: tl.constexpr,
):
    """Store words of a strided view of ``size`` elements; ``dims`` (int64) has ``DIMS`` rows ``(size, stride, to)``.

    ``keys`` (int32) are those of `torchrl_ext.kernels.base.linear_keys`, read where ``LINEAR``.
    """
    rest = _block(BLOCK)
    valid = rest < size
    positions, at = tl.zeros_like(rest) + offset, tl.zeros_like(rest)
    for k in tl.static_range(DIMS):
        row = dims + 3 * (DIMS - 1 - k)
        if k == DIMS - 1:  # what is left is this coordinate
            coordinate = rest
        else:
            coordinate = rest % tl.load(row)
            rest = rest // tl.load(row)
        positions += coordinate * tl.load(row + 1)
        at += coordinate * tl.load(row + 2)
    wide = _wide(tl.load(memory + at, mask=valid, other=0), WIDTH)
    if LINEAR:
        one, two = _linear(positions, wide, keys, WIDTH)
    else:
        one, two = _fingerprint(positions, wide)
    _add_up(one, two, valid, out)


@triton.jit
def land(
    target,
    dims,
    offset,
    positions,
    payload,
    size,
    offsets,
    values,
    inside,
    keys,
    out,
    BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    ORDERED: tl.constexpr,
    LINEAR: tl.constexpr,
):
    """Turn positions in a checkpoint tensor into offsets in ``target``, and steps (where ``STEPS``) into new bits.

    ``dims`` as in `view_words`, strides falling; without any, offset and position differ by ``offset`` alone.
    ``inside`` (int8) says which positions lie in the view; the others count for nothing.
    """
    i = _block(BLOCK)
    valid = i < size
    position = tl.load(positions + i, mask=valid, other=0).to(tl.int64)
    rest = position - offset
    fits, at = valid, rest
    if DIMS > 0:
        at = tl.zeros_like(rest)
        for k in tl.static_range(DIMS):
            row = dims + 3 * k
            coordinate = rest // tl.load(row + 1)
            fits = fits & (coordinate < tl.load(row))
            at += coordinate * tl.load(row + 2)
            rest -= coordinate * tl.load(row + 1)
        fits = fits & (rest == 0)
    before = _wide(tl.load(target + at, mask=fits, other=0), WIDTH)
    given = _wide(tl.load(payload + i, mask=valid, other=0), WIDTH)
    after = given
    if STEPS:
        top: tl.constexpr = 1 << (8 * WIDTH - 1)
        every: tl.constexpr = (1 << (8 * WIDTH)) - 1
        if ORDERED:  # sign-magnitude bits, placed on a line and back
            line = tl.where((before & top) != 0, before ^ every, before ^ top)
            line = (line + given) & every
            after = tl.where((line & top) != 0, line ^ top, line ^ every)
        else:
            after = (before + given) & every
    tl.store(offsets + i, at.to(offsets.dtype.element_ty), mask=valid)
    tl.store(values + i, _narrow(after, WIDTH), mask=valid)
    tl.store(inside + i, fits.to(tl.int8), mask=valid)
    _add_change(position, before, after, fits, keys, out, WIDTH, LINEAR)


# One compiled version per dtype: `land` has them made with an empty list, so that no pause waits for a compiler.
@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["addresses", "values"])
def write(addresses, values, size, BLOCK: tl.constexpr):
    """Write each value to its address (int64)."""
    i = _block(BLOCK)
    valid = i < size
    to = tl.load(addresses + i, mask=valid, other=0).to(values.dtype)
    tl.store(to, tl.load(values + i, mask=valid, other=0), mask=valid)


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["addresses", "values"])
def read(addresses, values, size, BLOCK: tl.constexpr):
    """Set ``values`` to what stands at the addresses (int64)."""
    i = _block(BLOCK)
    valid = i < size
    at = tl.load(addresses + i, mask=valid, other=0).to(values.dtype)
    tl.store(values + i, tl.load(at, mask=valid, other=0), mask=valid)
