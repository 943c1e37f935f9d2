"""The reading half of the entropy coder (see `torchrl_ext.codecs.coder.encode`), which trusts no input."""

from __future__ import annotations

import numpy as np

from torchrl_ext.codecs.coder.encode import LOWEST, lanes_for
from torchrl_ext.codecs.coder.models import BITS, TOTAL, read_model
from torchrl_ext.kernels.jit import helper, njit

__all__ = ["ERRORS", "decode_body", "untokenise", "unwalk"]

ERRORS = {
    1: "it ends too early",
    2: "it counts more changes than the block has elements",
    3: "a probability table is malformed",
    4: "the coded tokens do not end where they must",
    5: "contexts are repeated, out of order or unknown",
}
_SLOT, _BITS = np.uint64(TOTAL - 1), np.uint64(BITS)
_0, _1, _LOW = np.uint64(0), np.uint64(1), np.uint64(0xFFFFFFFF)


@helper
def _read_varint(data, at, end):
    value, shift = np.int64(0), 0
    while at >= 0 and at < end and shift < 42:
        byte = np.int64(data[at])
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return np.int64(0), np.int64(-1)


@helper
def _pull(x, slots, data, at, last):
    """Return state after a token, index of the next word, token; branchless, since every third token needs a word."""
    entry = np.uint64(slots[x & _SLOT])
    x = ((entry >> np.uint64(8)) & _SLOT) * (x >> _BITS) + (x >> _BITS) + (entry >> np.uint64(20))
    short = np.uint64(x < LOWEST)
    here = min(at, last)  # damaged bytes ask for more words than there are; the end of the run tells
    word = np.uint64(data[here]) | np.uint64(data[here + 1]) << np.uint64(8)
    x = (x << (short << np.uint64(4))) | (word & (np.uint64(0) - short))
    return x, at + 2 * np.int64(short), np.uint8(entry & np.uint64(255))


@helper
def _decode_run(tokens, low, high, lanes, freq, slots, states, data, at, last):
    """Decode a run of tokens; slots pack token (8 bits), frequency - 1 (12 bits), offset in its range (12 bits)."""
    start = 0
    for t in range(256):
        for i in range(freq[t]):
            slots[start + i] = t | ((freq[t] - 1) << 8) | (i << 20)
        start += freq[t]
    k = low
    while k < high and (k & 3 or not lanes):
        states[k & lanes], at, tokens[k] = _pull(states[k & lanes], slots, data, at, last)
        k += 1
    x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
    while k + 4 <= high:
        x0, at, tokens[k] = _pull(x0, slots, data, at, last)
        x1, at, tokens[k + 1] = _pull(x1, slots, data, at, last)
        x2, at, tokens[k + 2] = _pull(x2, slots, data, at, last)
        x3, at, tokens[k + 3] = _pull(x3, slots, data, at, last)
        k += 4
    states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    while k < high:
        states[k & 3], at, tokens[k] = _pull(states[k & 3], slots, data, at, last)
        k += 1
    return at


