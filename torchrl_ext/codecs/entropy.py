"""The entropy coder of our own encodings: four interleaved rANS states, 16-bit words, static tables per stream.

Range variant of asymmetric numeral systems (J. Duda, arXiv 1311.2540; interleaving as in F. Giesen, arXiv 1402.3392).
A state lives in [2^15, 2^31); tables sum to 4096. Token k of a stream belongs to lane k mod 4, so that four dependency
chains run side by side. The writer runs backwards and starts every lane at 2^15: a reader that ends elsewhere, or with
words left, holds damaged bytes. Bodies of fewer than 512 changes use one lane.

A body, little-endian, varints as in LEB128:

    varint C                  number of contexts that have changes
    C x [byte id], varint n, table     context id (only where contexts are used), changes, table of its gap tokens
    varint G, [C x byte g], G x table  step tables, and which of them a context uses (the bytes only where G > 1)
    varint r, varint w        32-bit words of raw bits, 16-bit words of the coder
    4 x uint32                states, or one
    r x uint32, w x uint16
"""

from __future__ import annotations

import numpy as np

from torchrl_ext.codecs.models import BITS, TOTAL, choose_model, clear, read_model
from torchrl_ext.jit import helper, njit

__all__ = ["ERRORS", "decode_body", "encode_body"]

ERRORS = {
    1: "it ends too early",
    2: "it counts more changes than the block has elements",
    3: "a probability table is malformed",
    4: "the coded tokens do not end where they must",
    5: "contexts are repeated, out of order or unknown",
}
_LOWEST = np.uint64(1 << 15)
_HALF, _SLOT = np.uint64(16), np.uint64(TOTAL - 1)
_BITS = np.uint64(BITS)


@helper
def _write_varint(out, at, value):
    while value >= 128:
        out[at] = (value & 127) | 128
        value >>= 7
        at += 1
    out[at] = value
    return at + 1


@helper
def _read_varint(data, at, end):
    value, shift = np.int64(0), 0
    while at >= 0 and at < end and shift < 42:
        byte = np.int64(data[at])
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return np.int64(0), np.int64(-1)


@helper
def _prepare(freq, limit, scale, shift, bias, rest):
    """Per token: the state above which a word goes out, and what replaces a division (Giesen's `rans_byte.h`)."""
    start = np.uint64(0)
    for t in range(256):
        f = np.uint64(freq[t])
        limit[t] = f << np.uint64(31 - BITS)
        rest[t] = np.uint64(TOTAL) - f
        if f < 2:
            scale[t], shift[t], bias[t] = np.uint64(0xFFFFFFFF), np.uint64(32), start + np.uint64(TOTAL - 1)
        else:
            s = np.uint64(0)
            while f > (np.uint64(1) << s):
                s += np.uint64(1)
            scale[t] = ((np.uint64(1) << (s + np.uint64(31))) + f - np.uint64(1)) // f
            shift[t], bias[t] = s + np.uint64(31), start
        start += f


@helper
def _push(x, t, limit, scale, shift, bias, rest, words, at):
    words[at - 1] = x & np.uint64(0xFFFF)
    full = np.uint64(x >= limit[t])
    at -= np.int64(full)
    x >>= full << np.uint64(4)
    q = (x * scale[t]) >> shift[t]
    return x + bias[t] + q * rest[t], at


@helper
def _lanes(found):
    """Mask that gives a token's lane from its index."""
    return 3 if found >= 512 else 0


@helper
def _encode_run(tokens, low, high, lanes, limit, scale, shift, bias, rest, states, words, at):
    k = high
    while k > low and (k & 3 or not lanes):
        k -= 1
        states[k & lanes], at = _push(states[k & lanes], tokens[k], limit, scale, shift, bias, rest, words, at)
    x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
    while k - 4 >= low:
        k -= 4
        x3, at = _push(x3, tokens[k + 3], limit, scale, shift, bias, rest, words, at)
        x2, at = _push(x2, tokens[k + 2], limit, scale, shift, bias, rest, words, at)
        x1, at = _push(x1, tokens[k + 1], limit, scale, shift, bias, rest, words, at)
        x0, at = _push(x0, tokens[k], limit, scale, shift, bias, rest, words, at)
    states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    while k > low:
        k -= 1
        states[k & 3], at = _push(states[k & 3], tokens[k], limit, scale, shift, bias, rest, words, at)
    return at


@helper
def _joint_bits(counts, c, d, both, spare, nothing):
    """Cost of contexts ``c`` and ``d`` with one step table."""
    for t in range(256):
        both[t] = counts[c, t] + counts[d, t]
    return choose_model(both, spare, nothing, -1)[1]


