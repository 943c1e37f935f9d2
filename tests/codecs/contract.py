"""What every encoding of blocks promises; `tests/codecs/test_encodings.py` runs it over each registered name."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.codecs.data import DTYPES, bytes_of, pairs
from tests.hostile import refused_or_right, worse_bytes
from torchrl_ext.codecs.base import codec_from_json
from torchrl_ext.codecs.blocks import KINDS, BlockCodec, BlockEncoding
from torchrl_ext.codecs.patch import apply_patch
from torchrl_ext.codecs.streams import Found, StreamPatch
from torchrl_ext.codecs.units import Unit, unit_of, units
from torchrl_ext.errors import ConfigError, IntegrityError
from torchrl_ext.stores.table import ParamTable
from torchrl_ext.types import ParamMeta

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


class BlockEncodingContract:
    """Give an `encoding` fixture and inherit."""

    def test_it_is_made_again_from_its_own_json(self, encoding: BlockEncoding):
        assert codec_from_json(encoding.to_json()) == encoding and encoding.container == "blocks"

    def test_every_bit_of_every_dtype_survives_in_blocks_that_are_read_one_by_one(self, encoding: BlockEncoding):
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
                    patch = codec.decode(data, table, 0, start, found.size, base)
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
