"""Encodings by name: what those of blocks promise, each of them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.data import bounds
from tests.data.deltas.data import DTYPES, pairs
from torchrl_ext.base.errors import ConfigError, IntegrityError
from torchrl_ext.base.registry import encodings
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.cli.bench import synthetic_pair
from torchrl_ext.data.deltas.blocks import KINDS, decode_block, encode_block
from torchrl_ext.data.deltas.streams import Found
from torchrl_ext.data.deltas.table import ParamTable, unit_of, units
from torchrl_ext.data.deltas.tokens import decode, encode, varints
from torchrl_ext.data.transports.delta import DeltaTransport
from torchrl_ext.sync.local.inprocess import InProcessEngine
from torchrl_ext.sync.sender import WeightSender
from torchrl_ext.testing import same_bits

BLOCK = 4096  # units


def block_of(old: np.ndarray, new: np.ndarray, start: int = 0) -> Found:
    """What changed in a block, of which these are all units."""
    positions = np.flatnonzero(old != new).astype(np.int32)
    return Found(0, start, positions, old[positions], new[positions], range(1), np.zeros((1, 2), np.uint64), old)


def blocks_of(dtype: torch.dtype, *sizes: tuple[int, ...]):
    """The table of a tensor, what was found in each of its blocks, and their new units."""
    for meta, old, new in pairs(dtype, *sizes):
        for start in range(0, meta.numel, BLOCK):
            before, after = (units(side)[start : start + BLOCK].copy() for side in (old, new))
            found = block_of(before, after, start)
            if found.positions.size:
                yield ParamTable.of([meta]), found, after


@pytest.mark.parametrize("name", encodings.names())
def test_each_block_alone_restores_every_bit_of_every_dtype(name):
    encoding = encodings.make(name)
    for dtype in DTYPES:
        for table, found, after in blocks_of(dtype, (1, 63, 64, 9000)):
            kind, data = encoding.encode(unit_of(dtype), found)
            assert name not in ("auto", "bitmap") or len(data) <= 1.2 * found.old.nbytes + 600
            base = found.old if kind == "context" else None
            patch = decode_block(kind, memoryview(b"\0" + data)[1:], table, 0, found.start, found.size, base)
            assert patch.positions.dtype == np.int32 and patch.values.dtype == unit_of(dtype).dtype
            patch.apply(found.old)
            assert found.old.tobytes() == after.tobytes(), dtype


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_bytes_do_not_take_the_memory_of_a_large_range(kind):
    """The range is what a manifest says; of a block that is read with its base, that is held."""
    table, old = ParamTable.of([ParamMeta("w", torch.bfloat16, (1 << 40,))]), np.zeros(100, np.uint16)
    if kind == "context":
        with pytest.raises(ConfigError, match="base"):
            decode_block(kind, b"\0\0", table, 0, 0, 100)
        with pytest.raises(IntegrityError, match="100 units"):
            decode_block(kind, b"\0\0", table, 0, 0, 99, old)
        for data in (b"\x02\x05\x05\0\0\0", b"\x01\xff\0\0", b"\x00\x05", b"\x00", b"\x05"):
            with pytest.raises(IntegrityError, match="block 0 of stream 0"):
                decode_block(kind, data, table, 0, 0, 100, old)
        return
    for data in (b"\x01\x02\x00", b"\x03" + b"\xff" * 4 + b"\x0f\x00" + bytes(20), bytes(16)):
        with pytest.raises(IntegrityError, match="block 0 of stream 0"):
            decode_block(kind, data, table, 0, 0, 1 << 40)


@pytest.mark.parametrize("density", [0.01, 0.1])
def test_context_is_within_six_percent_of_what_exponents_tell(density):
    _, old, new = synthetic_pair({"w": (8192, 512)}, density)[0]
    _, plain, inside = bounds(old, new)
    found, unit, table = block_of(units(old), units(new)), unit_of(old.dtype), ParamTable.of([ParamMeta.of("w", old)])
    coded = {kind: encode_block(kind, unit, found) for kind in ("context", "ulp")}
    assert 0.97 * inside < 8 * len(coded["context"]) < 1.06 * inside < 0.8 * plain
    assert 8 * len(coded["ulp"]) < 1.03 * plain
    for kind, data in coded.items():
        landed = old.clone()
        decode_block(kind, data, table, 0, 0, found.size, found.old).apply(units(landed))
        assert same_bits(landed, new)


@pytest.mark.parametrize(("density", "kind"), [(0.001, "ulp"), (0.2, "ulp"), (0.5, "bitmap"), (1.0, "ulp")])
def test_auto_is_ulp_or_bitmap_where_that_block_is_shorter(density, kind):
    """Bits that change to any others: nothing about their steps is short."""
    generator = np.random.default_rng(0)
    old = generator.integers(0, 1 << 16, 1 << 16).astype(np.uint16)
    new = np.where(generator.random(old.size) < density, generator.integers(0, 1 << 16, old.size), old)
    found, unit = block_of(old, new.astype(np.uint16)), unit_of(torch.int16)
    coded = {one: encode_block(one, unit, found) for one in ("ulp", "bitmap")}
    assert coded[kind] == min(coded.values(), key=len)
    assert encodings.make("auto").encode(unit, found) == (kind, coded[kind])


def test_reports_say_how_blocks_were_coded(tmp_path):
    weights = {"noise": torch.zeros(1 << 16, dtype=torch.int16), "few": torch.zeros(1 << 16)}
    served, told = {name: one.clone() for name, one in weights.items()}, []
    noise = torch.randint(-(1 << 15), 1 << 15, (1 << 16,), dtype=torch.int16)
    with WeightSender(DeltaTransport(tmp_path), InProcessEngine(served)) as sender:
        for few, noisy in ((0, 0.0), (3, 0.0), (4, 0.5)):
            weights["few"][few] += few
            weights["noise"] = torch.where(torch.rand(1 << 16) < noisy, noise, weights["noise"])
            told.append(sender.update_weights(weights).encoding)
    assert told[:2] == ["", "ulp"] and sorted(told[2].split(", ")) == ["bitmap", "ulp"]


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
