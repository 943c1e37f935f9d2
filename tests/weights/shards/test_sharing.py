"""Blocks that several ranks hold: each element is given to one of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.weights.boxes import SHAPES, blocks_of, counted
from torchrl_ext.errors import ManifestError
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.shards.blocks import Block
from torchrl_ext.weights.shards.sharing import shared_out


def meta(*shape):
    return ParamMeta("w", torch.float32, shape)


def rows(start, stop, columns=4):
    return Block((start, 0), (stop, columns))


def test_replicas_are_balanced_over_those_that_hold_them():
    params = [meta(8, 4) for _ in range(12)]
    held = [[(index, rows(4 * (rank % 2), 4 * (rank % 2) + 4)) for index in range(12)] for rank in range(4)]
    load = [sum(block.numel for blocks in own.values() for block in blocks) for own in shared_out(params, held)]
    assert load == [96] * 4
    every = [[(index, rows(0, 8)) for index in range(12)]] * 4
    assert [len(own) for own in shared_out(params, every)] == [3] * 4


@given(st.data())
def test_any_blocks_that_meet_are_cut_so_that_each_element_is_written_once(data):
    shape = data.draw(SHAPES)
    ranks = st.lists(st.lists(blocks_of(shape), max_size=3), min_size=1, max_size=5)
    held = [[(0, block) for block in blocks] for blocks in data.draw(ranks)]
    data.draw(st.sampled_from(held)).append((0, Block.whole(shape)))
    own = shared_out([meta(*shape)], held)
    for rank, blocks in enumerate(own):
        for number, parts in blocks.items():
            assert all(held[rank][number][1].contains(part) for part in parts)
    parts = [part for blocks in own for several in blocks.values() for part in several]
    assert (counted(parts, shape) == 1).all()


def test_what_nobody_holds_is_named_and_so_is_a_block_that_reaches_out():
    with pytest.raises(ManifestError, match=r"no trainer rank holds elements \[2:6, 0:4\] of w float"):
        shared_out([meta(6, 4)], [[(0, rows(0, 2))], []])
    with pytest.raises(ManifestError, match=r"rank 1 holds elements \[0:7, 0:4\] of 'w'"):
        shared_out([meta(6, 4)], [[(0, rows(0, 6))], [(0, rows(0, 7))]])
