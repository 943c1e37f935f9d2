"""Loops over bits on the host, compiled by numba; each runs in one thread, and a caller cuts its work for several.

Importing this imports numba. The functions without a decorator are `torchrl_ext.data.deltas.bits.Kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numba import carray
from torch import Tensor

from torchrl_ext.data.deltas.bits import (
    BITS,
    ROW,
    SEED,
    UNSIGNED,
    Piece,
    Places,
    Range,
    Writes,
    linear_keys,
    unsigned,
)
from torchrl_ext.data.deltas.jit import (
    GOLDEN,
    changed64,
    count_ones,
    count_trailing_zeros,
    helper,
    line,
    njit,
    pointer,
    unline,
)

__all__ = ["digest_segments", "exchange", "land", "move", "on_host", "scan", "scatter", "translate", "words"]

on_host = True

_CHUNK = 16384  # elements whose changes are listed before they are summed; their places fit into uint16
_LANDED = 4096  # changes that are translated together: they stay in the processor's nearest cache
_INNERMOST = 16
"""Elements from which on a loop along memory is faster than one across it: 0.90 against 1.07 ns per element at 16 and
0.18 against 6.5 at 4096, but 6.4 against 1.0 at 2 (AMD EPYC with AVX-512, bf16, one thread)."""
_0, _1, _2, _3, _32 = (np.uint64(number) for number in (0, 1, 2, 3, 32))
_NONE, _ONE = np.int64(0), np.int64(1)  # numba compiles a helper anew for the type of a literal
_LOW = np.uint64(0xFFFFFFFF)
_M1, _M2, _M3 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0xD6E8FEB86659FD93)
_30, _27, _31, _29 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(29)
_ROW, _ROW_BITS, _IN_ROW, _SEED = ROW, np.uint64(ROW.bit_length() - 1), np.uint64(ROW - 1), np.uint64(SEED)


@helper
def _list_changes(old, new, begin, places, before, after):
    """List what differs among the elements from ``begin`` to ``begin + _CHUNK``, by words of 64 elements.

    Each word writes at least four places, which saves a branch.

    Args:
        old, new: one unsigned dtype, shape (n,).
        begin: first element.
        places: uint16 shape (_CHUNK + 64,), filled with indices less ``begin``.
        before, after: unsigned, shape (_CHUNK + 64,), filled with the bits there.

    Returns:
        How many.
    """
    end, found = min(old.size, begin + _CHUNK), 0
    for i in range(begin, end, 64):
        if i + 64 <= end:
            word = changed64(old, new, i)
        else:
            word = _0
            for t in range(end - i):
                if old[i + t] != new[i + t]:
                    word |= _1 << np.uint64(t)
        more = count_ones(word)
        for k in range(4):
            places[found + k] = i - begin + count_trailing_zeros(word)
            word &= word - _1
        if more > 4:
            k = 4
            while word:
                places[found + k] = i - begin + count_trailing_zeros(word)
                word &= word - _1
                k += 1
        found += more
    for k in range(found):
        before[k], after[k] = old[begin + places[k]], new[begin + places[k]]
    return found


@helper
def _widen(short, begin, count, places):
    for k in range(count):
        places[k] = begin + short[k]


@helper
def _factors(row):
    """Return what the sums of a row of words are multiplied by: two odd words, mixed as splitmix64 does."""
    one = np.uint64(row) * GOLDEN + _SEED
    one = (one ^ (one >> _30)) * _M1
    one = (one ^ (one >> _27)) * _M2
    one = one ^ (one >> _31)
    two = (one ^ (one >> _32)) * _M3
    return one | _1, (two ^ (two >> _29)) | _1


@helper
def _add_change(start, places, before, after, count, keys, digest):
    """Add to a digest what changes do to it; ``start`` is the position in the tensor of place 0."""
    one, two, total_one, total_two = np.uint64(0), np.uint64(0), digest[0], digest[1]
    row, (first, second), width = np.uint64(0), _factors(np.uint64(0)), np.uint64(before.itemsize)
    for k in range(count):
        byte = (np.uint64(start) + np.uint64(places[k])) * width
        word, shift = byte >> _2, (byte & _3) << _3
        if word >> _ROW_BITS != row:
            total_one, total_two = total_one + one * first, total_two + two * second
            row, one, two = word >> _ROW_BITS, np.uint64(0), np.uint64(0)
            first, second = _factors(row)
        i, a, b = word & _IN_ROW, np.uint64(before[k]), np.uint64(after[k])
        low = ((b & _LOW) - (a & _LOW)) << shift
        one += low * np.uint64(keys[0, i])
        two += low * np.uint64(keys[1, i])
        if width == 8:
            high = (b >> _32) - (a >> _32)
            one += high * np.uint64(keys[0, i + _1])
            two += high * np.uint64(keys[1, i + _1])
    digest[0], digest[1] = total_one + one * first, total_two + two * second


@helper
def _add_segments(base, places, before, after, count, segment, firsts, keys, words):
    """Add changes to the digests of their segments, from ``segment`` on; return the last one's number."""
    low = 0
    while low < count:
        while firsts[segment + 1] <= base + places[low]:
            segment += 1
        high, end = low + 1, firsts[segment + 1] - base
        while high < count and places[high] < end:
            high += 1
        start, own = base - firsts[segment], slice(low, high)
        _add_change(start, places[own], before[own], after[own], high - low, keys, words[segment])
        low = high
    return segment


