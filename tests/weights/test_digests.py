from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tests.codecs.data import DTYPES, pairs, random_bits
from torchrl_ext.codecs.base import make_codec
from torchrl_ext.codecs.patch import diff
from torchrl_ext.codecs.pipeline import encode_tensor
from torchrl_ext.errors import ManifestError
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


def test_it_is_what_its_definition_says():
    bits = [0, 1, 0xFFFF, 0x8000, 0x3F80] * 20
    tensor = torch.from_numpy(np.array(bits, np.uint16)).view(torch.bfloat16)
    assert position_digest(tensor) == by_hand(bits)
    assert position_digest(tensor[:0]) == PositionDigest()


def test_a_change_updates_it_to_the_full_recomputation():
    from torchrl_ext.codecs.units import units

    for dtype in DTYPES:
        for meta, old, new in pairs(dtype, (1, 64, 5000)):
            patch = diff(meta, old, new)
            updated = position_digest(old).updated(patch.indices, units(old)[patch.indices], patch.values)
            assert updated == position_digest(new), meta


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
            shard = full[tuple(slice(a, b) for a, b in ranges)]
            total += position_digest(shard, shape=full.shape, starts=[a for a, _ in ranges])
        assert total == whole


def test_threads_do_not_change_it():
    tensor = random_bits(5_000_000, torch.bfloat16, torch.Generator().manual_seed(0))
    assert position_digest(tensor, threads=3) == position_digest(tensor)
    rows = tensor.reshape(500, 10_000)[:, :7000]
    assert position_digest(rows, shape=(500, 10_000), starts=(0, 0), threads=3) + position_digest(
        tensor.reshape(500, 10_000)[:, 7000:], shape=(500, 10_000), starts=(0, 7000)
    ) == position_digest(tensor)


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


def test_it_travels_as_hex():
    digest = position_digest(torch.arange(10))
    assert PositionDigest.from_hex(digest.hex()) == digest
    assert len(PositionDigest(1, 2).hex()) == 32
    for bad in ("", "xyz", digest.hex()[:-1], None, "g" * 32):
        with pytest.raises(ManifestError):
            PositionDigest.from_hex(bad)


def test_a_shard_outside_the_tensor_is_refused():
    for shape, starts in (((4, 4), (0, 1)), ((4,), (0,)), ((4, 4), (-1, 0))):
        with pytest.raises(ManifestError, match="lie within"):
            position_digest(torch.zeros(4, 4), shape=shape, starts=starts)


def test_metas_of_patches_and_digests_agree_on_positions():
    old, new = torch.zeros(3, 4), torch.zeros(3, 4)
    new[2, 1] = 5.0
    patch = diff(ParamMeta.of("w", old), old, new)
    assert patch.indices.tolist() == [9]
    delta = position_digest(new[2:, 1:2], shape=(3, 4), starts=(2, 1))
    gone = position_digest(old[2:, 1:2], shape=(3, 4), starts=(2, 1))
    assert position_digest(old).first - gone.first + delta.first in (
        position_digest(new).first + k * WORD for k in (-1, 0, 1)
    )
