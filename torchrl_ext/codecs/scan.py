"""One pass over old and new: what changed, as tokens ready for the entropy coder.

A changed element is a *gap* (unchanged elements since the last changed one) and a *step* (units in the last place,
counted on one ordered line of integers). Float formats are sign-magnitude: mapped so that -0.0 and 0.0 are neighbours
and NaNs lie beyond the infinities, every bit pattern has a place of its own and the map is a bijection. Steps are taken
modulo 2^width, zigzagged (-1, 1, -2, 2, ... become 1, 2, 3, 4) and lowered by one, since 0 does not occur.

A value ``v`` is split in a token below 256 and raw bits: ``v`` itself below 16; above, its bit length and the two bits
after the leading one make the token, the remaining low bits are raw.
"""

from __future__ import annotations

import numpy as np

from torchrl_ext.jit import GOLDEN, bit_length, changed64, count_ones, count_trailing_zeros, fingerprint, helper, njit

__all__ = [
    "count_changed",
    "move",
    "place_contexts",
    "place_plain",
    "plain_steps",
    "scan_contexts",
    "scan_plain",
    "sort_contexts",
    "survey",
]

_0, _1, _2, _3 = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(3)
_16, _32 = np.uint64(16), np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
CHUNK = 4096  # elements whose changed places are listed before they are worked on


@helper
def _line(bits, top, mask, ordered):
    """Place of a bit pattern on the ordered line; ``ordered`` is 1 for sign-magnitude formats, 0 for integers."""
    return bits ^ (top | ((_0 - np.uint64((bits & top) != _0)) & mask)) if ordered else bits


@helper
def _unline(place, top, mask, ordered):
    if ordered:
        return place ^ top if place & top else place ^ mask
    return place


@helper
def _zigzag(a, b, top, mask, ordered):
    step = (_line(b, top, mask, ordered) - _line(a, top, mask, ordered)) & mask
    if step & top:
        return (mask - step) << _1  # 2|step| - 1, lowered by one
    return (step << _1) - _1


@helper
def _unzigzag(value, mask):
    value = value + _1
    if value & _1:
        return (mask - (value >> _1)) & mask
    return value >> _1


@helper
def _token(value):
    """Token, number of raw bits."""
    if value < _16:
        return np.int64(value), np.int64(0)
    length = bit_length(value)
    return 16 + (length - 5) * 4 + np.int64((value >> np.uint64(length - 3)) & _3), length - 3


@helper
def _put(raw, used, acc, filled, value, count):
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
def _changed(old, new, begin, places):
    """Indices below ``begin + CHUNK`` of elements that differ, into ``places``; returns how many.

    Writes four per 64 elements whether or not there are as many: a branch that depends on the data costs more.
    """
    size, found = min(old.size, begin + CHUNK), 0
    for i in range(begin, size, 64):
        if i + 64 <= size:
            word = changed64(old, new, i)
        else:
            word = _0
            for t in range(size - i):
                if old[i + t] != new[i + t]:
                    word |= _1 << np.uint64(t)
        more = count_ones(word)
        for k in range(4):
            places[found + k] = i + count_trailing_zeros(word)
            word &= word - _1
        if more > 4:
            k = 4
            while word:
                places[found + k] = i + count_trailing_zeros(word)
                word &= word - _1
                k += 1
        found += more
    return found


@helper
def _gather(old, new, start, places, changed, before, after, top, mask, ordered, digest):
    """Bits of the changed elements before, and their lowered zigzag steps; three loops, two of which become vectors."""
    for k in range(changed):
        before[k], after[k] = old[places[k]], new[places[k]]
    first, second = digest[0], digest[1]
    for k in range(changed):
        key = np.uint64(start + places[k]) * GOLDEN
        f0, f1 = fingerprint(key, before[k])
        g0, g1 = fingerprint(key, after[k])
        first += g0 - f0
        second += g1 - f1
    digest[0], digest[1] = first, second
    for k in range(changed):
        after[k] = _zigzag(before[k], after[k], top, mask, ordered)


