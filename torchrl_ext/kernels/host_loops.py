"""Compiled loops of `torchrl_ext.kernels.host`; importing this imports numba."""

from __future__ import annotations

import numpy as np

from torchrl_ext.kernels.jit import GOLDEN, fingerprint, line, njit, unline

__all__ = ["digest_change", "digest_runs", "gather", "move", "scatter"]


@njit
def scatter(target, offsets, values):
    """``target[offsets] = values``; offsets lie within the target, which whoever translated them made sure of."""
    for k in range(offsets.size):
        target[offsets[k]] = values[k]


@njit
def gather(target, offsets, found):
    """``found[:] = target[offsets]``."""
    for k in range(offsets.size):
        found[k] = target[offsets[k]]


@njit
def move(old, steps, top, mask, ordered, out):
    """``out[k]`` = the bit pattern ``steps[k]`` places (modulo 2^width) after ``old[k]`` on the ordered line."""
    for k in range(old.size):
        place = line(np.uint64(old[k]), top, mask, ordered) + np.uint64(steps[k])
        out[k] = unline(place & mask, top, mask, ordered)


@njit
def digest_runs(bits, run, first):
    """Sum over runs of ``run`` elements each, run ``r`` starting at position ``first[r]`` of the full tensor."""
    one, two = np.uint64(0), np.uint64(0)
    for r in range(first.size):
        key = np.uint64(first[r]) * GOLDEN
        row = bits[r * run : (r + 1) * run]
        for i in range(row.size):
            a, b = fingerprint(key, np.uint64(row[i]))
            one += a
            two += b
            key += GOLDEN
    return one, two


@njit
def digest_change(indices, old, new, total):
    """Add to ``total`` (uint64 shape (2,)) what a change of ``old`` to ``new`` at ``indices`` does."""
    one, two = total[0], total[1]
    for k in range(indices.size):
        key = np.uint64(indices[k]) * GOLDEN
        a, b = fingerprint(key, np.uint64(old[k]))
        c, d = fingerprint(key, np.uint64(new[k]))
        one += c - a
        two += d - b
    total[0], total[1] = one, two
