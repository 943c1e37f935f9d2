"""Encodings by name: what those of blocks promise, each of them; and the differences of whole tensors."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch

from tests.bench.data import bounds
from tests.data.deltas.data import DTYPES, bytes_of, pairs
from tests.hostile import refused_or_right, worse_bytes
from torchrl_ext.base.errors import ConfigError, IntegrityError, ManifestError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.cli.bench.data import synthetic_pair
from torchrl_ext.data.deltas.blocks import (
    CONTEXT,
    KINDS,
    ULP,
    BlockCodec,
    BlockEncoding,
    codec_from_json,
    encodings,
    make_codec,
)
from torchrl_ext.data.deltas.streams import Found, StreamPatch, differences
from torchrl_ext.data.deltas.table import ParamTable, Unit, apply_patch, diff, unit_of, units
from torchrl_ext.data.transports.delta import DeltaTransport
from torchrl_ext.sync.local.inprocess import InProcessEngine
from torchrl_ext.sync.sender import WeightSender

OURS = [name for name in encodings.names() if make_codec(name).container == "blocks"]
BLOCK = 4096  # units


def block_of(old: np.ndarray, new: np.ndarray, start: int = 0) -> Found:
    """What changed in a block, of which these are all units."""
    positions = np.flatnonzero(old != new).astype(np.int32)
    return Found(0, start, positions, old[positions], new[positions], range(1), np.zeros((1, 2), np.uint64), old)


def land(patch: StreamPatch, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, in which each parameter of a patch has landed."""
    landed = tensor.clone()
    for each in patch.split():
        apply_patch(each, landed)
    return landed


def coded(encoding: BlockEncoding, unit: Unit, found: Found) -> tuple[BlockCodec, bytes]:
    """The kind that was picked for a block, and its bytes."""
    kind, data = encoding.encode(unit, found)
    return KINDS[kind], data


def blocks_of(encoding: BlockEncoding, dtype: torch.dtype, sizes: tuple[int, ...]):
    """Blocks with changes: their kind, table, and what was found in them."""
    for meta, old, new in pairs(dtype, sizes):
        for start in range(0, unit_of(dtype).count(meta), BLOCK):
            own = slice(start, start + BLOCK)
            found = block_of(units(old)[own].copy(), units(new)[own].copy(), start)
            if found.positions.size:
                yield coded(encoding, unit_of(dtype), found)[0], ParamTable.of([meta]), found


@pytest.mark.parametrize("encoding", [make_codec(name) for name in OURS], ids=OURS)
class TestEveryEncoding:
    def test_it_is_made_again_from_its_own_json(self, encoding: BlockEncoding):
        assert codec_from_json(encoding.to_json()) == encoding and encoding.container == "blocks"

    def test_each_block_alone_restores_every_bit_of_every_dtype(self, encoding: BlockEncoding):
        for dtype in DTYPES:
            unit = unit_of(dtype)
            for meta, old, new in pairs(dtype):
                table, landed = ParamTable.of([meta]), old.clone()
                for start in reversed(range(0, unit.count(meta), BLOCK)):
                    own = slice(start, start + BLOCK)
                    found = block_of(units(old)[own].copy(), units(new)[own].copy(), start)
                    if not found.positions.size:
                        continue
                    codec, data = coded(encoding, unit, found)
                    assert len(data) <= 1.2 * found.old.nbytes + 600, meta
                    base = found.old if codec.whole_base else None
                    assert codec.whole_base <= encoding.whole_base
                    patch = codec.decode(memoryview(b"\0" + data)[1:], table, 0, start, found.size, base)
                    assert patch.positions.dtype == np.int32 and patch.values.dtype == unit.dtype
                    landed = land(patch, landed)
                assert bytes_of(landed) == bytes_of(new), meta

    def test_damaged_bytes_are_refused_or_are_changes_of_the_block(self, encoding: BlockEncoding):
        chance, refused = random.Random(0), 0
        for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64):
            for codec, table, found in blocks_of(encoding, dtype, (63, 4097)):
                data, place = codec.encode(unit_of(dtype), found), (table, 0, found.start, found.size, found.old)

                def changes(patch: StreamPatch, size: int = found.size) -> bool:
                    places = patch.positions
                    assert places.size == patch.values.size <= size and (np.diff(places) > 0).all()
                    return not places.size or 0 <= places[0] <= places[-1] < size

                for _ in range(100):
                    refused += refused_or_right(codec.decode, worse_bytes(data, chance), *place, right=changes)
        assert refused > 500

    def test_a_few_bytes_do_not_take_the_memory_of_a_large_range(self, encoding: BlockEncoding):
        """The range is what a manifest says; of a block that is read with its base, that is held."""
        table = ParamTable.of([ParamMeta("w", torch.bfloat16, (1 << 40,))])
        for codec, _, _ in blocks_of(encoding, torch.bfloat16, (63,)):
            if codec.whole_base:
                with pytest.raises(ConfigError, match="base"):
                    codec.decode(b"\0\0", table, 0, 0, 100)
                for data in (b"\x02\x05\x05\0\0\0", b"\x01\xff\0\0", b"\x00\x05", b"\x00", b"\x05"):
                    with pytest.raises(IntegrityError, match="block 0 of stream 0"):
                        codec.decode(data, table, 0, 0, 100, np.zeros(100, np.uint16))
                continue
            for data in (b"\x01\x02\x00", b"\x03" + b"\xff" * 4 + b"\x0f\x00" + bytes(20), bytes(16)):
                with pytest.raises(IntegrityError, match="block 0 of stream 0"):
                    codec.decode(data, table, 0, 0, 1 << 40)


