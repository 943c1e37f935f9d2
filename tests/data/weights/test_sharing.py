"""Blocks that several ranks hold: each element is given to one of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.weights.test_view import SHAPES, blocks_of, counted
from torchrl_ext.base.errors import ManifestError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.weights.blocks import Block
from torchrl_ext.data.weights.gather import disjoint, owners


def meta(*shape):
    return ParamMeta("w", torch.float32, shape)


def rows(start, stop, columns=4):
    return Block((start, 0), (stop, columns))


def test_parameter_owners_are_deterministic_and_balanced():
    """Ranks compute the same owners of parameters, and each rank owns about as many bytes."""
    sizes = (5, 90, 40, 30, 30, 3, 0, 2)
    params = [ParamMeta(f"{number}", torch.float32, (size,)) for number, size in enumerate(sizes)]
    found = owners(params, 3)
    assert found == [1, 0, 1, 2, 2, 1, 1, 1] and owners(params, 1) == [0] * 8
    load = [sum(meta.numel for meta, owner in zip(params, found, strict=True) if owner == rank) for rank in range(3)]
    assert max(load) == 90 and sum(load) == 200
    assert owners(params[:1], 4) == [0]


@given(st.data())
def test_overlapping_blocks_are_cut_to_give_each_element_once(data):
    shape = data.draw(SHAPES)
    ranks = st.lists(st.lists(blocks_of(shape), max_size=3), min_size=1, max_size=5)
    held = [(rank, block) for rank, blocks in enumerate(data.draw(ranks)) for block in blocks]
    held.append((data.draw(st.integers(0, 5)), Block.whole(shape)))
    own = {}
    for rank, block in held:
        own.setdefault(block, []).append(rank)
    found = disjoint(meta(*shape), own)
    assert (counted(found, shape) == 1).all()
    for piece, holders in found.items():
        assert holders and all(any(one == rank and block.contains(piece) for one, block in held) for rank in holders)


def test_what_nobody_holds_is_named():
    with pytest.raises(ManifestError, match=r"no trainer rank holds elements \[2:6, 0:4\] of w float"):
        disjoint(meta(6, 4), {rows(0, 2): [0]})