@helper
def _merge_steps(counts, group):
    """Let neighbouring contexts share a step table as long as that saves bits; ``group[c]`` becomes the table of c."""
    number = counts.shape[0]
    spare, both, nothing = np.zeros(256, np.int64), np.zeros(256, np.int64), np.zeros(1, np.uint8)
    cost = np.empty(number)
    for c in range(number):
        group[c] = c
        cost[c] = choose_model(counts[c], spare, nothing, -1)[1]
    joint = np.zeros(number)  # cost of group c and the next living one together
    after = np.zeros(number, np.int64)
    for c in range(number):
        after[c] = c + 1
        if c + 1 < number:
            joint[c] = _joint_bits(counts, c, c + 1, both, spare, nothing)
    while True:
        best, saved = -1, 0.0
        c = 0
        while c < number and after[c] < number:
            gain = cost[c] + cost[after[c]] - joint[c]
            if gain > saved:
                best, saved = c, gain
            c = after[c]
        if best < 0:
            break
        gone = after[best]
        for t in range(256):
            counts[best, t] += counts[gone, t]
        cost[best] = joint[best]
        after[best] = after[gone]
        for c in range(number):
            if group[c] == gone:
                group[c] = best
        if after[best] < number:
            joint[best] = _joint_bits(counts, best, after[best], both, spare, nothing)
        c = 0
        while c < best:
            if after[c] == best:
                joint[c] = _joint_bits(counts, c, best, both, spare, nothing)
            c = after[c]


@njit
def encode_body(gaps, steps, starts, ids, named, raw_words, most, head, words):
    """Code one block.

    Args:
        gaps, steps: uint8 tokens of each change, grouped by context.
        starts: int64 shape (C + 1,): context c owns tokens ``starts[c]`` to ``starts[c + 1]``; none is empty.
        ids: uint8 shape (C,), strictly increasing.
        named: whether ids are written.
        raw_words: 32-bit words of raw bits, which follow the head.
        most: give up beyond this many bytes.
        head: uint8, filled from 0.
        words: uint16 of at least two per change and four, filled from its end.

    Returns:
        Bytes of ``head``, index of the first word used; (-1, 0) where the body would exceed ``most``.
    """
    number = ids.size
    at = _write_varint(head, 0, number)
    if raw_words * 4 > most:
        return -1, 0
    freq = np.zeros(256, np.int64)
    tables = np.empty((2 * number, 5, 256), np.uint64)
    step_counts = np.zeros((number, 256), np.int64)
    counts, bits = np.zeros(256, np.int64), 0.0
    for c in range(number):
        clear(counts)
        for k in range(starts[c], starts[c + 1]):
            counts[gaps[k]] += 1
            step_counts[c, steps[k]] += 1
        if named:
            head[at] = ids[c]
            at += 1
        at = _write_varint(head, at, starts[c + 1] - starts[c])
        at, cost = choose_model(counts, freq, head, at)
        bits += cost
        table = tables[2 * c]
        _prepare(freq, table[0], table[1], table[2], table[3], table[4])
    group = np.zeros(number, np.int64)
    if number > 1:
        _merge_steps(step_counts, group)
    rank, groups = np.zeros(number, np.int64), 0
    for c in range(number):
        if group[c] == c:
            rank[c] = groups
            groups += 1
    at = _write_varint(head, at, groups)
    if groups > 1:
        for c in range(number):
            head[at] = rank[group[c]]
            at += 1
    for c in range(number):
        if group[c] == c:
            at, cost = choose_model(step_counts[c], freq, head, at)
            bits += cost
            table = tables[2 * c + 1]
            _prepare(freq, table[0], table[1], table[2], table[3], table[4])
    if bits / 8 + raw_words * 4 > most:
        return -1, 0
    states = np.zeros(4, np.uint64)
    for lane in range(4):
        states[lane] = _LOWEST
    first, lanes = words.size, _lanes(starts[number])
    for c in range(number - 1, -1, -1):
        low, high = starts[c], starts[c + 1]
        t = tables[2 * group[c] + 1]
        first = _encode_run(steps, low, high, lanes, t[0], t[1], t[2], t[3], t[4], states, words, first)
        t = tables[2 * c]
        first = _encode_run(gaps, low, high, lanes, t[0], t[1], t[2], t[3], t[4], states, words, first)
    at = _write_varint(head, at, raw_words)
    at = _write_varint(head, at, words.size - first)
    for lane in range(lanes + 1):
        for byte in range(4):
            head[at] = (states[lane] >> np.uint64(8 * byte)) & np.uint64(255)
            at += 1
    return at, first


@helper
def _pull(x, slots, data, at, last):
    """State after a token, index of the next word, token; without a branch, since every third token needs a word."""
    entry = np.uint64(slots[x & _SLOT])
    x = ((entry >> np.uint64(8)) & _SLOT) * (x >> _BITS) + (x >> _BITS) + (entry >> np.uint64(20))
    short = np.uint64(x < _LOWEST)
    here = min(at, last)  # damaged bytes ask for more words than there are; the end of the run tells
    word = np.uint64(data[here]) | np.uint64(data[here + 1]) << np.uint64(8)
    x = (x << (short << np.uint64(4))) | (word & (np.uint64(0) - short))
    return x, at + 2 * np.int64(short), np.uint8(entry & np.uint64(255))


