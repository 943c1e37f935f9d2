"""Compiled loops of `torchrl_ext.kernels.host`; importing this imports numba."""

from __future__ import annotations

import numpy as np
from numba import carray

from torchrl_ext.kernels.host_lists import CHUNK, list_changes
from torchrl_ext.kernels.jit import GOLDEN, changed64, count_ones, fingerprint, helper, line, njit, pointer, unline

__all__ = ["count_changed", "diff", "digest_change", "digest_piece", "land", "move", "write"]

_LANDED = 4096  # changes that are translated together: they stay in the processor's nearest cache
_1 = np.uint64(1)


@helper
def _widen(short, begin, count, places):
    for k in range(count):
        places[k] = begin + short[k]


@helper
def _add_digest(start, places, before, after, count, digest):
    """Add to a position digest what changes do to it; ``start`` is the position in the tensor of place 0."""
    one, two = digest[0], digest[1]
    for k in range(count):
        key = np.uint64(start + places[k]) * GOLDEN
        f0, f1 = fingerprint(key, np.uint64(before[k]))
        g0, g1 = fingerprint(key, np.uint64(after[k]))
        one += g0 - f0
        two += g1 - f1
    digest[0], digest[1] = one, two


@njit
def diff(old, new, first, start, places, before, after, digest):
    """List what differs from element ``first`` on, and add to a position digest what that does to it.

    Args:
        old, new: one unsigned dtype, shape (n,).
        first: where to begin.
        start: position of element 0 in its tensor, for the digest.
        places: int32 or int64, before, after: as ``old``; at least ``min(n, CHUNK) + 64`` long. Lists to fill.
        digest: uint64 shape (2,).

    Returns:
        How many differ; and the element before which the lists were full, ``n`` where they had room for all.
    """
    found, size, short = 0, old.size, np.empty(CHUNK + 64, np.uint16)
    for begin in range(first, size, CHUNK):
        if found + min(CHUNK, size - begin) + 64 > places.size:
            return found, begin
        olds, news = before[found:], after[found:]
        changed = list_changes(old, new, begin, short, olds, news)
        _add_digest(start + begin, short, olds, news, changed, digest)
        _widen(short, begin, changed, places[found:])
        found += changed
    return found, size


@njit
def count_changed(old, new):
    """Return how many elements differ."""
    whole, changed = old.size // 64 * 64, 0
    for i in range(0, whole, 64):
        changed += count_ones(changed64(old, new, i))
    for i in range(whole, old.size):
        changed += old[i] != new[i]
    return changed


@njit
def write(addresses, ends, offsets, values):
    """Write runs of values into several tensors, and read them back while they lie in a cache.

    Whoever translated the offsets made sure that they lie within the tensors.

    Args:
        addresses: int64 shape (s,): where the tensor of each run begins.
        ends: int64 shape (s,): where each run ends in the next two.
        offsets, values: shape (k,): elements from the first one of the tensor, and what is to stand there.

    Returns:
        How many runs were written before one that does not stand there; all of them where there is none.
    """
    at, wrong = 0, values.dtype.type(0)
    for run in range(ends.size):
        target = carray(pointer(addresses[run]), (1,), values.dtype)
        while at < ends[run]:
            where, own = offsets[at : min(at + _LANDED, ends[run])], values[at : min(at + _LANDED, ends[run])]
            for k in range(own.size):
                target[np.uint64(where[k])] = own[k]
            for k in range(own.size):  # to its end: a loop that may stop takes twice as long
                wrong |= target[np.uint64(where[k])] ^ own[k]
            at += own.size
        if wrong != 0:
            return run
    return ends.size


@njit
def move(old, steps, top, mask, ordered, out):
    """Set ``out[k]`` to the bit pattern ``steps[k]`` places (modulo 2^width) after ``old[k]`` on the ordered line."""
    for k in range(old.size):
        place = line(np.uint64(old[k]), top, mask, ordered) + np.uint64(steps[k])
        out[k] = unline(place & mask, top, mask, ordered)


