"""Boxes and views of tensors, against torch itself: what they say of elements is what indexing a tensor gives."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchrl_ext.weights.view import Block, overlap, tiles, without

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def blocks_of(draw, shape, full=True):
    """A block of a tensor of some shape; empty ones, too, unless ``full``."""
    bounds = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    if full:
        bounds = [
            (min(low, size - 1), max(high, min(low, size - 1) + 1))
            for (low, high), size in zip(bounds, shape, strict=True)
        ]
    return Block(tuple(low for low, _ in bounds), tuple(high for _, high in bounds))


def counted(blocks, shape):
    """How often blocks have each element."""
    times = np.zeros(shape, int)
    for block in blocks:
        times[block.within(Block.whole(shape))] += 1
    return times


@given(st.data())
def test_blocks_tile_a_tensor_exactly_where_they_have_each_element_once(data):
    shape = data.draw(SHAPES)
    blocks = data.draw(st.lists(blocks_of(shape, full=False), max_size=5))
    if data.draw(st.booleans()):  # all but a few pieces of a tensor, which often tile it
        blocks = without([Block.whole(shape)], blocks) + data.draw(st.sampled_from([blocks[:0], blocks[:1]]))
    times, flaw = counted(blocks, shape), tiles(blocks, shape)
    if (times > 1).any():
        one, other = flaw
        assert one in blocks and other in blocks and one.meet(other) is not None
        assert one is not other
    elif (times == 0).any():
        (hole,) = flaw
        assert hole.start == tuple(np.argwhere(times == 0)[0])
        assert hole.numel and (times[hole.within(Block.whole(shape))] == 0).all()
    else:
        assert flaw == ()
    assert (overlap(blocks) is not None) == bool((times > 1).any())


@given(st.data())
def test_what_is_left_without_others_has_each_other_element_once(data):
    shape = data.draw(SHAPES)
    whole, taken = data.draw(blocks_of(shape, full=False)), data.draw(st.lists(blocks_of(shape, full=False)))
    expected = counted([whole], shape) * (counted(taken, shape) == 0)
    assert (counted(without([whole], taken), shape) == expected).all()


def test_overlaps_and_holes_of_the_same_size_are_both_seen():
    ends = [((0, 0), (4, 1)), ((0, 1), (1, 4)), ((1, 1), (2, 3)), ((2, 0), (3, 4)), ((3, 1), (4, 4))]
    blocks = [Block(*both) for both in ends]
    assert sum(block.numel for block in blocks) == 16
    for order in itertools.permutations(blocks):
        assert set(tiles(order, (4, 4))) == {blocks[0], blocks[3]}


def test_a_block_reads_as_slices():
    assert f"{Block((1, 0), (3, 4))} {Block((), ())}" == "[1:3, 0:4] []"
