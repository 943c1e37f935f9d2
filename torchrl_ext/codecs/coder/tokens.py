"""A change as two numbers, and a number as a token and raw bits; compiled into the loops of the files beside.

A changed element is a *gap* (unchanged elements since the last changed one) and a *step* (units in the last place,
counted on one ordered line of integers). Float formats are sign-magnitude: mapped so that -0.0 and 0.0 are neighbours
and NaNs lie beyond the infinities, every bit pattern has a place of its own and the map is a bijection. Steps are taken
modulo 2^width, zigzagged (-1, 1, -2, 2, ... become 1, 2, 3, 4) and lowered by one, since 0 does not occur.

A value ``v`` is split in a token below 256 and raw bits: ``v`` itself below 16; above, its bit length and the two bits
after the leading one make the token, the remaining low bits are raw.
"""

from __future__ import annotations

import numpy as np

from torchrl_ext.kernels.jit import bit_length, helper, line

__all__ = ["put", "split", "take", "unzigzag", "zigzag"]

_0, _1, _2, _3 = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(3)
_16, _32 = np.uint64(16), np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


@helper
def zigzag(a, b, top, mask, ordered):
    """The lowered zigzag step between two bit patterns."""
    step = (line(b, top, mask, ordered) - line(a, top, mask, ordered)) & mask
    if step & top:
        return (mask - step) << _1  # 2|step| - 1, lowered by one
    return (step << _1) - _1


@helper
def unzigzag(value, mask):
    """The step, modulo 2^width, of a lowered zigzag one."""
    value = value + _1
    if value & _1:
        return (mask - (value >> _1)) & mask
    return value >> _1


@helper
def split(value):
    """Token, raw bits, number of raw bits; without a branch, so that loops over it become vectors."""
    length = bit_length(value | _1)
    large = value >= _16
    count = np.uint64(length - 3) if large else _0
    token = np.uint8(16 + (length - 5) * 4 + np.int64((value >> count) & _3)) if large else np.uint8(value)
    return token, value & ((_1 << count) - _1), count


@helper
def put(raw, used, acc, filled, value, count):
    """Append the low ``count`` (0 to 61) bits of ``value`` to ``raw`` (uint32); without a branch in the common case."""
    if count > 32:
        raw[used] = np.uint32((acc | (value << np.uint64(filled))) & _LOW)
        acc = (acc | ((value & _LOW) << np.uint64(filled))) >> _32
        used += 1
        value >>= _32
        count -= 32
    acc |= (value & ((_1 << np.uint64(count)) - _1)) << np.uint64(filled)
    filled += count
    raw[used] = np.uint32(acc & _LOW)
    full = np.int64(filled >= 32)
    used += full
    acc >>= np.uint64(32 * full)
    return used, acc, filled - 32 * full


@helper
def take(raw, at, acc, filled, token):
    """The value of a token; raw bits come from ``acc``, refilled from ``raw`` (uint8, whole 32-bit words).

    Reads zeros beyond the end of ``raw``; the index tells.
    """
    if token < 16:
        return np.uint64(token), at, acc, filled
    count = (np.int64(token) >> 2) - 2
    value, shift = np.uint64(4 + (token & 3)) << np.uint64(count), 0
    while True:
        now = min(count, 32)
        if filled < now:
            if at + 4 <= raw.size:
                word = np.uint64(raw[at]) | np.uint64(raw[at + 1]) << np.uint64(8)
                word |= np.uint64(raw[at + 2]) << np.uint64(16) | np.uint64(raw[at + 3]) << np.uint64(24)
                acc |= word << np.uint64(filled)
            at += 4
            filled += 32
        value |= (acc & ((_1 << np.uint64(now)) - _1)) << np.uint64(shift)
        acc >>= np.uint64(now)
        filled -= now
        if now == count:
            return value, at, acc, filled
        shift, count = shift + now, count - now
