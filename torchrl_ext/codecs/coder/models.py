"""Probability tables of the entropy coder: chosen, written and read, in integers only, so that both ends agree.

A table gives each of 256 tokens a frequency; frequencies sum to 4096. Three ways to write one, cheapest wins:

    constant    0x20, token                          that token costs nothing
    geometric   0x80 | last token, q                 gaps of a Bernoulli process with p = 2^(-q/8)
    explicit    b, last token, gamma codes           frequencies + 1 as Elias-gamma codes, summing to 2^b, b 4..12

These are compiled into `torchrl_ext.codecs.coder.encode` and `torchrl_ext.codecs.coder.decode`.
"""

from __future__ import annotations

import numpy as np

from torchrl_ext.kernels.jit import bit_length, helper

__all__ = ["BITS", "TOTAL", "choose_model", "clear", "read_model"]

BITS = 12
TOTAL = 1 << BITS
_LOGS = np.log2(np.maximum(1, np.arange(TOTAL + 1)))
_POWERS = np.array([round(2 ** (32 - r / 8)) for r in range(8)], np.uint64)  # 2^(-r/8) in units of 2^-32


# Plain loops where numpy has a function: they compile in a tenth of the time.


@helper
def _copy(source, target):
    for t in range(256):
        target[t] = source[t]


@helper
def clear(target):
    """Fill a table with zeros."""
    for t in range(256):
        target[t] = 0


