from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tests.data.deltas.data import random_bits
from torchrl_ext.data.deltas import loops
from torchrl_ext.data.deltas.bits import Piece, linear_keys
from torchrl_ext.data.weights.digests import PositionDigest, as_digests, position_digest


def of_part(full: torch.Tensor, ranges) -> PositionDigest:
    """The digest of a rectangular part, at its place in the full tensor."""
    part = full[tuple(slice(first, end) for first, end in ranges)].contiguous()
    offset = sum(first * stride for (first, _), stride in zip(ranges, full.stride(), strict=True))
    (found,) = as_digests([loops.words([Piece(destination=part, offset=offset, strides=full.stride())])])
    return found


def test_digest_keys_are_nonzero_and_distinct_under_shifts():
    """Keys are never 0, and no two keys of a row are equal, even if shifted by whole bytes."""
    for row in linear_keys().astype(np.uint64):
        shifted = row << np.arange(0, 32, 8, dtype=np.uint64)[:, None]
        assert row.size == 2048 and row.all() and np.unique(shifted).size == shifted.size


def test_shards_of_any_cut_add_up():
    full = random_bits(12 * 10 * 6000, torch.float32, torch.Generator().manual_seed(0)).reshape(12, 10, 6000)
    whole = position_digest(full)
    for cuts in itertools.product([(0, 12), (0, 5, 12)], [(0, 10), (0, 1, 10)], [(0, 6000), (0, 4100, 6000)]):
        total = PositionDigest()
        for ranges in itertools.product(*(list(itertools.pairwise(cut)) for cut in cuts)):
            total += of_part(full, ranges)
        assert total == whole


@pytest.mark.parametrize("dtype", (torch.uint8, torch.bfloat16, torch.float32, torch.float64))
def test_signs_rows_columns_shifts_and_zeros_are_seen(dtype):
    """Regular errors, of which a sum of products could miss some: all differences are alike or end with zeros."""
    size = 4 * 4096
    tensor = random_bits(size, dtype, torch.Generator().manual_seed(1))
    raw = tensor.view(torch.uint8).reshape(size, -1)
    signs, one_pair = raw.clone(), raw.clone()
    signs[:, -1] ^= 0x80
    one_pair[[5, 4096 + 5], -1] ^= 0x80
    same = torch.zeros(size, dtype=torch.uint8)
    crossed = raw.clone().reshape(4, 4096, -1)
    crossed[0, [1, 2]], crossed[1, [1, 2]] = crossed[1, [1, 2]].clone(), crossed[0, [1, 2]].clone()
    others = [
        signs,
        one_pair,
        raw.roll(1, 0),
        raw.roll(4096, 0),
        raw.flip(0),
        raw.reshape(4, 4096, -1).transpose(0, 1),
        crossed,
        raw.clone().copy_(torch.zeros_like(raw)),
    ]
    found = [position_digest(other.reshape(-1).contiguous().view(dtype)) for other in (raw, *others)]
    assert len({*found, PositionDigest()}) == len(found) + 1
    found = [position_digest(same[:count]) for count in range(0, size, 511)]
    assert len(set(found)) == len(found)


def test_it_is_written_as_32_hex_digits():
    assert PositionDigest(1, 2).hex() == f"{1:016x}{2:016x}"
    assert len(position_digest(torch.arange(10)).hex()) == 32 and position_digest(torch.empty(0)) == PositionDigest()