@njit
def count_changed(old, new):
    """Number of elements that differ."""
    size, changed, whole = old.size, 0, old.size // 64 * 64
    for i in range(0, whole, 64):
        changed += count_ones(changed64(old, new, i))
    for i in range(whole, size):
        changed += old[i] != new[i]
    return changed


@njit
def scan_plain(old, new, start, top, mask, ordered, gaps, steps, raw, digest):
    """Tokens of every change of a block.

    Args:
        old, new: one unsigned dtype, shape (n,).
        start: index of element 0 in its tensor, for the digest.
        top, mask: highest bit and all bits of the dtype, uint64.
        gaps, steps: uint8 shape (n,), filled with tokens.
        raw: uint32, filled with raw bits: gap, step, gap, step...
        digest: uint64 shape (2,); what the changes add to the digest of the tensor is added.

    Returns:
        Number of changed elements, number of words used in ``raw``.
    """
    found, last = 0, np.int64(-1)
    used, acc, filled = 0, _0, 0
    places, before, after = np.empty(CHUNK + 64, np.int64), np.empty(CHUNK, np.uint64), np.empty(CHUNK, np.uint64)
    for begin in range(0, old.size, CHUNK):
        changed = _changed(old, new, begin, places)
        _gather(old, new, start, places, changed, before, after, top, mask, ordered, digest)
        for k in range(changed):
            gap = np.uint64(places[k] - last - 1)
            last = places[k]
            token, count = _token(gap)
            gaps[found + k] = token
            used, acc, filled = _put(raw, used, acc, filled, gap, count)
            token, count = _token(after[k])
            steps[found + k] = token
            if count:
                used, acc, filled = _put(raw, used, acc, filled, after[k], count)
        found += changed
    if filled:
        raw[used] = np.uint32(acc & _LOW)
        used += 1
    return found, used


@helper
def _count(old, begin, end, shift, select, counts):
    for t in range(begin, end):
        counts[t & 3, (np.uint64(old[t]) >> shift) & select] += np.uint32(1)


@njit
def scan_contexts(old, new, start, top, mask, ordered, shift, select, contexts, gaps, steps, digest):
    """Changes of a block with gaps counted per context: ``(old >> shift) & select``, the exponent of the old element.

    Args:
        contexts: uint8 shape (n,), filled.
        gaps: uint32 shape (n,), filled: elements of the same context since its last change.
        steps: uint64 shape (n,), filled with lowered zigzag steps.

    Returns:
        Number of changed elements.
    """
    found = 0
    counts = np.zeros((4, 256), np.uint32)  # four tables, so that equal neighbours do not wait for each other
    last = np.zeros(256, np.uint32)
    places, before, after = np.empty(CHUNK + 64, np.int64), np.empty(CHUNK, np.uint64), np.empty(CHUNK, np.uint64)
    for begin in range(0, old.size, CHUNK):
        changed, at = _changed(old, new, begin, places), begin
        _gather(old, new, start, places, changed, before, after, top, mask, ordered, digest)
        for k in range(changed):
            j = places[k]
            _count(old, at, j, shift, select, counts)
            at = j + 1
            context = (before[k] >> shift) & select
            seen = counts[0, context] + counts[1, context] + counts[2, context] + counts[3, context]
            counts[j & 3, context] += np.uint32(1)
            contexts[found + k] = context
            gaps[found + k] = seen - last[context]
            last[context] = seen + np.uint32(1)
            steps[found + k] = after[k]
        found += changed
        _count(old, at, min(begin + CHUNK, old.size), shift, select, counts)
    return found


