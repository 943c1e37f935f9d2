"""Compiled loops of the codecs in `blocks` and `contexts`; importing this imports numba."""

from __future__ import annotations

import numpy as np

from torchrl_ext.data.deltas.jit import bit_length, changed64, count_ones, count_trailing_zeros, njit

__all__ = ["compare", "count_contexts", "list_mask", "set_mask", "sort_changes", "unsort_changes"]

_0, _1, _6, _63, _64 = (np.uint64(number) for number in (0, 1, 6, 63, 64))


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
