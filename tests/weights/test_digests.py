from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tests.codecs.data import DTYPES, pairs, random_bits
from torchrl_ext.codecs.base import make_codec
from torchrl_ext.codecs.patch import diff
from torchrl_ext.codecs.pipeline import encode_tensor
from torchrl_ext.kernels.base import Piece, flat_bits
from torchrl_ext.kernels.host import HostKernels
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.digests import PositionDigest, position_digest

GOLDEN, WORD = 0x9E3779B97F4A7C15, 2**64


def by_hand(bits: list[int], start: int = 0) -> PositionDigest:
    """The definition, element by element, in Python's integers."""
    first = second = 0
    for position, value in enumerate(bits, start):
        z = (position * GOLDEN + value) % WORD
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % WORD
        z ^= z >> 31
        y = ((z ^ (z >> 32)) * 0xD6E8FEB86659FD93) % WORD
        first, second = (first + z) % WORD, (second + (y ^ (y >> 29))) % WORD
    return PositionDigest(first, second)


def of_part(full: torch.Tensor, ranges) -> PositionDigest:
    """The digest of a rectangular part, at its place in the full tensor."""
    part = full[tuple(slice(first, end) for first, end in ranges)].contiguous()
    offset = sum(first * stride for (first, _), stride in zip(ranges, full.stride(), strict=True))
    return PositionDigest(*HostKernels().words(Piece(destination=part, offset=offset, strides=full.stride())))


def test_it_is_what_its_definition_says():
    bits = [0, 1, 0xFFFF, 0x8000, 0x3F80] * 20
    tensor = torch.from_numpy(np.array(bits, np.uint16)).view(torch.bfloat16)
    assert position_digest(tensor) == by_hand(bits)
    assert position_digest(tensor[:0]) == PositionDigest()


def test_a_change_updates_it_to_the_full_recomputation():
    for dtype in DTYPES:
        for meta, old, new in pairs(dtype, (1, 64, 5000)):
            words = HostKernels().diff(flat_bits(old), flat_bits(new)).words
            assert position_digest(old).plus(words) == position_digest(new), meta


@pytest.mark.parametrize("name", ["ulp", "context"])
def test_encoding_gives_the_update_for_free(name):
    for dtype in (torch.bfloat16, torch.float32, torch.uint8, torch.complex128):
        for meta, old, new in pairs(dtype, (63, 20_000)):
            coded = encode_tensor(make_codec(name, block_log2=12), meta, old, new)
            assert position_digest(old).plus(coded.digest) == position_digest(new)


def test_shards_of_any_cut_add_up():
    full = random_bits(12 * 10 * 6, torch.float32, torch.Generator().manual_seed(0)).reshape(12, 10, 6)
    whole = position_digest(full)
    for cuts in itertools.product([(0, 12), (0, 5, 12)], [(0, 10), (0, 1, 10)], [(0, 6), (0, 4, 6)]):
        total = PositionDigest()
        for ranges in itertools.product(*(list(itertools.pairwise(cut)) for cut in cuts)):
            total += of_part(full, ranges)
        assert total == whole


def test_parts_of_a_large_tensor_add_up():
    tensor = random_bits(5_000_000, torch.bfloat16, torch.Generator().manual_seed(0)).reshape(500, 10_000)
    left, right = (of_part(tensor, ((0, 500), columns)) for columns in ((0, 7000), (7000, 10_000)))
    assert left + right == position_digest(tensor)


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
        digest = position_digest(other)
        assert digest != position_digest(tensor)
        seen.add(digest)
        count += 1
    assert len(seen) > 1500


def test_the_sign_of_zero_and_nan_payloads_count():
    zeros = torch.zeros(4)
    assert position_digest(zeros) != position_digest(-zeros)
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert position_digest(nans[:1]) != position_digest(nans[1:])


def test_it_is_written_as_32_hex_digits():
    assert PositionDigest(1, 2).hex() == f"{1:016x}{2:016x}"
    assert len(position_digest(torch.arange(10)).hex()) == 32


def test_metas_of_patches_and_digests_agree_on_positions():
    old, new = torch.zeros(3, 4), torch.zeros(3, 4)
    new[2, 1] = 5.0
    patch = diff(ParamMeta.of("w", old), old, new)
    assert patch.indices.tolist() == [9]
    delta, gone = (of_part(tensor, ((2, 3), (1, 2))) for tensor in (new, old))
    assert position_digest(old).first - gone.first + delta.first in (
        position_digest(new).first + k * WORD for k in (-1, 0, 1)
    )
