"""What a trainer rank digests of the blocks that it writes."""

from __future__ import annotations

from base64 import b64decode

import numpy as np
import pytest
import torch

from torchrl_ext.codecs.blocks import ulp
from torchrl_ext.stores.delta_manifest import DIGEST
from torchrl_ext.testing import any_bits
from torchrl_ext.types import ParamMeta
from torchrl_ext.versions.shards.own import OwnBlocks
from torchrl_ext.weights.digests import block_words
from torchrl_ext.weights.shards.blocks import Block, Shard
from torchrl_ext.weights.source import WeightSource


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
        return sum(np.array(block_words(meta, block, tensor[block.within(whole)]), DIGEST) for block in blocks)

    for _ in range(2):
        before = words_of(tensor)
        for block in blocks:
            tensor[block.within(whole)].neg_()
        with monkeypatch.context() as patch:
            patch.setattr("torchrl_ext.versions.shards.own.block_words", None)  # of all elements
            told = own.encode(source, ulp(), "rank00000", lambda name, data: None)
        assert (before + np.frombuffer(b64decode(told["words"]), DIGEST) == words_of(tensor)).all()
