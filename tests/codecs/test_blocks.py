"""Kinds of blocks: blocks of any bits, and sizes against entropy (speeds: ``python -m tests.bench coding``)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.data import bounds
from tests.codecs.contract import block_of, land
from tests.codecs.data import DTYPES
from torchrl_ext.bench.data import synthetic_pair
from torchrl_ext.codecs.blocks import CONTEXT, KINDS, ULP
from torchrl_ext.codecs.units import unit_of, units
from torchrl_ext.stores.table import ParamTable
from torchrl_ext.types import ParamMeta


@st.composite
def blocks(draw):
    """Bits of a block before and after, in a few of the contexts or in all."""
    dtype = draw(st.sampled_from([dtype for dtype in DTYPES if dtype != torch.bool]))  # which has two patterns
    unit, generator = unit_of(dtype), np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.integers(1, 700))
    old = generator.integers(0, 256, size * unit.width, np.uint8).view(unit.dtype)
    if draw(st.booleans()) and unit.select:
        old &= unit.dtype.type(~(unit.select << unit.shift) & int(unit.mask))
        old |= generator.integers(3, 6, size).astype(unit.dtype) << unit.dtype.type(unit.shift)
    new = old + generator.choice([1, 2, 255, 1 << 7], size).astype(unit.dtype)
    changed = generator.random(size) < draw(st.sampled_from([0.01, 0.3, 1.0]))
    changed[draw(st.integers(0, size - 1))] = True
    return dtype, old, np.where(changed, new, old)


@given(blocks(), st.integers(0, 7))
@settings(max_examples=150, deadline=None)
def test_every_block_survives_wherever_its_bytes_lie(block, skip):
    dtype, old, new = block
    elements = old.nbytes // dtype.itemsize
    if old.nbytes % dtype.itemsize:
        old, new = old[:-1], new[:-1]
    found = block_of(old, new)
    if not found.positions.size:
        return
    table = ParamTable.of([ParamMeta("w", dtype, (elements,))])
    for codec in KINDS.values():
        data = memoryview(b"\0" * skip + codec.encode(unit_of(dtype), found))[skip:]
        patch = codec.decode(data, table, 0, 0, old.size, old)
        assert patch.steps == codec.steps and (np.diff(patch.positions) > 0).all()
        landed = land(patch, torch.from_numpy(old.view(np.uint8)).view(dtype))
        assert np.array_equal(units(landed), new), codec


@pytest.mark.parametrize("density", [0.01, 0.1])
def test_context_is_within_six_percent_of_what_exponents_tell(density):
    _, old, new = synthetic_pair({"w": (8192, 512)}, density)[0]
    _, plain, inside = bounds(old, new)
    found, unit = block_of(units(old), units(new)), unit_of(old.dtype)
    assert 0.97 * inside < 8 * len(CONTEXT.encode(unit, found)) < 1.06 * inside < 0.8 * plain
    assert 8 * len(ULP.encode(unit, found)) < 1.03 * plain


def test_runs_of_changes_cost_less_than_scattered_ones():
    _, old, new = synthetic_pair({"w": (8192, 512)}, 0.01, clustered=True)[0]
    _, plain, _ = bounds(old, new)
    for codec in (ULP, CONTEXT):
        assert 8 * len(codec.encode(unit_of(old.dtype), block_of(units(old), units(new)))) < 0.6 * plain


def test_the_bounds_are_the_entropies_of_a_pair_that_can_be_counted_by_hand():
    old = torch.full((1024,), 1.0, dtype=torch.bfloat16)
    new = old.clone()
    new.view(torch.int16)[::4] += 1
    new.view(torch.int16)[::8] += 1  # steps of one and two, equally often; a quarter of all elements
    changed, plain, conditional = bounds(old, new)
    assert changed == 256
    assert plain == conditional == pytest.approx(1024 * 0.8112781244591328 + 256)