@njit
def sort_contexts(contexts, gaps, steps, found, starts, gap_tokens, step_tokens, raw):
    """Bring changes into the order of their contexts and split them in tokens and raw bits.

    Args:
        starts: int64 shape (257,), filled: context ``c`` owns tokens ``starts[c]`` to ``starts[c + 1]``.
        gap_tokens, step_tokens: uint8 shape (found,), filled.
        raw: uint32, filled with raw bits, in the order of the tokens: gap, step, gap, step...

    Returns:
        Number of words used in ``raw``.
    """
    starts[:] = 0
    for k in range(found):
        starts[contexts[k] + 1] += 1
    for c in range(256):
        starts[c + 1] += starts[c]
    at = starts[:256].copy()
    order = np.empty(found, np.uint32)
    for k in range(found):
        c = contexts[k]
        order[at[c]] = k
        at[c] += 1
    used, acc, filled = 0, _0, 0
    for k in range(found):
        j = order[k]
        token, count = _token(np.uint64(gaps[j]))
        gap_tokens[k] = token
        if count:
            used, acc, filled = _put(raw, used, acc, filled, np.uint64(gaps[j]), count)
        token, count = _token(steps[j])
        step_tokens[k] = token
        if count:
            used, acc, filled = _put(raw, used, acc, filled, steps[j], count)
    if filled:
        raw[used] = np.uint32(acc & _LOW)
        used += 1
    return used


@njit
def move(old, steps, top, mask, ordered, out):
    """``out[k]`` = the bit pattern ``steps[k]`` places (modulo 2^width) after ``old[k]`` on the ordered line."""
    for k in range(old.size):
        place = _line(np.uint64(old[k]), top, mask, ordered) + np.uint64(steps[k])
        out[k] = _unline(place & mask, top, mask, ordered)


@njit
def plain_steps(old, new, start, top, mask, ordered, out, digest):
    """``out[k]`` = step from ``old[k]`` to ``new[k]`` modulo 2^width; returns how many are not 0.

    Adds what the changes do to the digest, as `scan_plain` does.
    """
    found, first, second = 0, digest[0], digest[1]
    for k in range(old.size):
        a, b = np.uint64(old[k]), np.uint64(new[k])
        out[k] = (_line(b, top, mask, ordered) - _line(a, top, mask, ordered)) & mask
        found += a != b
        key = np.uint64(start + k) * GOLDEN
        f0, f1 = fingerprint(key, a)
        g0, g1 = fingerprint(key, b)
        first += g0 - f0
        second += g1 - f1
    digest[0], digest[1] = first, second
    return found


@helper
def _take(raw, at, acc, filled, token):
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


@njit
def place_plain(gaps, values, raw, size, start, mask, indices, steps):
    """Indices (from ``start``) and steps of a decoded block without contexts.

    Args:
        gaps, values: uint8 tokens.
        raw: uint8, the raw bits.
        indices, steps: filled; shape (n,).

    Returns:
        False where the changes leave the block, or the raw bits are more or fewer than the tokens say.
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
        indices[k] = start + last
        steps[k] = _unzigzag(value, mask)
    return at == raw.size


@njit
def place_contexts(old, shift, select, ids, starts, gaps, values, raw, start, mask, far, wide, indices, steps):
    """As `place_plain`, by the same walk over the base ``old`` that the writer made.

    Args:
        far, wide: work arrays, uint64 shape (n,).
    """
    at, acc, filled = 0, _0, 0
    for k in range(gaps.size):
        far[k], at, acc, filled = _take(raw, at, acc, filled, gaps[k])
        wide[k], at, acc, filled = _take(raw, at, acc, filled, values[k])
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
        steps[found] = _unzigzag(wide[k], mask)
        found += 1
        k += 1
        place[context] = k
        left[context] = np.int64(far[k] & _LOW) if k < stop[context] else np.int64(1) << 62
    return found == gaps.size


@njit
def survey(old, new, spans, span, top, mask, ordered, shift, select):
    """What a sample of ``spans`` evenly spread runs of ``span`` elements says.

    Returns:
        Per context: elements seen, elements changed (both float64 shape (256,)); bits of steps, about.
    """
    seen, changed, bits = np.zeros(256), np.zeros(256), 0.0
    room = max(0, old.size - span)
    for s in range(spans if room else 1):
        begin = room * s // max(1, spans - 1)
        for i in range(begin, min(begin + span, old.size)):
            a, b = np.uint64(old[i]), np.uint64(new[i])
            context = (a >> shift) & select
            seen[context] += 1
            if a != b:
                changed[context] += 1
                step = _zigzag(a, b, top, mask, ordered) + _1
                bits += 1.0 if step < _3 else 2.0 + bit_length(step)
    return seen, changed, bits