@pytest.mark.parametrize("density", [0.01, 0.1])
def test_context_is_within_six_percent_of_what_exponents_tell(density):
    _, old, new = synthetic_pair({"w": (8192, 512)}, density)[0]
    _, plain, inside = bounds(old, new)
    found, unit, table = block_of(units(old), units(new)), unit_of(old.dtype), ParamTable.of([ParamMeta.of("w", old)])
    context, ulp = (codec.encode(unit, found) for codec in (CONTEXT, ULP))
    assert 0.97 * inside < 8 * len(context) < 1.06 * inside < 0.8 * plain
    assert 8 * len(ulp) < 1.03 * plain
    for codec, data in ((CONTEXT, context), (ULP, ulp)):
        landed = land(codec.decode(data, table, 0, 0, found.size, found.old), old)
        assert bytes_of(landed) == bytes_of(new)


def test_runs_of_changes_cost_less_than_scattered_ones():
    _, old, new = synthetic_pair({"w": (8192, 512)}, 0.5)[0]
    new[160:] = old[160:]
    _, plain, _ = bounds(old, new)
    for codec in (ULP, CONTEXT):
        assert 8 * len(codec.encode(unit_of(old.dtype), block_of(units(old), units(new)))) < 0.6 * plain


def test_unknown_encoding_is_refused_with_the_known_names():
    with pytest.raises(ConfigError, match="ulp"):
        make_codec("brotli")
    for info, what in (({"name": "brotli"}, "brotli"), ({"name": "ulp", "speed": 11}, "settings"), (["ulp"], "codec")):
        with pytest.raises(ManifestError, match=what):
            codec_from_json(info)


@pytest.mark.parametrize(("density", "name"), [(0.001, "ulp"), (0.2, "ulp"), (0.5, "bitmap"), (1.0, "ulp")])
def test_auto_is_ulp_or_bitmap_where_that_block_is_shorter(density, name):
    """Bits that change to any others: nothing about their steps is short."""
    generator = np.random.default_rng(0)
    old = generator.integers(0, 1 << 16, 1 << 16).astype(np.uint16)
    new = np.where(generator.random(old.size) < density, generator.integers(0, 1 << 16, old.size), old)
    found, unit = block_of(old, new.astype(np.uint16)), unit_of(torch.int16)
    coded = {kind: make_codec(kind).encode(unit, found) for kind in ("ulp", "bitmap")}
    assert make_codec("auto").encode(unit, found) == coded[name] == min(coded.values(), key=lambda one: len(one[1]))


def test_reports_say_how_blocks_were_coded(tmp_path):
    weights = {"noise": torch.zeros(1 << 16, dtype=torch.int16), "few": torch.zeros(1 << 16)}
    sender = WeightSender(
        DeltaTransport(tmp_path), InProcessEngine({name: one.clone() for name, one in weights.items()})
    )
    reports = [sender.update_weights(weights)]
    weights["few"][3] = 1
    reports.append(sender.update_weights(weights))
    weights["few"][4] = 1
    noise = torch.randint(-(1 << 15), 1 << 15, (1 << 16,), dtype=torch.int16)
    weights["noise"] = torch.where(torch.rand(1 << 16) < 0.5, noise, weights["noise"])
    reports.append(sender.update_weights(weights))
    sender.shutdown()
    told = [report.encoding for report in reports]
    assert told[:2] == ["", "ulp"] and sorted(told[2].split(", ")) == ["1 of 2 blocks bitmap", "1 of 2 blocks ulp"]


def test_a_pair_of_different_shape_or_dtype_is_refused_by_name():
    for other in (torch.zeros(5), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(2, 2)):
        with pytest.raises(ManifestError, match="'w'"):
            diff(ParamMeta("w", torch.float32, (4,)), torch.zeros(4), other)


def test_differences_keep_their_order_with_any_number_of_threads():
    """Differences come in the order of the tensors with any number of threads, and the old copies follow."""
    model = [(meta.name, old, new) for meta, old, new in pairs(torch.bfloat16)]
    for threads in (1, 3):
        copies = [(name, old.clone(), new) for name, old, new in model]
        for (name, old, new), patch in zip(model, differences(iter(copies), threads=threads), strict=True):
            landed = old.clone()
            apply_patch(patch, landed)
            assert patch.meta.name == name and bytes_of(landed) == bytes_of(new)
        assert all(bytes_of(old) == bytes_of(new) for _, old, new in copies)


def test_worker_error_reaches_the_caller_and_no_thread_stays():
    before, good = threading.active_count(), (torch.zeros(9000), torch.ones(9000))
    with pytest.raises(ManifestError, match="'bad'"):
        list(differences([("good", *good), ("bad", torch.zeros(3), torch.zeros(4))], threads=2))
    stream = differences((("t", *good) for _ in range(100)), threads=2)
    next(stream)
    stream.close()
    assert threading.active_count() == before
