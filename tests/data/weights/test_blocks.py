"""Which shards are refused, when groups are made, and how the blocks and parameters of ranks are shared out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_ext.base.errors import ManifestError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.weights.blocks import Block, Shard, checked_shards
from torchrl_ext.data.weights.gather import disjoint

META = ParamMeta("w", torch.float32, (4, 6))
NEXT = ParamMeta("x", torch.float32, ())


def shard(start, stop, meta=META, **how):
    return Shard(meta, Block(start, stop), lambda: torch.zeros(()), **how)


@pytest.mark.parametrize(
    ("shards", "what"),
    [
        ([shard((0, 0), (2, 6)), shard((1, 5), (4, 6))], "share elements: [0:2, 0:6] and [1:4, 5:6]"),
        ([shard((), (), NEXT), shard((), (), NEXT)], "share elements: [] and []"),
        ([shard((0, 0), (5, 6))], "[0:5, 0:6]"),
        ([shard((-1, 0), (2, 6))], "[-1:2, 0:6]"),
        ([shard((0,), (4,))], "[0:4]"),
        ([shard((3, 0), (1, 6))], "empty"),
        ([shard((), (), NEXT), shard((0, 0), (4, 6))], "out of order"),
        ([shard((0, 0), (4, 6), ParamMeta("w", torch.bfloat16, (4, 6)))], "out of order"),
    ],
)
def test_shards_that_are_not_sound_are_refused_by_name(shards, what):
    several, scalar = (shard((2, 0), (4, 3)), shard((0, 3), (4, 6)), shard((0, 0), (2, 3))), shard((), (), NEXT)
    assert list(checked_shards([*several, scalar], [META, NEXT])) == [(META, several), (NEXT, (scalar,))]
    with pytest.raises(ManifestError) as caught:
        list(checked_shards(shards, [META, NEXT]))
    assert what in str(caught.value) and shards[-1].meta.name in str(caught.value)


@st.composite
def blocks_of(draw, shape):
    """A block of a tensor of some shape."""
    start = [draw(st.integers(0, max(0, size - 1))) for size in shape]
    stop = [draw(st.integers(min(size, first + 1), size)) for first, size in zip(start, shape, strict=True)]
    return Block(tuple(start), tuple(stop))


@given(st.data())
def test_overlapping_blocks_are_cut_to_give_each_element_once(data):
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4).map(tuple))
    ranks = st.lists(st.lists(blocks_of(shape), max_size=3), min_size=1, max_size=5)
    held = [(rank, block) for rank, blocks in enumerate(data.draw(ranks)) for block in blocks]
    held.append((data.draw(st.integers(0, 5)), Block.whole(shape)))
    own = {}
    for rank, block in held:
        own.setdefault(block, []).append(rank)
    found = disjoint(ParamMeta("w", torch.float32, shape), own)
    times = torch.zeros(shape)
    for block in found:
        times[block.within(Block.whole(shape))] += 1
    assert bool((times == 1).all())
    for piece, holders in found.items():
        assert holders and all(any(one == rank and block.contains(piece) for one, block in held) for rank in holders)


def test_what_nobody_holds_is_named():
    with pytest.raises(ManifestError, match=r"no trainer rank holds elements \[2:6, 0:4\] of w float"):
        disjoint(ParamMeta("w", torch.float32, (6, 4)), {Block((0, 0), (2, 4)): [0]})
