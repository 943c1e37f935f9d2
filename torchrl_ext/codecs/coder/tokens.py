"""Turns what changed into tokens and raw bits; `torchrl_ext.codecs.coder.decode` has the inverse.

A changed element is a *gap* (unchanged elements since the last changed one) and a *step* (units in the last place,
counted on one ordered line of integers). Float formats are sign-magnitude: mapped so that -0.0 and 0.0 are neighbours
and NaNs lie beyond the infinities, every bit pattern has a place of its own and the map is a bijection. Steps are taken
modulo 2^width, zigzagged (-1, 1, -2, 2, ... become 1, 2, 3, 4) and lowered by one, since 0 does not occur.

A value ``v`` is split in a token below 256 and raw bits: ``v`` itself below 16; above, its bit length and the two bits
after the leading one make the token, the remaining low bits are raw.

Gaps may be counted apart for each context, the exponent of an element of the base: `walk` and `sort_by_context`.
"""

from __future__ import annotations

import numpy as np

from torchrl_ext.kernels.jit import bit_length, helper, line, njit

__all__ = ["lay_steps", "sort_by_context", "survey", "tokenise", "walk"]

_CHUNK = 4096  # changes that are worked on together: they stay in the processor's nearest cache

_0, _1, _2, _3 = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(3)
_16, _32 = np.uint64(16), np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


@helper
def zigzag(a, b, top, mask, ordered):
    """Return the lowered zigzag step between two bit patterns."""
    step = (line(b, top, mask, ordered) - line(a, top, mask, ordered)) & mask
    if step & top:
        return (mask - step) << _1  # 2|step| - 1, lowered by one
    return (step << _1) - _1


@helper
def split(value):
    """Return token, raw bits and number of raw bits; without a branch, so that loops over it become vectors."""
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
def zigzags(before, after, top, mask, ordered, steps):
    """Fill ``steps`` with the lowered zigzag steps."""
    for k in range(before.size):
        steps[k] = zigzag(np.uint64(before[k]), np.uint64(after[k]), top, mask, ordered)


@helper
def _gaps(places, last, gaps):
    """Fill ``gaps`` with the unchanged units before each place; ``last`` is the place before the first."""
    gaps[0] = np.uint32(places[0] - last - 1)
    for k in range(1, places.size):
        gaps[k] = np.uint32(places[k] - places[k - 1] - 1)


@helper
def _split_all(gaps, steps, gap_tokens, step_tokens, bits, counts):
    """Fill tokens of gaps and steps, and the raw bits of both together; return how many raw bits these are."""
    total = _0
    for k in range(gap_tokens.size):
        gap_tokens[k], low, count = split(np.uint64(gaps[k]))
        step_tokens[k], high, more = split(np.uint64(steps[k]))
        bits[k] = low | (high << count)
        counts[k] = count + more
        total += count + more
    return total


@njit
def tokenise(places, before, after, top, mask, ordered, gap_tokens, step_tokens, raw, last, state):
    """Turn a part of what changed in a block into tokens and raw bits.

    Args:
        places: int32 shape (k,), increasing: places in the block.
        before, after: bits there, one unsigned dtype, shape (k,).
        top, mask: highest bit and all bits of the dtype, uint64.
        gap_tokens, step_tokens: uint8 shape (k,), filled.
        raw: uint32, filled with raw bits: gap, step, gap, step... Beyond ``state[0]`` words one more may be open.
        last: the last place of the part before; -1 at the start.
        state: uint64 shape (3,), zeros at the start: words of ``raw`` that are full, bits of the next one, and how many
            these are. Goes from part to part.
    """
    used, acc, filled = np.int64(state[0]), state[1], np.int64(state[2])
    gaps, steps = np.empty(_CHUNK, np.uint32), np.empty(_CHUNK, before.dtype)
    bits, counts = np.empty(_CHUNK, np.uint64), np.empty(_CHUNK, np.uint8)
    for at in range(0, places.size, _CHUNK):
        end = min(at + _CHUNK, places.size)
        _gaps(places[at:end], last, gaps)
        zigzags(before[at:end], after[at:end], top, mask, ordered, steps)
        last = places[end - 1]
        if before.itemsize == 8:  # the raw bits of a gap and a step together may be more than a word
            for k in range(end - at):
                gap_tokens[at + k], low, count = split(np.uint64(gaps[k]))
                used, acc, filled = put(raw, used, acc, filled, low, np.int64(count))
                step_tokens[at + k], low, count = split(np.uint64(steps[k]))
                used, acc, filled = put(raw, used, acc, filled, low, np.int64(count))
        elif _split_all(gaps, steps, gap_tokens[at:end], step_tokens[at:end], bits, counts):
            for k in range(end - at):
                used, acc, filled = put(raw, used, acc, filled, bits[k], np.int64(counts[k]))
    if filled:
        raw[used] = np.uint32(acc & _LOW)
    state[0], state[1], state[2] = used, acc, filled