@helper
def _decode_run(tokens, low, high, lanes, freq, slots, states, data, at, last):
    """Slots pack token (8 bits), frequency - 1 (12 bits) and offset in the token's range (12 bits)."""
    start = 0
    for t in range(256):
        for i in range(freq[t]):
            slots[start + i] = t | ((freq[t] - 1) << 8) | (i << 20)
        start += freq[t]
    k = low
    while k < high and (k & 3 or not lanes):
        states[k & lanes], at, tokens[k] = _pull(states[k & lanes], slots, data, at, last)
        k += 1
    x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
    while k + 4 <= high:
        x0, at, tokens[k] = _pull(x0, slots, data, at, last)
        x1, at, tokens[k + 1] = _pull(x1, slots, data, at, last)
        x2, at, tokens[k + 2] = _pull(x2, slots, data, at, last)
        x3, at, tokens[k + 3] = _pull(x3, slots, data, at, last)
        k += 4
    states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    while k < high:
        states[k & 3], at, tokens[k] = _pull(states[k & 3], slots, data, at, last)
        k += 1
    return at


@njit
def decode_body(data, size, named):
    """Inverse of `encode_body`, trusting nothing.

    Args:
        data: uint8, the body.
        size: elements of the block.
        named: whether ids are written.

    Returns:
        Error (a key of `ERRORS`, 0 for none), gap tokens uint8 (n,), step tokens uint8 (n,), ids uint8 (C,), starts
        int64 (C + 1,), and the range of ``data`` with the raw bits.
    """
    nothing, no_starts = np.zeros(0, np.uint8), np.zeros(1, np.int64)
    end = data.size
    number, at = _read_varint(data, 0, end)
    if at < 0 or number < 1 or number > (256 if named else 1):
        return 5, nothing, nothing, nothing, no_starts, 0, 0
    ids, starts = np.zeros(number, np.uint8), np.zeros(number + 1, np.int64)
    freq = np.zeros((2 * number, 256), np.int64)
    for c in range(number):
        if named:
            if at >= end:
                return 1, nothing, nothing, nothing, no_starts, 0, 0
            ids[c] = data[at]
            at += 1
            if c and ids[c] <= ids[c - 1]:
                return 5, nothing, nothing, nothing, no_starts, 0, 0
        count, at = _read_varint(data, at, end)
        starts[c + 1] = starts[c] + count
        if at < 0 or count < 1 or starts[c + 1] > size:
            return 2, nothing, nothing, nothing, no_starts, 0, 0
        at = read_model(data, at, end, freq[c])
        if at < 0:
            return 3, nothing, nothing, nothing, no_starts, 0, 0
    groups, at = _read_varint(data, at, end)
    if at < 0 or groups < 1 or groups > number:
        return 5, nothing, nothing, nothing, no_starts, 0, 0
    group = np.zeros(number, np.int64)
    if groups > 1:
        for c in range(number):
            if at >= end or data[at] >= groups:
                return 5, nothing, nothing, nothing, no_starts, 0, 0
            group[c] = data[at]
            at += 1
    for g in range(groups):
        at = read_model(data, at, end, freq[number + g])
        if at < 0:
            return 3, nothing, nothing, nothing, no_starts, 0, 0
    raw_words, at = _read_varint(data, at, end)
    coded, at = _read_varint(data, at, end)
    lanes = _lanes(starts[number])
    if at < 0 or at + 4 * (lanes + 1) + 4 * raw_words + 2 * coded != end:
        return 1, nothing, nothing, nothing, no_starts, 0, 0
    states = np.zeros(4, np.uint64)
    for lane in range(4):
        states[lane] = np.uint64(0) if lane <= lanes else _LOWEST
    for lane in range(lanes + 1):
        for byte in range(4):
            states[lane] |= np.uint64(data[at]) << np.uint64(8 * byte)
            at += 1
        if states[lane] < _LOWEST or states[lane] >> np.uint64(31):
            return 4, nothing, nothing, nothing, no_starts, 0, 0
    raw_end = at + 4 * raw_words
    found = starts[number]
    gap_tokens, step_tokens = np.empty(found, np.uint8), np.empty(found, np.uint8)
    slots, word = np.empty(TOTAL, np.uint32), raw_end
    for c in range(number):
        low, high = starts[c], starts[c + 1]
        word = _decode_run(gap_tokens, low, high, lanes, freq[c], slots, states, data, word, end - 2)
        word = _decode_run(step_tokens, low, high, lanes, freq[number + group[c]], slots, states, data, word, end - 2)
    for lane in range(4):
        if states[lane] != _LOWEST:
            word = -1
    if word != end:
        return 4, nothing, nothing, nothing, no_starts, 0, 0
    return 0, gap_tokens, step_tokens, ids, starts, at, raw_end
