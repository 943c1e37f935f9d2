from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.data.deltas.data import random_bits
from torchrl_ext.data.deltas.bits import linear_keys
from torchrl_ext.data.weights.digests import PositionDigest, position_digest


def test_digest_keys_are_nonzero_and_distinct_under_shifts():
    """So that no two elements of a row count alike; as text, a digest has 32 digits."""
    assert PositionDigest(1, 2).hex() == f"{1:016x}{2:016x}" and position_digest(torch.empty(0)) == PositionDigest()
    for row in linear_keys().astype(np.uint64):
        shifted = row << np.arange(0, 32, 8, dtype=np.uint64)[:, None]
        assert row.size == 2048 and row.all() and np.unique(shifted).size == shifted.size


@pytest.mark.parametrize("dtype", (torch.uint8, torch.float32))
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
