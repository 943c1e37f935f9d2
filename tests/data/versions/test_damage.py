"""Deltas made worse, byte by byte and value by value: none is believed, and none takes memory that it should not."""

from __future__ import annotations

import pytest

from tests.data.versions.damage import KINDS, WAYS, many, published


@pytest.fixture(scope="module")
def own():
    return [*map(published, KINDS)]


@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("what", WAYS)
def test_damaged_delta_is_refused_or_reads_as_published(what, count, own):
    outcomes = many(what, count, 1, own)
    assert not outcomes["wrong"]
    assert outcomes["read"] and sum(outcomes.values()) - outcomes["read"] > count // 2
