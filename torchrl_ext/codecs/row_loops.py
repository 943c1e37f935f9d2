"""Compiled loops of `torchrl_ext.codecs.rows`; importing this imports numba."""

from __future__ import annotations

import numpy as np

from torchrl_ext.kernels.jit import helper, njit

__all__ = ["decode_run", "untokenise", "unwalk"]

_BITS, _SLOT, _LOWEST = np.uint64(12), np.uint64(4095), np.uint64(1 << 15)
_0, _1, _16, _LOW = np.uint64(0), np.uint64(1), np.uint64(16), np.uint64(0xFFFFFFFF)


@njit
def decode_run(tokens, first, freq, states, words, at):
    """Decode tokens that share a table.

    Args:
        tokens: uint8 shape (n,), filled.
        first: number of the first one in its stream: they belong to the states in turns.
        freq: int64 shape (256,), sums to 4096.
        states: uint64 shape (lanes,), changed.
        words: uint16, with one more than there are.
        at: the next word.

    Returns:
        The next word after these; damaged bytes ask for more words than there are.
    """
    slots, starts, start = np.empty(4096, np.uint8), np.empty(256, np.uint64), 0
    for token in range(256):
        starts[token] = start
        for _ in range(freq[token]):
            slots[start] = token
            start += 1
    lanes = states.size - 1
    for k in range(tokens.size):
        x = states[(first + k) & lanes]
        slot = x & _SLOT
        token = slots[slot]
        x = np.uint64(freq[token]) * (x >> _BITS) + slot - starts[token]
        if x < _LOWEST:
            x = x << _16 | np.uint64(words[min(at, words.size - 1)])
            at += 1
        tokens[k], states[(first + k) & lanes] = token, x
    return at


@helper
def _step(value, mask):
    """Return the step, modulo 2^width, of a zigzag one less 1."""
    value = value + _1
    return (mask - (value >> _1)) & mask if value & _1 else value >> _1


@helper
def _take(raw, at, acc, filled, token):
    """Return the value of a token; raw bits come from ``acc``, refilled from ``raw`` (uint32), which ends with a 0."""
    if token < 16:
        return np.uint64(token), at, acc, filled
    count = (np.int64(token) >> 2) - 2
    value, shift = np.uint64(4 + (token & 3)) << np.uint64(count), 0
    while True:
        now = min(count, 32)
        if filled < now:
            acc |= np.uint64(raw[min(at, raw.size - 1)]) << np.uint64(filled)
            at += 1
            filled += 32
        value |= (acc & ((_1 << np.uint64(now)) - _1)) << np.uint64(shift)
        acc >>= np.uint64(now)
        filled -= now
        if now == count:
            return value, at, acc, filled
        shift, count = shift + now, count - now


@njit
def untokenise(gaps, values, raw, size, mask, positions, steps):
    """Fill positions (int64) and steps of a block of ``size`` units.

    Args:
        gaps, values: uint8 tokens, shape (n,).
        raw: uint32, the raw bits, and a 0.
        mask: all bits of a unit.

    Returns:
        Whether the changes lie in the block, and the raw bits are as many as the tokens say.
    """
    last, at, acc, filled = np.int64(-1), 0, _0, 0
    for k in range(gaps.size):
        gap, at, acc, filled = _take(raw, at, acc, filled, gaps[k])
        if gap >= np.uint64(size):
            return False
        last += np.int64(gap) + 1
        if last >= size:
            return False
        value, at, acc, filled = _take(raw, at, acc, filled, values[k])
        positions[k], steps[k] = last, _step(value, mask)
    return at == raw.size - 1


@njit
def unwalk(old, shift, select, ids, starts, gaps, values, raw, mask, positions, steps):
    """Fill positions and steps as `untokenise` does, by the walk over the base ``old`` that the writer made.

    Args:
        ids, starts: context ``ids[c]`` owns tokens ``starts[c]`` to ``starts[c + 1]``.
    """
    at, acc, filled = 0, _0, 0
    far, wide = np.empty(gaps.size, np.uint64), np.empty(gaps.size, np.uint64)
    for k in range(gaps.size):
        far[k], at, acc, filled = _take(raw, at, acc, filled, gaps[k])
        wide[k], at, acc, filled = _take(raw, at, acc, filled, values[k])
    if at != raw.size - 1:
        return False
    left, place, stop = np.full(256, np.int64(1) << 62), np.zeros(256, np.int64), np.zeros(256, np.int64)
    for c in range(ids.size):
        place[ids[c]], stop[ids[c]] = starts[c], starts[c + 1]
        left[ids[c]] = np.int64(far[starts[c]] & _LOW)
    found = 0
    for i in range(old.size):
        context = (np.uint64(old[i]) >> shift) & select
        if left[context]:
            left[context] -= 1
            continue
        k = place[context]
        positions[found], steps[found] = i, _step(wide[k], mask)
        found += 1
        k += 1
        place[context] = k
        left[context] = np.int64(far[k] & _LOW) if k < stop[context] else np.int64(1) << 62
    return found == gaps.size
