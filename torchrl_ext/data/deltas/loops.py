"""Compiled loops of `torchrl_ext.data.deltas.torch_ops`; importing this imports numba."""

from __future__ import annotations

import numpy as np
from numba import carray

from torchrl_ext.data.deltas.bits import ROW, SEED
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

__all__ = [
    "digest_piece",
    "digest_runs",
    "digest_segments",
    "LANDED",
    "land",
    "move",
    "room",
    "scan",
    "sums",
    "write",
]

_CHUNK = 16384  # elements whose changes are listed before they are summed; their places fit into uint16
LANDED = 4096  # changes that are translated together: they stay in the processor's nearest cache
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
        keys: `torchrl_ext.data.deltas.bits.linear_keys`.
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
def sums(ends, offsets, values, totals):
    """Set ``totals``, int64 shape (s,), to `torchrl_ext.data.deltas.bits.Kernels.sums`; values are unsigned."""
    at = 0
    for run in range(ends.size):
        total = np.uint64(0)
        for k in range(at, ends[run]):
            total += _weighed(offsets[k], np.uint64(values[k]))
        totals[run], at = np.int64(total), ends[run]


@njit
def write(addresses, ends, offsets, values, totals):
    """Write runs of values into several tensors, and add up what stands there then, while it lies in a cache.

    Whoever translated the offsets made sure that they lie within the tensors.

    Args:
        addresses: int64 shape (s,): where the tensor of each run begins.
        ends: int64 shape (s,): where each run ends in the next two.
        offsets, values: shape (k,): elements from the first one of the tensor, and what is to stand there: unsigned.
        totals: int64 shape (s,), filled with the `sums`.
    """
    at = 0
    for run in range(ends.size):
        total = np.uint64(0)
        target = carray(pointer(addresses[run]), (1,), values.dtype)
        while at < ends[run]:
            where, own = offsets[at : min(at + LANDED, ends[run])], values[at : min(at + LANDED, ends[run])]
            for k in range(own.size):
                target[np.uint64(where[k])] = own[k]
            for k in range(own.size):
                total += _weighed(where[k], np.uint64(target[np.uint64(where[k])]))
            at += own.size
        totals[run] = np.int64(total)


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


@njit
def room(positions, firsts, pieces, offsets, ends):
    """Return a bound on how many changes `land` lists; arguments as there."""
    count, low = 0, 0
    for segment in range(firsts.size - 1):
        high = _beyond(positions, low, positions.size, firsts[segment + 1])
        if high > low:
            for piece in range(pieces[segment], pieces[segment + 1]):
                begin = _beyond(positions, low, high, firsts[segment] + offsets[piece])
                count += _beyond(positions, begin, high, firsts[segment] + ends[piece]) - begin
        low = high
    return count


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


@helper
def _gather(target, there, found):
    for k in range(there.size):
        found[k] = target[np.uint64(there[k])]


