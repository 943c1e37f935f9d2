"""Blocks of changes as joint tokens: every bit survives, sizes are near the entropy, and no bytes are trusted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.data import bounds
from tests.codecs.data import DTYPES, pairs
from torchrl_ext.bench.data import synthetic_pair
from torchrl_ext.codecs.patch import StepPatch, apply_patch
from torchrl_ext.codecs.token_loops import steps_between
from torchrl_ext.codecs.tokens import decode, encode, varints
from torchrl_ext.codecs.units import unit_of, units
from torchrl_ext.errors import IntegrityError

SPAN = 1 << 40
GAPS = st.one_of(st.integers(0, 40), st.integers(0, 1 << 22), st.integers(0, 1 << 36))


def changes(old, new):
    """Positions and steps between two tensors of one dtype."""
    unit, before, after = unit_of(old.dtype), units(old), units(new)
    positions = np.flatnonzero(before != after)
    steps = np.empty(positions.size, unit.dtype)
    steps_between(before[positions], after[positions], unit.top, unit.mask, unit.ordered, steps)
    return positions, steps


@st.composite
def blocks(draw):
    nbits = draw(st.sampled_from((8, 16, 32, 64)))
    top = 1 << nbits
    near = st.sampled_from((1, 2, 3, 17, top - 1, top - 2, top // 2 - 1, top // 2, top // 2 + 1))
    rows = draw(st.lists(st.tuples(GAPS, st.one_of(near, st.integers(1, top - 1))), min_size=0, max_size=60))
    positions = np.cumsum(np.array([gap + 1 for gap, _ in rows], np.int64)) - 1
    return nbits, positions, np.array([step for _, step in rows], f"<u{nbits // 8}")


@settings(deadline=None, max_examples=300)
@given(blocks())
def test_every_list_of_changes_survives(block):
    nbits, positions, steps = block
    data = encode(positions, steps, nbits)
    found, moved = decode(data, positions.size, SPAN, nbits)
    assert found.dtype == np.int64 and np.array_equal(found, positions)
    assert moved.dtype == steps.dtype and np.array_equal(moved, steps)
    if positions.size:
        with pytest.raises(IntegrityError):
            decode(data, positions.size - 1, SPAN, nbits)
        with pytest.raises(IntegrityError):
            decode(data, positions.size, int(positions[-1]), nbits)


@pytest.mark.parametrize("gaps", [[3], [700, 1], [0, 300, 510, 254, 255, 256]])
@pytest.mark.parametrize("common", [1, 2, 50_000])
def test_where_nearly_all_are_equal_the_others_are_listed(gaps, common):
    steps = np.full(5000, common, np.uint16)
    positions = np.arange(5000, dtype=np.int64)
    for at in np.cumsum(gaps):
        steps[at] = 3
        positions[at:] += 40
    data = encode(positions, steps, 16)
    assert data[0] & 16 and len(data) < 200 + 2 * 5000 * (common > 2)
    found, moved = decode(data, 5000, SPAN, 16)
    assert np.array_equal(found, positions) and np.array_equal(moved, steps)


def test_every_bit_of_every_dtype_survives_in_blocks_that_are_read_one_by_one():
    for dtype in DTYPES:
        unit = unit_of(dtype)
        for meta, old, new in pairs(dtype):
            positions, steps = changes(old, new)
            landed, count = old.clone(), unit.count(meta)
            for start in reversed(range(0, count, 4096)):
                own = slice(*np.searchsorted(positions, (start, start + 4096)))
                data = encode(positions[own].astype(np.int32), steps[own], 8 * unit.width)
                assert len(data) <= 4096 * unit.width + 16
                apply_patch(StepPatch(meta, *decode(data, 4096, count, 8 * unit.width)), landed)
            assert np.array_equal(units(landed), units(new)), meta


@pytest.mark.parametrize(("density", "clustered"), [(0.01, False), (0.1, False), (0.5, False), (0.03, True)])
def test_a_block_is_within_three_percent_of_bernoulli_positions_and_order_0_steps(density, clustered):
    _, old, new = synthetic_pair(density, clustered=clustered, hidden=512, layers=0, vocabulary=8192)[0]
    changed, plain, _ = bounds(old, new)
    positions, steps = changes(old, new)
    assert positions.size == changed
    bits = 8 * len(encode(positions, steps, 16))
    assert bits <= 0.6 * plain if clustered else 0.98 * plain < bits <= 1.03 * plain


@pytest.fixture(scope="module")
def damaged():
    """Blocks of each kind with the bound of their changes."""
    made = []
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64):
        for _, old, new in pairs(dtype, (63, 4097)):
            positions, steps = changes(old, new)
            if positions.size:
                made.append((encode(positions, steps, 8 * dtype.itemsize), old.numel(), 8 * dtype.itemsize))
    steps = np.where(np.arange(3000) % 90, 1, 5).astype(np.uint16)
    made.append((encode(np.arange(3000), steps, 16), 3000, 16))
    assert {data[0] for data, _, _ in made} >= {1, 5, 7, 8, 21}
    return made


def test_damaged_bytes_are_refused_or_are_changes_of_the_stream(damaged):
    generator, refused = np.random.default_rng(0), 0
    for data, span, nbits in damaged:
        for _ in range(120):
            bad = bytearray(data)
            for _ in range(generator.integers(1, 4)):
                bad[generator.integers(0, min(len(bad), generator.choice((8, 40, 1 << 20))))] = generator.integers(256)
            for cut in (bad, bad[: generator.integers(1, len(bad) + 1)], bad + b"\0"):
                try:
                    positions, steps = decode(bytes(cut), span, span, nbits, "block 7")
                except IntegrityError as error:
                    refused += 1
                    assert "block 7" in str(error)
                else:
                    assert positions.size == steps.size <= span and steps.all()
                    assert positions[0] >= 0 and positions[-1] < span and (np.diff(positions) > 0).all()
    assert refused > 1000


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x00",
        b"\x09\x01\x00",
        b"\x01" + b"\xff" * 20,
        b"\x01\x01",
        b"\x01\x00\x00\x00\x00\x00",
        b"\x01\x01\x64\x01\x00\x00\x01",
        b"\x01\x01\x00\x01\x00\x00\xff",
        b"\x01\x01\x00\x01\x00\x00\x02",
        b"\x01\x01\x00\x01\x00\x00\x04",
        b"\x03\x01\x00\x01\x00\x00\x01",
        b"\x11\x01\x00\x00\x00\x00",
        b"\x11\x01\x00\x05\x00\x00\x00\x01\x01\x00\x00",
        b"\x13\x01\x00\x01\x00\x00\x00",
        b"\x08\x01\x00\x01",
        b"\x08\x02\x00\x01\x00\x00\x00",
    ],
)
def test_hostile_heads_are_refused(data):
    with pytest.raises(IntegrityError, match="'w'"):
        decode(data, 100, 100, 16, "'w'")


def test_a_few_bytes_do_not_stand_for_any_number_of_equal_tokens():
    data = encode(np.arange(3000), np.where(np.arange(3000) % 90, 1, 5).astype(np.uint16), 16)
    assert data[:3] == b"\x15\xb8\x17"
    with pytest.raises(IntegrityError, match="'w'"):
        decode(b"\x15" + varints(1 << 34) + data[3:], 1 << 40, 1 << 40, 16, "'w'")
