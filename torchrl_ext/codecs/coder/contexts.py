"""Gaps counted apart for each context, the exponent of an element of the base: by the writer, and by the reader."""

from __future__ import annotations

import numpy as np

from torchrl_ext.codecs.coder.tokens import put, split, take, unzigzag, zigzags
from torchrl_ext.kernels.jit import helper, njit

__all__ = ["sort_by_context", "unwalk", "walk"]

_0 = np.uint64(0)
_LOW = np.uint64(0xFFFFFFFF)


@helper
def _count(old, begin, end, shift, select, counts):
    for t in range(begin, end):
        counts[t & 3, (np.uint64(old[t]) >> shift) & select] += np.uint32(1)


@njit
def walk(old, places, before, after, top, mask, ordered, shift, select, contexts, gaps, steps, at, counts, last):
    """Changes of a part of a block, gaps counted per context: ``(old >> shift) & select``, the exponent of the old one.

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
def unwalk(old, shift, select, ids, starts, gaps, values, raw, start, mask, indices, steps):
    """As `torchrl_ext.codecs.coder.tokens.untokenise`, by the same walk over the base ``old`` that the writer made.

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
