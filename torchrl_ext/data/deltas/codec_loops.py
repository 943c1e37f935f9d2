"""Compiled loops of the codecs in `blocks` and `tokens`; importing this imports numba."""

from __future__ import annotations

import numpy as np

from torchrl_ext.data.deltas.jit import bit_length, changed64, count_ones, count_trailing_zeros, helper, line, njit

__all__ = [
    "compare",
    "count_contexts",
    "list_mask",
    "raw_bits",
    "set_mask",
    "sort_changes",
    "steps_between",
    "tokenise",
    "unpack",
    "unsort_changes",
]

_0, _1, _2, _3, _5, _6, _16, _31, _32, _63, _64 = (np.uint64(n) for n in (0, 1, 2, 3, 5, 6, 16, 31, 32, 63, 64))


@njit
def set_mask(positions, mask):
    """Set a bit of ``mask``, uint64, for each position; ``mask`` is all zeros before."""
    word, last = _0, _0
    for k in range(positions.size):
        position = np.uint64(positions[k])
        at = position >> _6
        word = (word if at == last else _0) | _1 << (position & _63)  # no load that waits for the store before it
        mask[at], last = word, at


@njit
def compare(old, new, at, mask):
    """Set a bit of ``mask`` for each element that differs: bit ``at`` for element 0."""
    shift, word, whole = np.uint64(at) & _63, at >> 6, old.size // 64 * 64
    for i in range(0, whole, 64):
        bits = changed64(old, new, i)
        mask[word] |= bits << shift
        if shift:
            mask[word + 1] |= bits >> (_64 - shift)
        word += 1
    for i in range(whole, old.size):
        mask[(at + i) >> 6] |= np.uint64(old[i] != new[i]) << (np.uint64(at + i) & _63)


@njit
def list_mask(mask, positions):
    """List which bits of ``mask`` are set, as long as there is room; return how many are."""
    found, room = 0, positions.size
    for at in range(mask.size):
        word, more = mask[at], count_ones(mask[at])
        if found + more <= room:
            k = found
            while word:
                positions[k] = 64 * at + count_trailing_zeros(word)
                word &= word - _1
                k += 1
        found += more
    return found


