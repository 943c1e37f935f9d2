"""Blocks of tensors of any shape, as hypothesis draws them, and how often some blocks have each element."""

import numpy as np
from hypothesis import strategies as st

from torchrl_ext.weights.view import Block

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def blocks_of(draw, shape, full=True):
    """A block of a tensor of some shape; empty ones, too, unless ``full``."""
    start, stop = [], []
    for size in shape:
        first = draw(st.integers(0, max(0, size - full)))
        start.append(first)
        stop.append(draw(st.integers(min(size, first + full), size)))
    return Block(tuple(start), tuple(stop))


def counted(blocks, shape):
    """How often blocks have each element."""
    times = np.zeros(shape, int)
    for block in blocks:
        times[block.within(Block.whole(shape))] += 1
    return times