@helper
def _balance(freq, last, total):
    """Change the largest frequencies of tokens up to ``last`` until all sum to ``total``; return whether they do."""
    have = np.int64(0)
    for t in range(last + 1):
        have += freq[t]
    while have != total:
        best = 0
        for t in range(last + 1):
            if freq[t] > freq[best]:
                best = t
        if have < total:
            freq[best] += total - have
            have = total
        else:
            give = min(have - total, max(1, freq[best] // 8), freq[best] - 1)
            if give < 1:
                return False
            freq[best] -= give
            have -= give
    return True


@helper
def _geometric(q, last, freq):
    """Fill ``freq`` for a geometric distribution with p = 2^(-q/8), the last token with the tail; return if it fits."""
    one = np.uint64(1) << np.uint64(32)
    half = np.uint64(32)
    keep = one - (_POWERS[q & 7] >> np.uint64(q >> 3))  # 1 - p
    clear(freq)
    here, power = one, keep  # P(value >= first value of token), keep^(width of token)
    for t in range(last + 1):
        if t >= 16 and (t & 3) == 0:  # tokens 16 to 19 are 4 wide, each four after them twice as wide
            power = (power * power) >> half
            if t == 16:
                power = (power * power) >> half
        after = (here * power) >> half if t < last else np.uint64(0)
        freq[t] = max(np.int64(1), np.int64(((here - after) << np.uint64(BITS)) >> half))
        here = after
    return _balance(freq, last, TOTAL)


@helper
def _quantise(counts, last, total, bits, freq):
    """Fill ``freq`` in proportion to ``counts``, at least 1 for what occurs; return whether it sums to 2^bits."""
    clear(freq)
    for t in range(last + 1):
        if counts[t]:
            freq[t] = max(np.int64(1), ((counts[t] << bits) + total // 2) // total)
    return _balance(freq, last, 1 << bits)


@helper
def _data_bits(counts, last, freq, bits):
    cost = 0.0
    for t in range(last + 1):
        if counts[t]:
            cost += counts[t] * (bits - _LOGS[freq[t]])
    return cost


@helper
def _table_bits(freq, last):
    cost = 16
    for t in range(last + 1):
        cost += 2 * bit_length(np.uint64(freq[t] + 1)) - 1
    return (cost + 7) // 8 * 8


@helper
def choose_model(counts, freq, out, at):
    """Pick the cheapest table for ``counts``, fill ``freq`` with it and write it.

    Args:
        counts: int64 shape (256,), at least one of them positive.
        freq: int64 shape (256,), filled; sums to 4096.
        out: uint8; the table is written from index ``at``, or nothing where ``at`` is negative.

    Returns:
        End of what was written, cost in bits of table and data together.
    """
    last, total, kinds, weight = 0, np.int64(0), 0, 0.0
    for t in range(256):
        if counts[t]:
            last, kinds = t, kinds + 1
            total += counts[t]
            middle = np.float64(t)
            if t >= 16:
                low = np.float64(4 + (t & 3)) * 2.0 ** ((t >> 2) - 2)
                middle = low + 2.0 ** ((t >> 2) - 3)
            weight += counts[t] * middle
    clear(freq)
    if kinds == 1:
        freq[last] = TOTAL
        if at >= 0:
            out[at], out[at + 1] = 0x20, last
        return at + 2, 16.0
    q = min(255, max(0, np.int64(8 * np.log2(weight / total + 1) + 0.5)))
    trial = np.zeros(256, np.int64)
    best, choice = np.inf, -1
    if last < 128 and _geometric(q, last, trial):
        best, choice = _data_bits(counts, last, trial, BITS) + 16, 0
        _copy(trial, freq)
    for bits in (5, 6, 7, 8, 10, 12):
        # A bit more for each frequency pays where there is much to code, and never where there is little.
        if (total > 4096 and bits < 8) or (total > 65536 and bits < 10) or (total < 256 and bits > 8):
            continue
        if _quantise(counts, last, total, bits, trial):
            cost = _data_bits(counts, last, trial, bits) + _table_bits(trial, last)
            if cost < best:
                best, choice = cost, bits
                _copy(trial, freq)
    if at < 0:
        return at, best
    if choice == 0:
        out[at], out[at + 1] = 0x80 | last, q
        return at + 2, best
    out[at], out[at + 1] = choice, last
    at, acc, filled = at + 2, np.uint64(0), 0
    for t in range(last + 1):  # Elias-gamma, low bits first: length - 1 zeros, a one, the bits below the leading one
        value = np.uint64(freq[t] + 1)
        length = bit_length(value)
        acc |= np.uint64(1) << np.uint64(filled + length - 1)
        acc |= (value ^ (np.uint64(1) << np.uint64(length - 1))) << np.uint64(filled + length)
        filled += 2 * length - 1
        while filled >= 8:
            out[at] = acc & np.uint64(255)
            at, acc, filled = at + 1, acc >> np.uint64(8), filled - 8
        freq[t] <<= BITS - choice
    if filled:
        out[at] = acc & np.uint64(255)
        at += 1
    return at, best


@helper
def read_model(data, at, end, freq):
    """Read a table into ``freq`` (int64 shape (256,)).

    Returns:
        Index after it, or -1 where the bytes are no table.
    """
    clear(freq)
    if at < 0 or at + 2 > end:
        return -1
    kind, last = np.int64(data[at]), np.int64(data[at + 1])
    if kind == 0x20:
        freq[last] = TOTAL
        return at + 2
    if kind & 0x80:
        return at + 2 if _geometric(last, kind & 0x7F, freq) else -1
    if kind < 4 or kind > BITS:
        return -1
    at, bit, total = at + 2, 0, np.int64(0)
    for t in range(last + 1):
        zeros = 0
        while True:
            if at >= end or zeros > BITS:
                return -1
            one = (data[at] >> np.uint8(bit)) & np.uint8(1)
            bit += 1
            if bit == 8:
                at, bit = at + 1, 0
            if one:
                break
            zeros += 1
        value = np.int64(1) << zeros
        for i in range(zeros):
            if at >= end:
                return -1
            value |= np.int64((data[at] >> np.uint8(bit)) & np.uint8(1)) << i
            bit += 1
            if bit == 8:
                at, bit = at + 1, 0
        freq[t] = (value - 1) << (BITS - kind)
        total += freq[t]
    if total != TOTAL:
        return -1
    return at + 1 if bit else at
