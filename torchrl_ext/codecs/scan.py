"""One pass over old and new: what changed, as tokens for the entropy coder (`torchrl_ext.codecs.coder.tokens`)."""

from __future__ import annotations

import numpy as np

from torchrl_ext.codecs.changes import CHUNK, add_digest, lanes_of, list_changes
from torchrl_ext.codecs.coder.tokens import put, split, zigzag
from torchrl_ext.kernels.jit import GOLDEN, bit_length, changed64, count_ones, fingerprint, helper, line, njit

__all__ = [
    "count_changed",
    "follow",
    "listed_steps",
    "plain_steps",
    "scan_contexts",
    "scan_listed",
    "scan_plain",
    "sort_contexts",
    "survey",
]

_0, _1, _3 = np.uint64(0), np.uint64(1), np.uint64(3)
_LOW = np.uint64(0xFFFFFFFF)


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
def follow(old, new):
    """Make ``old`` what ``new`` is, writing only where it is not."""
    whole = old.size // 64 * 64
    for i in range(0, whole, 64):
        if changed64(old, new, i):
            for t in range(64):
                old[i + t] = new[i + t]
    for i in range(whole, old.size):
        old[i] = new[i]


@helper
def _tokens(last, places, values, changed, gaps, steps, found, bits, counts, raw, used, acc, filled):
    """Split a chunk's gaps and steps in tokens, from index ``found``, and raw bits; ``last`` is the place before."""
    total = np.uint64(0)
    for k in range(changed):
        gap = np.uint64(np.int64(places[k]) - (np.int64(places[k - 1]) if k else last) - 1)
        gaps[found + k], low, count = split(gap)
        steps[found + k], high, more = split(np.uint64(values[k]))
        bits[k] = low | (high << count)
        counts[k] = count + more
        total += count + more
    if total:
        for k in range(changed):
            used, acc, filled = put(raw, used, acc, filled, bits[k], np.int64(counts[k]))
    return used, acc, filled


@helper
def _wide_tokens(last, places, values, changed, gaps, steps, found, raw, used, acc, filled):
    """As `_tokens`, where the raw bits of a gap and a step together may be more than a word."""
    for k in range(changed):
        gap = np.uint64(np.int64(places[k]) - (np.int64(places[k - 1]) if k else last) - 1)
        gaps[found + k], bits, count = split(gap)
        used, acc, filled = put(raw, used, acc, filled, bits, np.int64(count))
        steps[found + k], bits, count = split(np.uint64(values[k]))
        used, acc, filled = put(raw, used, acc, filled, bits, np.int64(count))
    return used, acc, filled


@helper
def _zigzags(before, after, changed, top, mask, ordered):
    """``after`` becomes the lowered zigzag steps."""
    for k in range(changed):
        after[k] = zigzag(np.uint64(before[k]), np.uint64(after[k]), top, mask, ordered)


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
    places, before = np.empty(CHUNK + 64, np.uint16), np.empty(CHUNK + 64, old.dtype)
    after, bits, counts = np.empty(CHUNK + 64, old.dtype), np.empty(CHUNK, np.uint64), np.empty(CHUNK, np.uint8)
    for begin in range(0, old.size, CHUNK):
        changed = list_changes(old, new, begin, places, before, after)
        if changed:
            add_digest(start + begin, places, before, after, changed, digest)
            _zigzags(before, after, changed, top, mask, ordered)
            where, state = last - begin, (raw, used, acc, filled)
            if lanes_of(old) == 8:
                used, acc, filled = _wide_tokens(where, places, after, changed, gaps, steps, found, *state)
            else:
                used, acc, filled = _tokens(where, places, after, changed, gaps, steps, found, bits, counts, *state)
            last = begin + np.int64(places[changed - 1])
            found += changed
    if filled:
        raw[used] = np.uint32(acc & _LOW)
        used += 1
    return found, used


@njit
def scan_listed(places, before, after, top, mask, ordered, gaps, steps, raw):
    """As `scan_plain`, of changes that were listed before, and without a digest.

    Args:
        places: int64 shape (k,), increasing: places in the block.
        before, after: bits there, one unsigned dtype, shape (k,).

    Returns:
        Number of words used in ``raw``.
    """
    used, acc, filled = 0, _0, 0
    values, bits = np.empty(CHUNK, before.dtype), np.empty(CHUNK, np.uint64)
    counts = np.empty(CHUNK, np.uint8)
    for at in range(0, places.size, CHUNK):
        here = places[at : at + CHUNK]
        last, state = (places[at - 1] if at else np.int64(-1)), (raw, used, acc, filled)
        for k in range(here.size):
            values[k] = zigzag(np.uint64(before[at + k]), np.uint64(after[at + k]), top, mask, ordered)
        if lanes_of(before) == 8:
            used, acc, filled = _wide_tokens(last, here, values, here.size, gaps, steps, at, *state)
        else:
            used, acc, filled = _tokens(last, here, values, here.size, gaps, steps, at, bits, counts, *state)
    if filled:
        raw[used] = np.uint32(acc & _LOW)
        used += 1
    return used


@njit
def listed_steps(places, before, after, top, mask, ordered, out):
    """As `plain_steps`, of changes that were listed before; ``out`` is all zeros."""
    for k in range(places.size):
        step = line(np.uint64(after[k]), top, mask, ordered) - line(np.uint64(before[k]), top, mask, ordered)
        out[places[k]] = step & mask


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
    places, before = np.empty(CHUNK + 64, np.uint16), np.empty(CHUNK + 64, old.dtype)
    after = np.empty(CHUNK + 64, old.dtype)
    for begin in range(0, old.size, CHUNK):
        changed, at = list_changes(old, new, begin, places, before, after), begin
        add_digest(start + begin, places, before, after, changed, digest)
        _zigzags(before, after, changed, top, mask, ordered)
        for k in range(changed):
            j = begin + np.int64(places[k])
            _count(old, at, j, shift, select, counts)
            at = j + 1
            context = (np.uint64(before[k]) >> shift) & select
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
        gap_tokens[k], bits, count = split(np.uint64(gaps[j]))
        if count:
            used, acc, filled = put(raw, used, acc, filled, bits, np.int64(count))
        step_tokens[k], bits, count = split(steps[j])
        if count:
            used, acc, filled = put(raw, used, acc, filled, bits, np.int64(count))
    if filled:
        raw[used] = np.uint32(acc & _LOW)
        used += 1
    return used


@njit
def plain_steps(old, new, start, top, mask, ordered, out, digest):
    """``out[k]`` = step from ``old[k]`` to ``new[k]`` modulo 2^width; returns how many are not 0.

    Adds what the changes do to the digest, as `scan_plain` does.
    """
    found, first, second = 0, digest[0], digest[1]
    for k in range(old.size):
        a, b = np.uint64(old[k]), np.uint64(new[k])
        out[k] = (line(b, top, mask, ordered) - line(a, top, mask, ordered)) & mask
        found += a != b
        key = np.uint64(start + k) * GOLDEN
        f0, f1 = fingerprint(key, a)
        g0, g1 = fingerprint(key, b)
        first += g0 - f0
        second += g1 - f1
    digest[0], digest[1] = first, second
    return found


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
                step = zigzag(a, b, top, mask, ordered) + _1
                bits += 1.0 if step < _3 else 2.0 + bit_length(step)
    return seen, changed, bits