@helper
def _translate(dims, offset, positions, payload, where, there, given):
    """List the changes that lie in a piece: positions, places in its memory, and what comes there; return how many."""
    found = 0
    for k in range(positions.size):
        rest, to, inside = np.int64(positions[k]) - offset, 0, True
        for d in range(dims.shape[0]):
            coordinate = rest // dims[d, 1]
            inside = inside and coordinate < dims[d, 0]
            to += coordinate * dims[d, 2]
            rest -= coordinate * dims[d, 1]
        if inside and rest == 0:
            where[found], there[found], given[found] = positions[k], to, payload[k]
            found += 1
    return found


@helper
def _shift(positions, offset, there):
    for k in range(positions.size):
        there[k] = positions[k] - offset


@helper
def _gather(target, there, found):
    for k in range(there.size):
        found[k] = target[there[k]]


@helper
def _copy(source, target):
    for k in range(source.size):
        target[k] = source[k]


@njit
def land(target, dims, offset, positions, payload, straight, same, steps, ordered, offsets, values, digest):
    """Translate changes for a piece, resolve steps, and add to a position digest what the changes do to it.

    Args:
        target: unsigned, shape (m,): the memory of the piece.
        dims: int64 shape (d, 3), offset, straight: as in `torchrl_ext.kernels.base.Piece`.
        positions, payload: shape (k,): where, and new bits, or (with ``steps``) steps; ``ordered`` says on which line.
        same: ``offsets`` are ``positions``.
        offsets, values: shape (k,), filled as far as changes lie in the piece.
        digest: uint64 shape (2,).

    Returns:
        How many changes lie in the piece.
    """
    where, given = np.empty(_LANDED, positions.dtype), np.empty(_LANDED, target.dtype)
    there, before = np.empty(_LANDED, offsets.dtype), np.empty(_LANDED, target.dtype)
    top = _1 << np.uint64(8 * target.itemsize - 1)
    mask, total = top | (top - _1), 0
    for at in range(0, positions.size, _LANDED):
        end = min(at + _LANDED, positions.size)
        own, come, places, count = positions[at:end], payload[at:end], offsets[total:], end - at
        if not straight:
            count = _translate(dims, offset, own, come, where, there, given)
            own, come = where[:count], given[:count]
            _copy(there[:count], places)
        elif offset:
            _shift(own, offset, places)
        elif not same:
            _copy(own, places)
        _gather(target, places[:count], before)
        after = values[total : total + count]
        if steps:
            move(before[:count], come, top, mask, ordered, after)
        else:
            _copy(come, after)
        _add_digest(0, own, before, after, count, digest)
        total += count
    return total


@njit
def digest_piece(memory, dims, offset, digest):
    """Add to a position digest the elements of a piece.

    Args:
        memory: unsigned, shape (m,).
        dims, offset: ``by_memory``, int64 shape (d, 3), and ``offset`` of `torchrl_ext.kernels.base.Piece`.
        digest: uint64 shape (2,).
    """
    last, rows, size, stride, to = dims.shape[0] - 1, 1, 1, 1, 1
    if last >= 0:
        size, stride, to = dims[last, 0], dims[last, 1], dims[last, 2]
    for d in range(last):
        rows *= dims[d, 0]
    one, two, step = digest[0], digest[1], np.uint64(stride) * GOLDEN
    for row in range(rows):
        rest, position, place = row, offset, 0
        for d in range(last - 1, -1, -1):
            coordinate = rest % dims[d, 0]
            rest //= dims[d, 0]
            position += coordinate * dims[d, 1]
            place += coordinate * dims[d, 2]
        key = np.uint64(position) * GOLDEN
        if to == 1:
            run = memory[place : place + size]
            for i in range(run.size):
                a, b = fingerprint(key, np.uint64(run[i]))
                one += a
                two += b
                key += step
        else:
            for i in range(size):
                a, b = fingerprint(key, np.uint64(memory[place + i * to]))
                one += a
                two += b
                key += step
    digest[0], digest[1] = one, two


@njit
def digest_change(indices, old, new, total):
    """Add to ``total`` (uint64 shape (2,)) what a change of ``old`` to ``new`` at ``indices`` does."""
    _add_digest(0, indices, old, new, indices.size, total)
