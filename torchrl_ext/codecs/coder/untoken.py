"""From decoded tokens back to places and steps."""

from __future__ import annotations

import numpy as np

from torchrl_ext.codecs.coder.tokens import take, unzigzag
from torchrl_ext.kernels.jit import njit

__all__ = ["place_contexts", "place_plain"]

_0 = np.uint64(0)
_LOW = np.uint64(0xFFFFFFFF)


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
def place_contexts(old, shift, select, ids, starts, gaps, values, raw, start, mask, far, wide, indices, steps):
    """As `place_plain`, by the same walk over the base ``old`` that the writer made.

    Args:
        far, wide: work arrays, uint64 shape (n,).
    """
    at, acc, filled = 0, _0, 0
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
