"""Blocks that several ranks hold: each element is given to one of them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from torchrl_ext.errors import ManifestError
from torchrl_ext.sources.megatron.gather import gathered
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.shards.blocks import Block, Shard
from torchrl_ext.weights.shards.sharing import shared_out


def meta(*shape):
    return ParamMeta("w", torch.float32, shape)


def rows(start, stop, columns=4):
    return Block((start, 0), (stop, columns))


def test_what_one_rank_alone_holds_is_its_own():
    held = [[(0, rows(0, 3))], [(0, rows(3, 6))], []]
    assert shared_out([meta(6, 4)], held) == [{0: [rows(0, 3)]}, {0: [rows(3, 6)]}, {}]


def test_replicas_are_balanced_over_those_that_hold_them():
    params = [meta(8, 4) for _ in range(12)]
    held = [[(index, rows(4 * (rank % 2), 4 * (rank % 2) + 4)) for index in range(12)] for rank in range(4)]
    load = [sum(block.numel for blocks in own.values() for block in blocks) for own in shared_out(params, held)]
    assert load == [96] * 4
    every = [[(index, rows(0, 8)) for index in range(12)]] * 4
    assert [len(own) for own in shared_out(params, every)] == [3] * 4


def test_any_blocks_that_meet_are_cut_so_that_each_element_is_written_once():
    chance = random.Random(0)
    for _ in range(300):
        shape = tuple(chance.randint(1, 6) for _ in range(chance.randint(0, 4)))
        held = [
            [(0, some_block(shape, chance)) for _ in range(chance.randint(0, 3))] for _ in range(chance.randint(1, 5))
        ]
        chance.choice(held).append((0, Block.whole(shape)))
        times = np.zeros(shape, int)
        for rank, own in enumerate(shared_out([meta(*shape)], held)):
            for number, blocks in own.items():
                for block in blocks:
                    assert held[rank][number][1].contains(block)
                    times[block.within(Block.whole(shape))] += 1
        assert (times == 1).all()


def some_block(shape, chance):
    start = tuple(chance.randint(0, size - 1) for size in shape)
    return Block(start, tuple(chance.randint(first + 1, size) for first, size in zip(start, shape, strict=True)))


def test_what_nobody_holds_is_named_and_so_is_a_block_that_reaches_out():
    with pytest.raises(ManifestError, match=r"no trainer rank holds elements \[2:6, 0:4\] of 'w'"):
        shared_out([meta(6, 4)], [[(0, rows(0, 2))], []])
    with pytest.raises(ManifestError, match=r"rank 1 holds elements \[0:7, 0:4\] of 'w'"):
        shared_out([meta(6, 4)], [[(0, rows(0, 6))], [(0, rows(0, 7))]])


def test_tensors_without_elements_are_nobodys():
    assert shared_out([meta(0, 4)], [[(0, rows(0, 0))], []]) == [{}, {}]


def test_blocks_that_overlap_here_and_leave_a_hole_there_are_not_gathered():
    ends = [((0, 0), (4, 1)), ((0, 1), (1, 4)), ((1, 1), (2, 3)), ((2, 0), (3, 4)), ((3, 1), (4, 4))]
    blocks = [Block(*both) for both in ends]
    assert sum(block.numel for block in blocks) == 16
    with pytest.raises(ManifestError, match="that overlap"):
        next(gathered([meta(4, 4)], lambda: (Shard(meta(4, 4), block, None) for block in blocks)))