@helper
def _count(old, begin, end, shift, select, counts):
    for t in range(begin, end):
        counts[t & 3, (np.uint64(old[t]) >> shift) & select] += np.uint32(1)


@njit
def walk(old, places, before, after, top, mask, ordered, shift, select, contexts, gaps, steps, at, counts, last):
    """List changes of a part of a block, with gaps counted per context: the exponent, ``(old >> shift) & select``.

    Args:
        old: all elements of the block.
        places: int32 shape (k,), increasing: places in the block.
        before, after: bits there, shape (k,).
        contexts: uint8 shape (k,), filled.
        gaps: uint32 shape (k,), filled: elements of the same context since its last change.
        steps: of the dtype of ``before``, shape (k,), filled with lowered zigzag steps.
        at: the place after the last one of the part before.
        counts: uint32 shape (4, 256), last: uint32 shape (256,), zeros at the start; go from part to part. Four tables,
            so that equal neighbours do not wait for each other.
    """
    zigzags(before, after, top, mask, ordered, steps)
    for k in range(places.size):
        j = np.int64(places[k])
        _count(old, at, j, shift, select, counts)
        at = j + 1
        context = (np.uint64(before[k]) >> shift) & select
        seen = counts[0, context] + counts[1, context] + counts[2, context] + counts[3, context]
        counts[j & 3, context] += np.uint32(1)
        contexts[k] = context
        gaps[k] = seen - last[context]
        last[context] = seen + np.uint32(1)


@njit
def sort_by_context(contexts, gaps, steps, starts, gap_tokens, step_tokens, raw):
    """Bring changes into the order of their contexts and split them in tokens and raw bits.

    Args:
        starts: int64 shape (257,), filled: context ``c`` owns tokens ``starts[c]`` to ``starts[c + 1]``.
        gap_tokens, step_tokens: uint8 shape (k,), filled.
        raw: uint32, filled with raw bits, in the order of the tokens: gap, step, gap, step...

    Returns:
        Number of words used in ``raw``.
    """
    starts[:] = 0
    found = contexts.size
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
        gap_tokens[k], bits, count = split(np.uint64(gaps[j]))
        if count:
            used, acc, filled = put(raw, used, acc, filled, bits, np.int64(count))
        step_tokens[k], bits, count = split(np.uint64(steps[j]))
        if count:
            used, acc, filled = put(raw, used, acc, filled, bits, np.int64(count))
    if filled:
        raw[used] = np.uint32(acc & _LOW)
        used += 1
    return used


@njit
def lay_steps(places, before, after, top, mask, ordered, out):
    """Set ``out[place]`` to the step on the ordered line, modulo 2^width; ``out`` is all zeros before."""
    for k in range(places.size):
        step = line(np.uint64(after[k]), top, mask, ordered) - line(np.uint64(before[k]), top, mask, ordered)
        out[places[k]] = step & mask


@helper
def _entropy(seen, changed):
    """Return the bits that tell which of ``seen`` elements are the ``changed`` ones."""
    share = min(max((changed + 0.5) / (seen + 1.0), 1e-9), 1 - 1e-9)
    return -seen * (share * np.log2(share) + (1 - share) * np.log2(1 - share))


@njit
def survey(old, new, spans, span, apart, top, mask, ordered, shift, select):
    """Estimate from a sample of a tensor how much of it changed, and what that takes to code.

    Args:
        old, new: one unsigned dtype, shape (n,).
        spans, span, apart: the sample is ``spans`` runs of ``span`` elements, ``apart`` elements from start to start.
        shift, select: ``(old >> shift) & select`` is the context of an element, below 256.

    Returns:
        Density; bits per element that `ulp` will take, and bits per element that `context` will take, about.
    """
    seen, changed, bits = np.zeros(256), np.zeros(256), 0.0
    for run in range(spans):
        for i in range(run * apart, run * apart + span):
            a, b = np.uint64(old[i]), np.uint64(new[i])
            context = (a >> shift) & select
            seen[context] += 1
            if a != b:
                changed[context] += 1
                step = zigzag(a, b, top, mask, ordered) + _1
                bits += 1.0 if step < _3 else 2.0 + bit_length(step)
    count, found, inside = spans * span, 0.0, 0.0
    for context in range(256):
        found += changed[context]
        inside += _entropy(seen[context], changed[context])
    return found / count, (_entropy(count, found) + bits) / count, (inside + bits) / count
