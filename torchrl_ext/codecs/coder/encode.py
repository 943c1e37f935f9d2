"""The entropy coder of our own encodings: four interleaved rANS states, 16-bit words, static tables per stream.

Range variant of asymmetric numeral systems (J. Duda, arXiv 1311.2540; interleaving as in F. Giesen, arXiv 1402.3392).
A state lives in [2^15, 2^31); tables sum to 4096. Token k of a stream belongs to lane k mod 4, so that four dependency
chains run side by side. The writer runs backwards and starts every lane at 2^15: a reader that ends elsewhere, or with
words left, holds damaged bytes. Bodies of fewer than 4096 changes use one lane, since each state takes four bytes.

A body, little-endian, varints as in LEB128, bits from the lowest of a byte up:

    varint C                  number of contexts that have changes
    C - 1 bits                whether a context's id is one more than the one before (only where contexts are used)
    C x [byte id], varint n, table     context id (where no bit says it), changes, table of its gap tokens
    C - 1 bits                whether a context has another step table than the one before
    tables                    step tables
    varint r, varint w        32-bit words of raw bits, 16-bit words of the coder
    4 x uint32                states, or one
    r x uint32, w x uint16
"""

from __future__ import annotations

import numpy as np

from torchrl_ext.codecs.coder.models import BITS, TOTAL, choose_model, clear
from torchrl_ext.kernels.jit import helper, njit

__all__ = ["LOWEST", "encode_body", "lanes_for"]

LOWEST = np.uint64(1 << 15)
_1, _2, _3, _4 = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)


@helper
def _write_varint(out, at, value):
    while value >= 128:
        out[at] = (value & 127) | 128
        value >>= 7
        at += 1
    out[at] = value
    return at + 1


@helper
def _clear_bits(out, at, count):
    """Make room for ``count`` bits, all zero, and return its end."""
    end = at + (count + 7) // 8
    for i in range(at, end):
        out[i] = 0
    return end


@helper
def _prepare(freq, limit, scale, shift, bias, rest):
    """Fill per token the state above which a word goes out, and what replaces a division (Giesen's `rans_byte.h`)."""
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
    """Return the state after a token and where words begin; ``at`` is unsigned, which saves a check of its sign."""
    words[at - _1] = x & np.uint64(0xFFFF)
    full = np.uint64(x >= limit[t])
    at -= full
    x >>= full << np.uint64(4)
    q = (x * scale[t]) >> shift[t]
    return x + bias[t] + q * rest[t], at


@helper
def lanes_for(found):
    """Return the mask that gives a token's lane from its index."""
    return 3 if found >= 4096 else 0


@helper
def _encode_run(tokens, low, high, lanes, limit, scale, shift, bias, rest, states, words, at):
    k = high
    while k > low and (k & 3 or not lanes):
        k -= 1
        states[k & lanes], at = _push(states[k & lanes], tokens[k], limit, scale, shift, bias, rest, words, at)
    x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
    i = np.uint64(k)
    for _ in range((k - low) // 4):
        i -= _4
        x3, at = _push(x3, tokens[i + _3], limit, scale, shift, bias, rest, words, at)
        x2, at = _push(x2, tokens[i + _2], limit, scale, shift, bias, rest, words, at)
        x1, at = _push(x1, tokens[i + _1], limit, scale, shift, bias, rest, words, at)
        x0, at = _push(x0, tokens[i], limit, scale, shift, bias, rest, words, at)
    states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    k = np.int64(i)
    while k > low:
        k -= 1
        states[k & 3], at = _push(states[k & 3], tokens[k], limit, scale, shift, bias, rest, words, at)
    return at


@helper
def _count(tokens, low, high, counts):
    """Count how often each token occurs, into ``counts``; in four tables, so that equal neighbours do not wait."""
    clear(counts)
    if high - low < 1024:
        for k in range(low, high):
            counts[tokens[k]] += 1
        return
    four = np.zeros((4, 256), np.uint32)
    whole = low + (high - low) // 4 * 4
    for k in range(low, whole, 4):
        four[0, tokens[k]] += np.uint32(1)
        four[1, tokens[k + 1]] += np.uint32(1)
        four[2, tokens[k + 2]] += np.uint32(1)
        four[3, tokens[k + 3]] += np.uint32(1)
    for k in range(whole, high):
        counts[tokens[k]] += 1
    for t in range(256):
        counts[t] += np.int64(four[0, t]) + np.int64(four[1, t]) + np.int64(four[2, t]) + np.int64(four[3, t])


@helper
def _joint_bits(counts, c, d, both, spare, nothing):
    """Return the cost in bits of contexts ``c`` and ``d`` with one step table."""
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
    joint = np.zeros(number)  # cost of group c and the next one together
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
    """Code the tokens of one block into ``head`` and ``words``.

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
    follows, at = at, _clear_bits(head, at, number - 1 if named else 0)
    freq = np.zeros(256, np.int64)
    tables = np.empty((2 * number, 5, 256), np.uint64)
    step_counts = np.zeros((number, 256), np.int64)
    counts, bits = np.zeros(256, np.int64), 0.0
    for c in range(number):
        _count(gaps, starts[c], starts[c + 1], counts)
        _count(steps, starts[c], starts[c + 1], step_counts[c])
        if named and c and ids[c] == ids[c - 1] + 1:
            head[follows + (c - 1) // 8] |= 1 << ((c - 1) & 7)
        elif named:
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
    fresh, at = at, _clear_bits(head, at, number - 1)
    for c in range(1, number):
        if group[c] == c:
            head[fresh + (c - 1) // 8] |= 1 << ((c - 1) & 7)
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
        states[lane] = LOWEST
    first, lanes = np.uint64(words.size), lanes_for(starts[number])
    for c in range(number - 1, -1, -1):
        low, high = starts[c], starts[c + 1]
        t = tables[2 * group[c] + 1]
        first = _encode_run(steps, low, high, lanes, t[0], t[1], t[2], t[3], t[4], states, words, first)
        t = tables[2 * c]
        first = _encode_run(gaps, low, high, lanes, t[0], t[1], t[2], t[3], t[4], states, words, first)
    at = _write_varint(head, at, raw_words)
    begin = np.int64(first)
    at = _write_varint(head, at, words.size - begin)
    for lane in range(lanes + 1):
        for byte in range(4):
            head[at] = (states[lane] >> np.uint64(8 * byte)) & np.uint64(255)
            at += 1
    return at, begin
