from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tests.codecs.data import random_bits
from torchrl_ext.kernels.base import Piece, flat_bits, linear_keys
from torchrl_ext.kernels.host import HostKernels
from torchrl_ext.weights.digests import PositionDigest, position_digest

GOLDEN, WORD = 0x9E3779B97F4A7C15, 2**64


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % WORD
    return z ^ (z >> 31)


def second(z: int) -> int:
    y = ((z ^ (z >> 32)) * 0xD6E8FEB86659FD93) % WORD
    return y ^ (y >> 29)


def by_hand(raw: list[int], width: int) -> PositionDigest:
    """The definition, element by element, in Python's integers."""
    words = [0, 0]
    seed = int.from_bytes(b"linear64", "little")
    parts = [(8 * k + 4 * half, bits >> 32 * half) for k, bits in enumerate(raw) for half in (0, 1)]
    for byte, bits in parts if width == 8 else [(k * width, bits) for k, bits in enumerate(raw)]:
        row, at = divmod(byte // 4, 2048)
        z = mix((row * GOLDEN + seed) % WORD)
        for lane, factor in enumerate((z, second(z))):
            key = mix((seed + GOLDEN * (2048 * lane + at + 1)) % WORD) >> 32
            words[lane] = (words[lane] + (bits % 2**32 + 1 << 8 * (byte % 4)) * key * (factor | 1)) % WORD
    return PositionDigest(*words)


def of_part(full: torch.Tensor, ranges) -> PositionDigest:
    """The digest of a rectangular part, at its place in the full tensor."""
    part = full[tuple(slice(first, end) for first, end in ranges)].contiguous()
    offset = sum(first * stride for (first, _), stride in zip(ranges, full.stride(), strict=True))
    return PositionDigest(*HostKernels().words(Piece(destination=part, offset=offset, strides=full.stride())))


@pytest.mark.parametrize("dtype", (torch.uint8, torch.bfloat16, torch.float32, torch.float64))
def test_it_is_what_its_definition_says(dtype):
    tensor = random_bits(9001, dtype, torch.Generator().manual_seed(0))
    raw = [value % 2 ** (8 * dtype.itemsize) for value in flat_bits(tensor).tolist()]
    assert position_digest(tensor) == by_hand(raw, dtype.itemsize)
    assert position_digest(tensor[:0]) == PositionDigest()


def test_keys_are_never_0_and_never_equal_in_a_row_even_if_shifted():
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


def test_accidents_are_seen():
    """Swaps, moves, losses, repeats and single bits, of which sums and XORs of values miss most."""
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(2000, generator=generator).to(torch.bfloat16)
    seen = {position_digest(tensor)}
    count = 1
    for _ in range(2000):
        other = tensor.clone()
        a, b = torch.randperm(2000, generator=generator)[:2].tolist()
        kind = count % 5
        if kind == 0:
            if tensor[a] == tensor[b]:
                continue
            other[a], other[b] = tensor[b], tensor[a]
        elif kind == 1:
            other.view(torch.int16)[a] ^= 1 << int(torch.randint(0, 15, (1,), generator=generator))
        elif kind == 2:
            other = torch.cat([tensor[:a], tensor[a + 1 :], tensor[a : a + 1]])
            if torch.equal(other, tensor):
                continue
        elif kind == 3:
            other[a] = -other[a]
        else:
            other[min(a, 1990) : min(a, 1990) + 8] = 0
        found = position_digest(other)
        assert found != position_digest(tensor)
        seen.add(found)
        count += 1
    assert len(seen) > 1500


def test_it_is_written_as_32_hex_digits():
    assert PositionDigest(1, 2).hex() == f"{1:016x}{2:016x}"
    assert len(position_digest(torch.arange(10)).hex()) == 32