@helper
def _linear_words(words, first, second, ones):
    """Return the sums of words of 32 bits, each times its key; ``ones`` is what the elements of a word add to it."""
    one, two = np.uint64(0), np.uint64(0)
    key_one, key_two = np.uint64(0), np.uint64(0)
    for i in range(words.size):
        word, a, b = np.uint64(words[i]), np.uint64(first[i]), np.uint64(second[i])
        one += word * a
        two += word * b
        key_one += a
        key_two += b
    return one + ones * key_one, two + ones * key_two


@helper
def _linear_elements(memory, place, to, position, stride, count, keys):
    """Return what ``count`` elements add to both sums, ``to`` apart in memory and ``stride`` in the tensor."""
    one, two, width = np.uint64(0), np.uint64(0), np.uint64(memory.itemsize)
    for i in range(count):
        byte = np.uint64(position + i * stride) * width
        word, shift = byte >> _2, (byte & _3) << _3
        first, second = _factors(word >> _ROW_BITS)
        k, bits = word & _IN_ROW, np.uint64(memory[np.uint64(place + i * to)])
        low = ((bits & _LOW) + _1) << shift
        a, b = low * np.uint64(keys[0, k]), low * np.uint64(keys[1, k])
        if width == 8:
            high = (bits >> _32) + _1
            a += high * np.uint64(keys[0, k + _1])
            b += high * np.uint64(keys[1, k + _1])
        one += a * first
        two += b * second
    return one, two


