"""The loop that lists what changed, on its own."""

from __future__ import annotations

import itertools

import numpy as np

from torchrl_ext.kernels.host_loops import _CHUNK, _list_changes
from torchrl_ext.kernels.jit import njit

LENGTHS = [0, 1, 7, 31, 33, 64, 1000, _CHUNK - 1, _CHUNK, _CHUNK + 65]


def changed_pair(dtype, length, share, seed=0):
    generator = np.random.default_rng(seed)
    old = generator.integers(0, np.iinfo(dtype).max, length, dtype, endpoint=True)
    new = np.where(generator.random(length) < share, generator.integers(0, 255, length).astype(dtype), old)
    return old, new


@njit
def listed(old, new, begin):
    places, before = np.empty(_CHUNK + 64, np.uint16), np.empty(_CHUNK + 64, old.dtype)
    after = np.empty(_CHUNK + 64, old.dtype)
    found = _list_changes(old, new, begin, places, before, after)
    return places[:found], before[:found], after[:found]


def test_what_is_listed_is_what_a_comparison_finds():
    dtypes, shares = (np.uint8, np.uint16, np.uint32, np.uint64), (0.0, 0.01, 0.5, 1.0)
    for dtype, share, length in itertools.product(dtypes, shares, LENGTHS):
        old, new = changed_pair(dtype, length, share)
        for begin in range(0, length, _CHUNK):
            expected = np.flatnonzero(old[begin : begin + _CHUNK] != new[begin : begin + _CHUNK])
            places, before, after = listed(old, new, begin)
            assert np.array_equal(places, expected)
            assert np.array_equal(before, old[begin + expected])
            assert np.array_equal(after, new[begin + expected])