@njit
def count_contexts(old, positions, steps, top, mask, shift, select, counts):
    """Count the units of each context, by what happens to them.

    Args:
        old: unsigned, shape (n,); ``(old >> shift) & select`` is the context of a unit, below 256.
        positions, steps: shape (k,): what changed.
        counts: int64 shape (256, 17), zeros before: about how many units there are (of a large block an eighth is
            looked at), and exactly those whose steps have 1, 2... bits, zigzagged.
    """
    span = 512 if old.size > 1 << 16 else old.size
    apart = 8 * span if old.size > 1 << 16 else max(1, span)
    seen, looked = np.zeros((4, 256), np.uint32), 0  # four, so that equal neighbours do not wait for each other
    for begin in range(0, old.size, apart):
        end = min(old.size, begin + span)
        for t in range(begin, end):
            seen[t & 3, (np.uint64(old[t]) >> shift) & select] += np.uint32(1)
        looked += end - begin
    for k in range(positions.size):
        step = np.uint64(steps[k])
        size = (mask - step) << _1 | _1 if step & top else step << _1
        kind = min(16, bit_length(size | _1))
        counts[(np.uint64(old[positions[k]]) >> shift) & select, kind] += 1
    for context in range(256):
        units, changed = 0, 0
        for lane in range(4):
            units += np.int64(seen[lane, context])
        for kind in range(1, 17):
            changed += counts[context, kind]
        counts[context, 0] = max(changed, units * old.size // looked)


@njit
def sort_changes(old, positions, steps, shift, select, groups, starts, ranks, moved):
    """Bring changes into the order of their groups, and count the units of its group before each.

    Args:
        old, positions, steps, shift, select: as in `count_contexts`.
        groups: uint8 shape (256,): the group of each context.
        starts: int64 shape (256,): where the changes of each group begin; moved to where they end.
        ranks: int32 shape (k,), filled: units of the same group before each changed one.
        moved: like ``steps``, filled: the steps, in the order of ``ranks``.
    """
    counts, begin = np.zeros((4, 256), np.uint32), 0
    for k in range(positions.size):
        place = np.int64(positions[k])
        for t in range(begin, place):
            counts[t & 3, groups[(np.uint64(old[t]) >> shift) & select]] += np.uint32(1)
        group = groups[(np.uint64(old[place]) >> shift) & select]
        at = starts[group]
        ranks[at] = counts[0, group] + counts[1, group] + counts[2, group] + counts[3, group]
        moved[at], starts[group], begin = steps[k], at + 1, place


@njit
def unsort_changes(old, shift, select, groups, starts, ends, ranks, moved, positions, steps):
    """Fill positions and steps by the walk over ``old`` that `sort_changes` made; its inverse.

    Args:
        starts, ends: int64 shape (256,): which of ``ranks`` are those of each group, increasing.

    Returns:
        How many changes were met: fewer than there are ranks where some are not below the units of their group.
    """
    left, place, found = np.empty(256, np.int64), starts.copy(), 0
    for group in range(256):
        left[group] = np.int64(ranks[starts[group]]) if starts[group] < ends[group] else old.size
    for i in range(old.size):
        group = groups[(np.uint64(old[i]) >> shift) & select]
        if left[group]:
            left[group] -= 1
            continue
        k = place[group]
        positions[found], steps[found] = i, moved[k]
        found, place[group] = found + 1, k + 1
        left[group] = np.int64(ranks[k + 1]) - np.int64(ranks[k]) - 1 if k + 1 < ends[group] else old.size
    return found


_ESCAPE = 84  # the class of gaps of 2^21 or more, whose 64 bits are all raw; 85 classes x 3 steps fit into a byte
_CHUNK = 4096  # changes that are worked on together: they stay in the processor's nearest cache
_LOW, _FAR = np.uint64(0xFFFFFFFF), np.uint64(1 << 21)

_BITS = np.array([(token - 16) // 4 + 2 if token >= 16 else 0 for token in range(256)], np.uint64)
"""Raw bits that follow a token, and what they are added to."""
_BASE = np.array([4 + token % 4 << (token - 16) // 4 + 2 if token >= 16 else token for token in range(256)], np.uint64)
_MASK = (_1 << _BITS) - _1
_JOINT_BITS, _JOINT_BASE, _JOINT_MASK = (table.repeat(3)[:256].copy() for table in (_BITS, _BASE, _MASK))
_JOINT_BITS[3 * _ESCAPE :], _JOINT_BASE[3 * _ESCAPE :], _JOINT_MASK[3 * _ESCAPE :] = 64, _0, ~_0


@helper
def _split(value):
    """Return the token, the raw bits and how many these are; without a branch."""
    length = bit_length(value | _1)
    large = value >= _16
    count = np.uint64(length - 3) if large else _0
    token = 16 + (length - 5) * 4 + np.int64((value >> count) & _3) if large else np.int64(value)
    return token, value & ((_1 << count) - _1), np.int64(count)


@helper
def _zigzag(step, top, mask):
    """Return 0, 1, 2, 3... for the steps -1, 1, -2, 2... modulo 2^width."""
    return (mask - step) << _1 if step & top else (step << _1) - _1


@helper
def _put_all(raw, used, acc, filled, lows, counts):
    """Append ``counts`` bits (0 to 64) of each of ``lows`` to ``raw[:used]`` and the ``filled`` bits of ``acc``."""
    for k in range(counts.size):
        value, count = lows[k], np.uint64(counts[k])
        if count > _32:
            raw[used] = np.uint32((acc | (value << filled)) & _LOW)
            acc = (acc | ((value & _LOW) << filled)) >> _32
            used, value, count = used + _1, value >> _32, count - _32
        acc |= value << filled
        filled += count
        raw[used] = np.uint32(acc & _LOW)
        full = filled >> _5
        used, acc, filled = used + full, acc >> (full << _5), filled & _31
    return used, acc, filled


@helper
def _get(low, middle, high, shift, count):
    """Return bits from bit ``shift`` of three words on: 64 where ``count`` is above 32, else 33 or more, to be masked.

    It is given no array: each call would count a reference to it, which takes ten times as long as all the rest.
    """
    value = (np.uint64(low) | np.uint64(middle) << _32) >> shift
    if count > _32:
        value = (value & _LOW) | ((np.uint64(middle) | np.uint64(high) << _32) >> shift) << _32
    return value


@njit
def steps_between(before, after, top, mask, ordered, steps):
    """Set ``steps`` to the steps from ``before`` to ``after`` on the ordered line, modulo 2^width; all shape (k,)."""
    for k in range(before.size):
        step = line(np.uint64(after[k]), top, mask, ordered) - line(np.uint64(before[k]), top, mask, ordered)
        steps[k] = step & mask


@helper
def _gaps(positions, last, gaps):
    gaps[0] = np.uint64(positions[0] - last - 1)
    for k in range(1, positions.size):
        gaps[k] = np.uint64(positions[k] - positions[k - 1] - 1)


@helper
def _zigzags(steps, top, mask, values):
    for k in range(steps.size):
        values[k] = _zigzag(np.uint64(steps[k]), top, mask)


@helper
def _split_gaps(gaps, values, joint, lows, counts):
    """Fill joint tokens, and the raw bits of gaps with their numbers."""
    for k in range(joint.size):
        token, low, count = _split(gaps[k])
        far = gaps[k] >= _FAR
        lows[k], counts[k] = gaps[k] if far else low, np.uint8(64) if far else np.uint8(count)
        joint[k] = np.uint8((_ESCAPE if far else token) * 3 + np.int64(min(values[k], _2)))


@helper
def _split_steps(values, others, lows, counts):
    for k in range(others.size):
        token, lows[k], count = _split(np.uint64(values[k]))
        others[k], counts[k] = np.uint8(token), np.uint8(count)


@njit
def tokenise(positions, steps, top, mask, joint, others, raw):
    """Turn changes into tokens and raw bits.

    Args:
        positions: int32 or int64, shape (k,), k > 0, increasing.
        steps: unsigned, shape (k,), not 0.
        top, mask: highest bit and all bits of a unit, uint64.
        joint: uint8 shape (k,), filled.
        others: uint8 shape (k,), filled as far as steps are neither 1 nor -1.
        raw: uint32, filled with the raw bits of all gaps, then of all other steps; has room for them and a word more.

    Returns:
        How many others there are, and how many words of raw bits.
    """
    used, acc, filled, found, last = _0, _0, _0, 0, np.int64(positions[0]) - 1
    gaps, values, lows = np.empty((3, _CHUNK), np.uint64)
    counts, odd = np.empty(_CHUNK, np.uint8), np.empty(positions.size + 1, steps.dtype)
    for at in range(0, positions.size, _CHUNK):
        end = min(at + _CHUNK, positions.size)
        _gaps(positions[at:end], last, gaps)
        last = np.int64(positions[end - 1])
        _zigzags(steps[at:end], top, mask, values)
        _split_gaps(gaps, values, joint[at:end], lows, counts)
        used, acc, filled = _put_all(raw, used, acc, filled, lows, counts[: end - at])
        for k in range(end - at):
            odd[found] = values[k] - _2
            found += np.int64(values[k] >= _2)
    for at in range(0, found, _CHUNK):
        end = min(at + _CHUNK, found)
        _split_steps(odd[at:end], others[at:end], lows, counts)
        used, acc, filled = _put_all(raw, used, acc, filled, lows, counts[: end - at])
    if filled:
        raw[used] = np.uint32(acc & _LOW)
        used += _1
    return found, np.int64(used)


@njit
def raw_bits(joint, others):
    """Return how many raw bits follow tokens, and how many of the joint ones announce another step."""
    bits, found = _0, 0
    for k in range(joint.size):
        bits += _JOINT_BITS[joint[k]]
        found += np.int64(joint[k]) % 3 == 2
    for k in range(others.size):
        bits += _BITS[others[k]]
    return np.int64(bits), found


@njit
def unpack(joint, others, raw, first, span, top, mask, positions, steps):
    """Fill positions and steps: the inverse of `tokenise`.

    Args:
        joint, others, raw: tokens and bits, of lengths that `raw_bits` has confirmed; two more words of ``raw``.
        first: the first position.
        span: positions lie below.
        top, mask: as in `tokenise`.

    Returns:
        Whether they do, and every step fits into a unit.
    """
    at, limit, bad = _0, np.uint64(span), False
    position = np.uint64(first) - _1
    for k in range(joint.size):
        count = _JOINT_BITS[joint[k]]
        word = at >> _5
        bits = _get(raw[word], raw[word + _1], raw[word + _2], at & _31, count)
        gap = _JOINT_BASE[joint[k]] + (bits & _JOINT_MASK[joint[k]])
        at += count
        position += gap + _1
        bad |= gap >= limit or position >= limit  # seen before a sum could pass 2^64
        positions[k] = position
    odd, most = np.empty(others.size + 1, steps.dtype), _0
    for k in range(others.size):
        count = _BITS[others[k]]
        word = at >> _5
        bits = _get(raw[word], raw[word + _1], raw[word + _2], at & _31, count)
        value = _BASE[others[k]] + (bits & _MASK[others[k]])
        at += count
        odd[k] = value & mask
        most = max(most, value)
    other = _0
    for k in range(joint.size):
        kind = np.uint64(joint[k] % 3)
        more = kind >> _1
        value = kind + more * np.uint64(odd[other])
        other += more
        sign = value & _1
        steps[k] = (((~(value >> _1)) ^ (_0 - sign)) + sign) & mask
    return not bad and positions[0] == first and most <= mask - _3
