"""Parts of tensors: where their elements lie in the whole, and what they add to its digest."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch

from tests.weights.shards.test_sharing import some_block
from torchrl_ext.codecs.base import make_codec
from torchrl_ext.codecs.pipeline import encode_tensor, encode_tensors
from torchrl_ext.errors import IntegrityError
from torchrl_ext.kernels.torch_ops import TorchKernels
from torchrl_ext.stores.base import MemoryStore
from torchrl_ext.stores.manifest import DeltaManifest, DeltaParam, DeltaPart
from torchrl_ext.testing import any_bits
from torchrl_ext.types import ParamMeta
from torchrl_ext.versions.payloads import Payloads
from torchrl_ext.versions.shards.own import OwnBlocks
from torchrl_ext.versions.shards.parts import flat_positions, read_parts
from torchrl_ext.weights.digests import PositionDigest, block_words, position_digest
from torchrl_ext.weights.shards.blocks import Block, Shard
from torchrl_ext.weights.source import WeightSource
from torchrl_ext.weights.view import without


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


class Blocks(WeightSource):
    """One tensor, of which this rank holds these blocks."""

    def __init__(self, tensor, *blocks):
        self._tensor, self._blocks = tensor, blocks

    def params(self):
        return (ParamMeta.of("w", self._tensor),)

    def __iter__(self):
        yield "w", self._tensor

    def shards(self):
        whole = Block.whole(self._tensor.shape)
        for block in self._blocks:
            yield Shard(self.params()[0], block, lambda block=block: self._tensor[block.within(whole)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex128])
def test_a_rank_digests_the_elements_of_its_blocks_that_changed_and_no_others(dtype, monkeypatch):
    tensor = any_bits(dtype, 6, 5, 4)
    meta, whole = ParamMeta.of("w", tensor), Block.whole(tensor.shape)
    blocks = [Block((2, 0, 0), (5, 5, 4)), Block((0, 1, 0), (2, 3, 4)), Block((5, 0, 1), (6, 5, 3))]
    source, own = Blocks(tensor, *blocks), OwnBlocks()
    own.keep(source, {})
    own.seed(source)
    monkeypatch.setattr("torchrl_ext.versions.shards.own.block_words", None)  # of all elements
    for _ in range(2):
        before = tensor.clone()
        for block in blocks:
            tensor[block.within(whole)].neg_()
        told = own.encode(source, make_codec("ulp"), "rank00000", lambda name, data: None)
        for row, block in zip(told["parts"], blocks, strict=True):
            was, now = (
                PositionDigest().plus(block_words(meta, block, one[block.within(whole)])) for one in (before, tensor)
            )
            assert was.plus(tuple(row[-2:])) == now


@pytest.mark.parametrize("block", [Block((2, 0), (5, 4)), Block((0, 1), (6, 3))])
def test_what_changed_in_a_block_is_digested_on_a_device_as_on_the_host(block):
    meta, whole = ParamMeta("w", torch.float32, (6, 4)), Block.whole((6, 4))
    old, new = any_bits(torch.float32, 6, 4), any_bits(torch.float32, 6, 4)
    of_old, of_new = (tensor[block.within(whole)].contiguous() for tensor in (old, new))
    for kernels in (None, TorchKernels()):
        (change,) = encode_tensors(
            [("w", of_old, of_new)],
            make_codec("ulp"),
            kernels=kernels,
            where=lambda: partial(flat_positions, meta, block),
        )
        words = PositionDigest().plus(block_words(meta, block, of_old)).plus(change.digest)
        assert words == PositionDigest().plus(block_words(meta, block, of_new))


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


def read(store, manifest, wanted=lambda name: None):
    payloads = Payloads(store)
    decoders = read_parts(payloads, "v", manifest, wanted)
    payloads.read()
    return decoders, payloads.nbytes


LEFT, RIGHT = Block((0, 0), (4, 3)), Block((0, 3), (4, 6))


def test_only_what_is_wanted_is_read():
    store, manifest = two_parts("ulp", "ulp", (LEFT, RIGHT))
    store.gap_bytes = 0
    decoders, count = read(store, manifest, lambda name: (Block((1, 4), (2, 5)),))
    assert count == manifest.params[0].parts[1].nbytes
    assert decoders["w"](None).indices.tolist() == [3, 4, 5, 9, 10, 11, 15, 16, 17, 21, 22, 23]
    assert read(store, manifest, lambda name: ()) == ({}, 0)


def test_parts_that_meet_or_are_coded_in_two_ways_are_refused():
    store, manifest = two_parts("ulp", "ulp", (LEFT, Block((0, 2), (4, 5))))
    with pytest.raises(IntegrityError, match="'w' has indices that do not increase"):
        read(store, manifest)[0]["w"](None)
    store, manifest = two_parts("ulp", "dense", (LEFT, RIGHT))
    with pytest.raises(IntegrityError, match="some parts of 'w' are steps"):
        read(store, manifest)[0]["w"](None)
    merged = read(store, manifest)[0]["w"](torch.zeros(4, 6))
    assert merged.values.view(np.float32).tolist() == [1.0] * 24
