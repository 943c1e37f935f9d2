"""Boxes of parameters that a trainer rank writes: where their elements lie in the whole, and what is read of them."""

from __future__ import annotations

import random
from base64 import b64decode

import numpy as np
import pytest
import torch

from tests.weights.shards.test_sharing import some_block
from torchrl_ext.codecs.choice import ulp
from torchrl_ext.kernels.base import LINEAR
from torchrl_ext.stores.delta_manifest import DIGEST
from torchrl_ext.stores.table import ParamTable, Segment
from torchrl_ext.testing import any_bits
from torchrl_ext.types import ParamMeta
from torchrl_ext.versions.shards.own import OwnBlocks
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
        (stream,) = ParamTable.of([meta], [[Segment(0, block.start, block.shape)]]).streams
        every = np.arange(meta.numel * parts).reshape(*shape, parts)
        expected = every[block.within(whole)].reshape(-1)
        assert (stream.positions(0, np.arange(expected.size)) == expected).all()
        tensor, digest = any_bits(dtype, *shape), PositionDigest()
        for piece in (block, *without([whole], [block])):
            digest = digest.plus(block_words(meta, piece, tensor[piece.within(whole)], LINEAR))
        assert digest == position_digest(tensor, LINEAR)


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

    def words_of(tensor):
        return sum(np.array(block_words(meta, block, tensor[block.within(whole)], LINEAR), DIGEST) for block in blocks)

    for _ in range(2):
        before = words_of(tensor)
        for block in blocks:
            tensor[block.within(whole)].neg_()
        with monkeypatch.context() as patch:
            patch.setattr("torchrl_ext.versions.shards.own.block_words", None)  # of all elements
            told = own.encode(source, ulp(), "rank00000", lambda name, data: None)
        assert (before + np.frombuffer(b64decode(told["words"]), DIGEST) == words_of(tensor)).all()