@njit
def decode_body(data, size, named):
    """Decode the tokens of one block, trusting nothing; the inverse of `encode_body`.

    Args:
        data: uint8, the body.
        size: elements of the block.
        named: whether ids are written.

    Returns:
        Error (a key of `ERRORS`, 0 for none), gap tokens uint8 (n,), step tokens uint8 (n,), ids uint8 (C,), starts
        int64 (C + 1,), and the range of ``data`` with the raw bits.
    """
    nothing, no_starts = np.zeros(0, np.uint8), np.zeros(1, np.int64)
    end = data.size
    number, at = _read_varint(data, 0, end)
    if at < 0 or number < 1 or number > (256 if named else 1):
        return 5, nothing, nothing, nothing, no_starts, 0, 0
    follows, at = at, at + ((number + 6) // 8 if named else 0)
    if at > end:
        return 1, nothing, nothing, nothing, no_starts, 0, 0
    ids, starts = np.zeros(number, np.uint8), np.zeros(number + 1, np.int64)
    freq, last = np.zeros((2 * number, 256), np.int64), -1
    for c in range(number):
        if named and c and (data[follows + (c - 1) // 8] >> ((c - 1) & 7)) & 1:
            last += 1
        elif named:
            if at >= end or data[at] <= last:
                return 5, nothing, nothing, nothing, no_starts, 0, 0
            last = np.int64(data[at])
            at += 1
        if last > 255:
            return 5, nothing, nothing, nothing, no_starts, 0, 0
        ids[c] = max(0, last)
        count, at = _read_varint(data, at, end)
        starts[c + 1] = starts[c] + count
        if at < 0 or count < 1 or starts[c + 1] > size:
            return 2, nothing, nothing, nothing, no_starts, 0, 0
        at = read_model(data, at, end, freq[c])
        if at < 0:
            return 3, nothing, nothing, nothing, no_starts, 0, 0
    fresh, at = at, at + (number + 6) // 8
    if at > end:
        return 1, nothing, nothing, nothing, no_starts, 0, 0
    group, g = np.zeros(number, np.int64), -1
    for c in range(number):
        if c == 0 or (data[fresh + (c - 1) // 8] >> ((c - 1) & 7)) & 1:
            g += 1
            at = read_model(data, at, end, freq[number + g])
            if at < 0:
                return 3, nothing, nothing, nothing, no_starts, 0, 0
        group[c] = g
    raw_words, at = _read_varint(data, at, end)
    coded, at = _read_varint(data, at, end)
    lanes = lanes_for(starts[number])
    if at < 0 or at + 4 * (lanes + 1) + 4 * raw_words + 2 * coded != end:
        return 1, nothing, nothing, nothing, no_starts, 0, 0
    states = np.zeros(4, np.uint64)
    for lane in range(4):
        states[lane] = np.uint64(0) if lane <= lanes else LOWEST
    for lane in range(lanes + 1):
        for byte in range(4):
            states[lane] |= np.uint64(data[at]) << np.uint64(8 * byte)
            at += 1
        if states[lane] < LOWEST or states[lane] >> np.uint64(31):
            return 4, nothing, nothing, nothing, no_starts, 0, 0
    raw_end = at + 4 * raw_words
    found = starts[number]
    gap_tokens, step_tokens = np.empty(found, np.uint8), np.empty(found, np.uint8)
    slots, word = np.empty(TOTAL, np.uint32), raw_end
    for c in range(number):
        low, high = starts[c], starts[c + 1]
        word = _decode_run(gap_tokens, low, high, lanes, freq[c], slots, states, data, word, end - 2)
        word = _decode_run(step_tokens, low, high, lanes, freq[number + group[c]], slots, states, data, word, end - 2)
    for lane in range(4):
        if states[lane] != LOWEST:
            word = -1
    if word != end:
        return 4, nothing, nothing, nothing, no_starts, 0, 0
    return 0, gap_tokens, step_tokens, ids, starts, at, raw_end


@helper
def unzigzag(value, mask):
    """Return the step, modulo 2^width, of a lowered zigzag one."""
    value = value + _1
    if value & _1:
        return (mask - (value >> _1)) & mask
    return value >> _1


@helper
def take(raw, at, acc, filled, token):
    """Return the value of a token; raw bits come from ``acc``, refilled from ``raw`` (uint8, whole 32-bit words).

    Reads zeros beyond the end of ``raw``; the index that is returned shows it.
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


@njit
def untokenise(gaps, values, raw, size, start, mask, indices, steps):
    """Fill indices (from ``start``) and steps of a block; the inverse of `torchrl_ext.codecs.coder.tokens.tokenise`.

    Args:
        gaps, values: uint8 tokens.
        raw: uint8, the raw bits.
        indices, steps: filled; shape (n,).

    Returns:
        False where the changes leave the block, or the raw bits are more or fewer than the tokens say.
    """
    last, at, acc, filled = np.int64(-1), 0, _0, 0
    for k in range(gaps.size):
        gap, at, acc, filled = take(raw, at, acc, filled, gaps[k])
        if gap >= np.uint64(size):
            return False
        last += np.int64(gap) + 1
        if last >= size:
            return False
        value, at, acc, filled = take(raw, at, acc, filled, values[k])
        indices[k] = start + last
        steps[k] = unzigzag(value, mask)
    return at == raw.size


@njit
def unwalk(old, shift, select, ids, starts, gaps, values, raw, start, mask, indices, steps):
    """Fill indices and steps as `untokenise` does, by the walk over the base ``old`` that the writer made.

    Args:
        ids, starts: context ``ids[c]`` owns tokens ``starts[c]`` to ``starts[c + 1]``.
    """
    at, acc, filled = 0, _0, 0
    far, wide = np.empty(gaps.size, np.uint64), np.empty(gaps.size, np.uint64)
    for k in range(gaps.size):
        far[k], at, acc, filled = take(raw, at, acc, filled, gaps[k])
        wide[k], at, acc, filled = take(raw, at, acc, filled, values[k])
    if at != raw.size:
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
        indices[found] = start + i
        steps[found] = unzigzag(wide[k], mask)
        found += 1
        k += 1
        place[context] = k
        left[context] = np.int64(far[k] & _LOW) if k < stop[context] else np.int64(1) << 62
    return found == gaps.size