@njit
def land(
    positions,
    payload,
    firsts,
    pieces,
    addresses,
    lows,
    highs,
    at,
    dims,
    here,
    steps,
    ordered,
    keys,
    runs,
    ends,
    where,
    offsets,
    values,
    words,
):
    """Translate changes in a range of a stream; where memory can be read, resolve steps and add to digests, too.

    Whoever gives addresses makes sure that the memory from each on holds what the dimensions reach.

    Args:
        positions: shape (n,), increasing; payload: unsigned, shape (n,): new bits, or (with ``steps``) steps, on the
            line of a sign-magnitude format where ``ordered``.
        firsts: int64 shape (k + 1,): where each segment begins, in the coordinates of ``positions``.
        pieces: int64 shape (k + 1,): the first piece of each segment.
        addresses, lows, highs, at, dims: ``addresses``, ``offsets``, ``ends``, ``at`` and ``dims`` of
            `torchrl_ext.data.deltas.bits.Places`.
        here: memory can be read; else ``values`` are the payload, and ``words`` stay.
        keys: as in `scan`.
        runs, ends: int64: filled with the pieces in which something changes, and where each one's changes end.
        where: int32 or int64: filled with the position of each change in its parameter; overwritten where ``here``,
            and then of shape (LANDED,).
        offsets: as ``where``, values: as ``payload``, of at least `room` elements: filled with elements from the
            address, and what comes there.
        words: uint64 shape (runs, 2): filled with what each run adds to a digest.

    Returns:
        How many changes, in how many pieces.
    """
    top = _1 << np.uint64(8 * payload.itemsize - 1)
    mask = top | (top - _1)
    before = np.empty(LANDED, payload.dtype)
    low, found, count = 0, 0, 0
    for segment in range(firsts.size - 1):
        if low == positions.size:
            break
        first, end, high = firsts[segment], firsts[segment + 1], low
        while high < positions.size and positions[high] < end:
            high += 1
        for piece in range(pieces[segment], pieces[segment + 1]):
            begin, own, target = (
                found,
                dims[at[piece] : at[piece + 1]],
                carray(pointer(addresses[piece]), (1,), before.dtype),
            )
            start, stop = low, high
            if low < high:
                start = _beyond(positions, low, high, first + lows[piece])
                stop = _beyond(positions, start, high, first + highs[piece])
            for k in range(start, stop, LANDED):
                come = slice(k, min(k + LANDED, stop))
                places = where[:LANDED] if here else where[found:]
                if own.shape[0] == 0:
                    more = _shift(
                        positions[come], payload[come], first, lows[piece], places, offsets[found:], values[found:]
                    )
                else:
                    more = _translate(
                        positions[come], payload[come], first, lows[piece], own, places, offsets[found:], values[found:]
                    )
                if here:
                    after = values[found : found + more]
                    _gather(target, offsets[found : found + more], before)
                    if steps:
                        move(before[:more], after, top, mask, ordered, after)
                    _add_change(_NONE, places, before, after, more, keys, words[count])
                found += more
            if found > begin:
                runs[count], ends[count] = piece, found
                count += 1
        low = high
    return found, count


@helper
def _corner(dims, row, offset):
    """Return position and place of the first element of a row: of all coordinates but those in the last dimensions."""
    position, place = offset, 0
    for d in range(dims.shape[0] - 1, -1, -1):
        coordinate = row % dims[d, 0]
        row //= dims[d, 0]
        position += coordinate * dims[d, 1]
        place += coordinate * dims[d, 2]
    return position, place


@njit
def digest_piece(memory, dims, offset, keys, digest):
    """Add to a digest the elements of a piece.

    Args:
        memory: unsigned, shape (m,).
        dims, offset: ``by_memory``, int64 shape (d, 3), and ``offset`` of `torchrl_ext.data.deltas.bits.Piece`.
        keys: `torchrl_ext.data.deltas.bits.linear_keys`.
        digest: uint64 shape (2,).
    """
    last, rows, size, stride, to = dims.shape[0] - 1, 1, 1, 1, 1
    if last >= 0:
        size, stride, to = dims[last, 0], dims[last, 1], dims[last, 2]
    for d in range(last):
        rows *= dims[d, 0]
    one, two = digest[0], digest[1]
    for row in range(rows):
        position, place = _corner(dims[:-1], row, offset)
        if stride == 1 and to == 1:
            a, b = _linear_run(memory[place : place + size], position, keys)
        else:
            a, b = _linear_elements(memory, place, to, position, stride, size, keys)
        one, two = one + a, two + b
    digest[0], digest[1] = one, two


@njit
def digest_runs(addresses, positions, sizes, like, keys, words):
    """Add to the digest of each of several tensors a run of its elements.

    Whoever gives addresses makes sure that the memory from each on holds as many elements.

    Args:
        addresses, positions, sizes: int64 shape (k,): where each run lies in memory, its first element in the tensor,
            and how many elements it has.
        like: an array of the unsigned dtype of the elements.
        keys: `torchrl_ext.data.deltas.bits.linear_keys`.
        words: uint64 shape (k, 2).
    """
    for k in range(addresses.size):
        if sizes[k] > 0:
            one, two = _linear_run(carray(pointer(addresses[k]), (sizes[k],), like.dtype), positions[k], keys)
            words[k, 0] += one
            words[k, 1] += two
