"""The loops that find what changed, on their own: with and without vector instructions."""

from __future__ import annotations

import itertools

import numpy as np

from torchrl_ext.kernels.host_lists import CHUNK, list_by_vectors, list_by_words, list_changes
from torchrl_ext.kernels.jit import njit

LENGTHS = [0, 1, 7, 31, 33, 64, 1000, CHUNK - 1, CHUNK, CHUNK + 65]


def changed_pair(dtype, length, share, seed=0):
    generator = np.random.default_rng(seed)
    old = generator.integers(0, np.iinfo(dtype).max, length, dtype, endpoint=True)
    new = np.where(generator.random(length) < share, generator.integers(0, 255, length).astype(dtype), old)
    return old, new


@njit
def listed(lister, old, new, begin):
    places, before = np.empty(CHUNK + 64, np.uint16), np.empty(CHUNK + 64, old.dtype)
    after = np.empty(CHUNK + 64, old.dtype)
    found = lister(old, new, begin, places, before, after)
    return places[:found], before[:found], after[:found]


def test_every_way_to_list_changes_finds_the_same():
    ways = [list_by_words, *([list_by_vectors] if list_changes is list_by_vectors else [])]
    dtypes, shares = (np.uint8, np.uint16, np.uint32, np.uint64), (0.0, 0.01, 0.5, 1.0)
    for dtype, share, length in itertools.product(dtypes, shares, LENGTHS):
        old, new = changed_pair(dtype, length, share)
        for begin in range(0, length, CHUNK):
            expected = np.flatnonzero(old[begin : begin + CHUNK] != new[begin : begin + CHUNK])
            for way in ways:
                places, before, after = listed(way, old, new, begin)
                assert np.array_equal(places, expected)
                assert np.array_equal(before, old[begin + expected])
                assert np.array_equal(after, new[begin + expected])
