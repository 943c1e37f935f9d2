"""Deltas made worse, byte by byte and value by value: none is believed, and none takes memory that it should not."""

from __future__ import annotations

import random

import pytest

from tests.data.versions.damage import KINDS, MOST_BYTES, WAYS, many, published
from tests.hostile import at_most_more_bytes


@pytest.fixture(scope="module")
def own():
    return [*map(published, KINDS)]


@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("what", WAYS)
def test_damaged_delta_is_refused_or_reads_as_published(what, count, own):
    outcomes = many(what, count, 1, own)
    assert not outcomes["wrong"]
    assert outcomes["read"] and sum(outcomes.values()) - outcomes["read"] > count // 2


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_of_a_file_counts(kind, own):
    one, chance = own[KINDS.index(kind)], random.Random(2)
    ((name, data),) = one.files.items()
    with at_most_more_bytes(MOST_BYTES):
        for at in chance.sample(range(len(data)), min(len(data), 300)):
            bad = bytearray(data)
            bad[at] ^= 1 << chance.randrange(8)
            assert one.judge(one.manifest, {name: bytes(bad)}) != "read"
