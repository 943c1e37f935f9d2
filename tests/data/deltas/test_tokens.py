"""Blocks of changes as joint tokens: every bit survives, sizes are near the entropy, and no bytes are trusted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_ext.base.errors import IntegrityError
from torchrl_ext.data.deltas.tokens import decode, encode, varints

SPAN = 1 << 40
GAPS = st.one_of(st.integers(0, 40), st.integers(0, 1 << 22), st.integers(0, 1 << 36))


@st.composite
def blocks(draw):
    """Width of a step in bits, positions and steps; in some blocks nearly all changes are alike."""
    nbits = draw(st.sampled_from((8, 16, 32, 64)))
    top = 1 << nbits
    near = st.sampled_from((1, 2, 3, 17, top - 1, top - 2, top // 2 - 1, top // 2, top // 2 + 1))
    rows = draw(st.lists(st.tuples(GAPS, st.one_of(near, st.integers(1, top - 1))), max_size=60))
    rows += [(0, draw(near))] * draw(st.sampled_from((0, 0, 2000)))
    positions = np.cumsum(np.array([gap + 1 for gap, _ in rows], np.int64)) - 1
    return nbits, positions, np.array([step for _, step in rows], f"<u{nbits // 8}")


@settings(max_examples=150)
@given(blocks())
def test_changes_round_trip_and_none_exceeds_its_place(block):
    nbits, positions, steps = block
    data = encode(positions, steps, nbits)
    found, moved = decode(data, positions.size, SPAN, nbits)
    assert found.dtype == np.int64 and np.array_equal(found, positions)
    assert moved.dtype == steps.dtype and np.array_equal(moved, steps)
    for most, span in ((positions.size - 1, SPAN), (positions.size, int(positions[-1]))) if positions.size else ():
        with pytest.raises(IntegrityError):
            decode(data, most, span, nbits)


def test_a_few_bytes_do_not_stand_for_any_number_of_equal_tokens():
    data = encode(np.arange(3000), np.where(np.arange(3000) % 90, 1, 5).astype(np.uint16), 16)
    assert data[:3] == b"\x15\xb8\x17"
    with pytest.raises(IntegrityError, match="'w'"):
        decode(b"\x15" + varints(1 << 34) + data[3:], 1 << 40, 1 << 40, 16, "'w'")