@helper
def _linear_run(run, position, keys):
    """Return what a run of elements, contiguous in memory and in the tensor, adds to both sums."""
    width, one, two = run.itemsize, np.uint64(0), np.uint64(0)
    each = max(1, 4 // width)
    ones = np.uint64(0x1010101 if width == 1 else 0x10001 if width == 2 else 1)
    head = min(run.size, -position % each)
    if head:
        one, two = _linear_elements(run, _NONE, _ONE, position, _ONE, head, keys)
    body = (run.size - head) // each * each
    words, at, done = run[head : head + body].view(np.uint32), (position + head) * width // 4, 0
    while done < words.size:
        begin = at % _ROW
        count = min(words.size - done, _ROW - begin)
        end, (first, second) = begin + count, _factors(at // _ROW)
        a, b = _linear_words(words[done : done + count], keys[0, begin:end], keys[1, begin:end], ones)
        one, two, at, done = one + a * first, two + b * second, at + count, done + count
    if head + body < run.size:
        done = head + body
        a, b = _linear_elements(run, done, _ONE, position + done, _ONE, run.size - done, keys)
        one, two = one + a, two + b
    return one, two


@helper
def _add_runs(old, new, base, segment, firsts, keys, words):
    """Do as `_add_segments`, of all elements of a range that begins at ``base``."""
    at = 0
    while at < old.size:
        while firsts[segment + 1] <= base + at:
            segment += 1
        end = min(old.size, firsts[segment + 1] - base)
        position = base + at - firsts[segment]
        f_one, f_two = _linear_run(old[at:end], position, keys)
        g_one, g_two = _linear_run(new[at:end], position, keys)
        words[segment, 0] += g_one - f_one
        words[segment, 1] += g_two - f_two
        at = end
    return segment


@njit
def scan(old, new, base, firsts, keys, positions, before, after, words):
    """List what differs in a range of a stream, and add to the digest of each segment what that does to it.

    Args:
        old, new: one unsigned dtype, shape (n,).
        base: position of element 0, in the coordinates of ``firsts``.
        firsts: int64 shape (k + 1,): where each segment begins, and the last one ends.
        keys: `linear_keys`.
        positions: int32 or int64, before, after: as ``old``; at least ``n`` + 64 long. Lists to fill; positions count
            like ``firsts``.
        words: uint64 shape (k, 2).

    Returns:
        How many differ.
    """
    found, size, short, segment = 0, old.size, np.empty(_CHUNK + 64, np.uint16), _NONE
    for begin in range(0, size, _CHUNK):
        olds, news = before[found:], after[found:]
        changed = _list_changes(old, new, begin, short, olds, news)
        end = min(size, begin + _CHUNK)
        if changed > (end - begin) // 8:  # then sums over all elements are quicker
            segment = _add_runs(old[begin:end], new[begin:end], base + begin, segment, firsts, keys, words)
        else:
            segment = _add_segments(base + begin, short, olds, news, changed, segment, firsts, keys, words)
        _widen(short, base + begin, changed, positions[found:])
        found += changed
    return found


@njit
def digest_segments(positions, before, after, firsts, keys, words):
    """Add to the digest of each segment what listed changes do to it; arguments as in `scan`."""
    _add_segments(_NONE, positions, before, after, positions.size, _NONE, firsts, keys, words)


@helper
def _weighed(place, bits):
    key = (np.uint64(place) + _1) * GOLDEN
    return ((bits ^ bits >> _32) + _1) * (key ^ key >> _32 | _1)


@njit
def _exchange(addresses, ends, offsets, values, totals):
    """Exchange runs of values with several tensors, and add up what stands there then, while it lies in a cache.

    Whoever translated the offsets made sure that they lie within the tensors.

    Args:
        addresses, ends, offsets, values: as in `Writes`; values are unsigned.
        totals: int64 shape (s,), filled with the ``sums``.
    """
    at = 0
    for run in range(ends.size):
        total = np.uint64(0)
        target = carray(pointer(addresses[run]), (1,), values.dtype)
        while at < ends[run]:
            where, own = offsets[at : min(at + _LANDED, ends[run])], values[at : min(at + _LANDED, ends[run])]
            for k in range(own.size):
                stood = target[np.uint64(where[k])]
                target[np.uint64(where[k])] = own[k]
                own[k] = stood
            for k in range(own.size):
                total += _weighed(where[k], np.uint64(target[np.uint64(where[k])]))
            at += own.size
        totals[run] = np.int64(total)


@njit
def _write(address, offsets, values):
    target = carray(pointer(address), (1,), values.dtype)
    for k in range(values.size):
        target[np.uint64(offsets[k])] = values[k]


@njit
def move(old, steps, top, mask, ordered, out):
    """Set ``out[k]`` to the bit pattern ``steps[k]`` places (modulo 2^width) after ``old[k]`` on the ordered line."""
    for k in range(old.size):
        place = line(np.uint64(old[k]), top, mask, ordered) + np.uint64(steps[k])
        out[k] = unline(place & mask, top, mask, ordered)


@helper
def _beyond(positions, low, high, bound):
    """Return the number of the first position from ``low`` to below ``high`` that is ``bound`` or more; else high."""
    while low < high:
        middle = (low + high) // 2
        if positions[middle] < bound:
            low = middle + 1
        else:
            high = middle
    return low


@helper
def _shift(positions, payload, first, offset, where, there, given):
    """List changes that all lie in a straight piece: positions, places in its memory, and what comes there."""
    for k in range(positions.size):
        position = positions[k] - first
        where[k], there[k], given[k] = position, position - offset, payload[k]
    return positions.size


@helper
def _translate(positions, payload, first, offset, dims, where, there, given):
    """List the changes that lie in a piece, as `_shift` does; return how many."""
    found = 0
    for k in range(positions.size):
        rest, to, inside = np.int64(positions[k]) - first - offset, 0, True
        for d in range(dims.shape[0]):
            coordinate = rest // dims[d, 1]
            inside = inside and coordinate < dims[d, 0]
            to += coordinate * dims[d, 2]
            rest -= coordinate * dims[d, 1]
        if inside and rest == 0:
            where[found], there[found], given[found] = positions[k] - first, to, payload[k]
            found += 1
    return found


@njit
def _land(positions, payload, firsts, pieces, addresses, lows, highs, at, dims, here, steps, ordered, keys, like):
    """Translate changes in a range of a stream; where memory can be read, resolve steps and add to digests, too.

    Whoever gives addresses makes sure that the memory from each on holds what the dimensions reach.

    Args:
        positions, payload, firsts: as in `Range`.
        pieces: int64 shape (k + 1,): the first piece of each segment.
        addresses, lows, highs, at, dims: ``addresses``, ``offsets``, ``ends``, ``at`` and ``dims`` of `Places`.
        here: memory can be read; else ``values`` are the payload, and ``words`` and ``sums`` are 0.
        steps, ordered: the payload is steps, and on the line of a sign-magnitude format.
        keys: as in `scan`.
        like: an array of the dtype of offsets.

    Returns:
        For each piece in which something changes: its number, where its changes end, words, and sums; for each change:
        its position in its parameter, elements from the address, and what comes there.
    """
    bounds, room, low = np.empty((pieces[-1] - pieces[0], 3), np.int64), 0, 0
    for segment in range(firsts.size - 1):
        first, high = firsts[segment], _beyond(positions, low, positions.size, firsts[segment + 1])
        for piece in range(pieces[segment], pieces[segment + 1]):
            begin = _beyond(positions, low, high, first + lows[piece])
            end = _beyond(positions, begin, high, first + highs[piece])
            own = bounds[piece - pieces[0]]
            own[0], own[1], own[2] = begin, end, first
            room += end - begin
        low = high
    runs, ends = np.empty(bounds.shape[0], np.int64), np.empty(bounds.shape[0], np.int64)
    words, sums = np.zeros((bounds.shape[0], 2), np.uint64), np.zeros(bounds.shape[0], np.uint64)
    where, offsets, values = np.empty(room, like.dtype), np.empty(room, like.dtype), np.empty(room, payload.dtype)
    top = _1 << np.uint64(8 * payload.itemsize - 1)
    mask, before, count, found = top | (top - _1), np.empty(_LANDED, payload.dtype), 0, 0
    for number in range(bounds.shape[0]):
        (begin, end, first), piece, start = bounds[number], pieces[0] + number, found
        walk, target = dims[at[piece] : at[piece + 1]], carray(pointer(addresses[piece]), (1,), payload.dtype)
        for k in range(begin, end, _LANDED):
            come = slice(k, min(k + _LANDED, end))
            lists = where[found:], offsets[found:], values[found:]
            if walk.shape[0] == 0:
                more = _shift(positions[come], payload[come], first, lows[piece], *lists)
            else:
                more = _translate(positions[come], payload[come], first, lows[piece], walk, *lists)
            if here:
                there, after = offsets[found : found + more], values[found : found + more]
                for i in range(more):
                    before[i] = target[np.uint64(there[i])]
                if steps:
                    move(before[:more], after, top, mask, ordered, after)
                for i in range(more):
                    sums[count] += _weighed(there[i], np.uint64(after[i]))
                _add_change(_NONE, where[found : found + more], before, after, more, keys, words[count])
            found += more
        if found > start:
            runs[count], ends[count] = piece, found
            count += 1
    # the memory that waits for a pause is as long as what will be written in it
    changes = where[:found], offsets[:found].copy(), values[:found].copy()
    return runs[:count], ends[:count], words[:count], sums[:count], *changes


@helper
def _corner(dims, inner, row, offset):
    """Return position and place of the first element of a row: of all coordinates but those in dimension ``inner``."""
    position, place = offset, 0
    for d in range(dims.shape[0] - 1, -1, -1):
        if d != inner:
            coordinate = row % dims[d, 0]
            row //= dims[d, 0]
            position += coordinate * dims[d, 1]
            place += coordinate * dims[d, 2]
    return position, place


@njit
def _digest(addresses, offsets, ends, reach, at, dims, keys, like, words):
    """Add to the digest of each piece its elements.

    Whoever gives addresses makes sure that the memory from each on holds what the dimensions reach.

    Args:
        addresses, offsets, ends, reach, at, dims: as in `Places`.
        keys: as in `scan`.
        like: an array of the unsigned dtype of the elements.
        words: uint64 shape (pieces, 2).
    """
    for piece in range(addresses.size):
        memory = carray(pointer(addresses[piece]), (reach[piece],), like.dtype)
        walk, inner, rows = dims[at[piece] : at[piece + 1]], -1, 1
        size, stride, to = ends[piece] - offsets[piece], _ONE, _ONE
        for d in range(walk.shape[0]):
            rows *= walk[d, 0]
            long = walk[d, 0] >= _INNERMOST
            if inner < 0 or (long, -walk[d, 2]) > (walk[inner, 0] >= _INNERMOST, -walk[inner, 2]):
                inner = d
        if inner >= 0:
            size, stride, to = walk[inner, 0], walk[inner, 1], walk[inner, 2]
            rows //= size
        for row in range(rows):
            position, place = _corner(walk, inner, row, offsets[piece])
            if stride == 1 and to == 1:
                one, two = _linear_run(memory[place : place + size], position, keys)
            else:
                one, two = _linear_elements(memory, place, to, position, stride, size, keys)
            words[piece, 0] += one
            words[piece, 1] += two


def words(pieces: Sequence[Piece]) -> Tensor:
    """As `torchrl_ext.data.deltas.bits.Kernels`."""
    found = np.zeros((len(pieces), 2), np.uint64)
    if pieces:
        like = np.empty(0, UNSIGNED[pieces[0].memory.element_size()])
        _digest(*Places([pieces], [""]).tables, linear_keys(), like, found)
    return torch.from_numpy(found.view(np.int64))


def translate(places: Places, changes: Range, *, here: bool) -> tuple[Writes, Tensor] | None:
    """Translate changes, as `torchrl_ext.data.deltas.bits.Kernels.land` does.

    Args:
        here: memory can be read: resolve steps, and take words and sums.

    Returns:
        What is to be written, on the host, and the position of each change in its parameter; None where there is none.
    """
    segments, firsts, positions, payload, ordered = changes
    pieces = places.first[segments.start : segments.stop + 1]
    addresses, offsets, ends, reach, at, dims = places.tables
    most = reach[pieces[0] : pieces[-1]].max(initial=0)
    like = np.empty(0, np.int32 if most < 2**31 else np.int64)
    tables = addresses, offsets, ends, at, dims, here, ordered is not None, bool(ordered), linear_keys(), like
    runs, *found = _land(positions, payload, firsts, pieces, *tables)
    if not runs.size:
        return None
    stops, words, sums, where, there, values = map(torch.from_numpy, found)
    writes = Writes(
        names=[places.names[run] for run in runs],
        targets=[places.pieces[run].memory for run in runs],
        addresses=torch.from_numpy(addresses[runs]),
        ends=stops,
        offsets=there,
        values=values.view(BITS[payload.itemsize]),
        words=words.view(torch.int64),
        sums=sums.view(torch.int64),
    )
    return writes, where


def land(places: Places, changes: Range) -> Writes | None:
    """As `torchrl_ext.data.deltas.bits.Kernels`."""
    found = translate(places, changes, here=True)
    if found is None:
        return None
    none, nothing = np.empty(0, np.int64), found[0].values[:0]
    # compiled before a commit
    _exchange(none, none, found[0].offsets[:0].numpy(), unsigned(nothing), none)
    return found[0]


def exchange(writes: Writes) -> Tensor:
    """As `torchrl_ext.data.deltas.bits.Kernels`."""
    found, runs = torch.empty_like(writes.sums), (writes.addresses.numpy(), writes.ends.numpy())
    _exchange(*runs, writes.offsets.numpy(), unsigned(writes.values), found.numpy())
    return found


def scatter(target: Tensor, offsets: Tensor, values: Tensor) -> None:
    """As `torchrl_ext.data.deltas.bits.Kernels`."""
    _write(target.data_ptr(), offsets.numpy(), unsigned(values))
