"""Parts of tensors: where their elements lie in the whole, and what they add to its digest."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.weights.shards.test_sharing import some_block
from torchrl_ext.codecs.base import make_codec
from torchrl_ext.codecs.pipeline import encode_tensor
from torchrl_ext.errors import IntegrityError
from torchrl_ext.stores.base import MemoryStore
from torchrl_ext.stores.manifest import DeltaManifest, DeltaParam, DeltaPart
from torchrl_ext.testing import any_bits
from torchrl_ext.types import ParamMeta
from torchrl_ext.versions.shards.own import block_words
from torchrl_ext.versions.shards.parts import flat_positions, read_parts
from torchrl_ext.weights.digests import PositionDigest, position_digest
from torchrl_ext.weights.shards.blocks import Block
from torchrl_ext.weights.shards.sharing import without


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex128])
def test_positions_and_digests_of_blocks_are_those_of_the_whole(dtype):
    chance, parts = random.Random(1), 2 if dtype == torch.complex128 else 1
    for _ in range(100):
        shape = tuple(chance.randint(1, 6) for _ in range(chance.randint(0, 4)))
        meta, whole, block = ParamMeta("w", dtype, shape), Block.whole(shape), some_block(shape, chance)
        every = np.arange(meta.numel * parts).reshape(*shape, parts)
        expected = every[block.within(whole)].reshape(-1)
        assert (flat_positions(meta, block, np.arange(expected.size)) == expected).all()
        tensor, digest = any_bits(dtype, *shape), PositionDigest()
        for piece in (block, *without([whole], [block])):
            digest = digest.plus(block_words(meta, piece, tensor[piece.within(whole)]))
        assert digest == position_digest(tensor)


def two_parts(first, second, blocks):
    """A delta of one tensor in two parts, each coded in its own way."""
    meta = ParamMeta("w", torch.float32, (4, 6))
    store, parts, codecs, content = MemoryStore(), [], [], b""
    for name, block in zip((first, second), blocks, strict=True):
        own = ParamMeta("w", meta.dtype, block.shape)
        old, new = torch.zeros(block.shape), torch.ones(block.shape)
        change = encode_tensor(make_codec(name), own, old, new)
        codecs.append(change.codec.to_json())
        place = {
            "codec": len(parts),
            "file": "rank00000-00001.bin",
            "offset": len(content),
            "nbytes": len(change.payload),
        }
        parts.append(DeltaPart(start=block.start, sizes=block.shape, changed=change.changed, **place))
        content += change.payload
    store.put("v/rank00000-00001.bin", content)
    row = DeltaParam.of_parts(meta, "0" * 32, parts)
    return store, DeltaManifest(
        version=2, base_version=1, run_id="a", base_run_id="a", container="shards", codecs=tuple(codecs), params=(row,),
        files={"rank00000-00001.bin": len(content)},
    )  # fmt: skip


LEFT, RIGHT = Block((0, 0), (4, 3)), Block((0, 3), (4, 6))


def test_parts_side_by_side_become_one_patch_in_order():
    store, manifest = two_parts("ulp", "ulp", (LEFT, RIGHT))
    decoders, count = read_parts(store, "v", manifest, lambda name: None)
    patch = decoders["w"](None)
    assert patch.indices.tolist() == list(range(24))
    assert count == manifest.files["rank00000-00001.bin"]


def test_only_what_is_wanted_is_read():
    store, manifest = two_parts("ulp", "ulp", (LEFT, RIGHT))
    store.gap_bytes = 0
    decoders, count = read_parts(store, "v", manifest, lambda name: (Block((1, 4), (2, 5)),))
    assert count == manifest.params[0].parts[1].nbytes
    assert decoders["w"](None).indices.tolist() == [3, 4, 5, 9, 10, 11, 15, 16, 17, 21, 22, 23]
    assert read_parts(store, "v", manifest, lambda name: ()) == ({}, 0)


def test_parts_that_meet_or_are_coded_in_two_ways_are_refused():
    store, manifest = two_parts("ulp", "ulp", (LEFT, Block((0, 2), (4, 5))))
    with pytest.raises(IntegrityError, match="'w' has indices that do not increase"):
        read_parts(store, "v", manifest, lambda name: None)[0]["w"](None)
    store, manifest = two_parts("ulp", "dense", (LEFT, RIGHT))
    with pytest.raises(IntegrityError, match="some parts of 'w' are steps"):
        read_parts(store, "v", manifest, lambda name: None)[0]["w"](None)
    merged = read_parts(store, "v", manifest, lambda name: None)[0]["w"](torch.zeros(4, 6))
    assert merged.values.view(np.float32).tolist() == [1.0] * 24
