"""Views of tensors, against torch itself: a tensor of positions says what the view of them has to say."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.weights.blocks import Shard
from torchrl_ext.data.weights.hf_names import shards_of_part
from torchrl_ext.data.weights.view import Block, View

LARGER = st.lists(st.integers(1, 6), max_size=4).map(tuple)


def numbered(shape):
    return torch.arange(torch.Size(shape).numel()).view(shape)


@st.composite
def views_of(draw, tensor, boxes=False):
    """A view of a tensor by a few steps; with ``boxes`` none that splits or merges dimensions, or repeats elements."""
    kinds = ["narrow", "step", "select", "swap", "one"] + ["diagonal", "merge", "split", "expand"] * (not boxes)
    for kind in draw(st.lists(st.sampled_from(kinds), max_size=5)):
        if kind == "one" or not tensor.dim():
            tensor = tensor.unsqueeze(draw(st.integers(0, tensor.dim())))
            continue
        dim = draw(st.integers(0, tensor.dim() - 1))
        size = tensor.shape[dim]
        if kind == "narrow":
            start = draw(st.integers(0, size - 1))
            tensor = tensor.narrow(dim, start, draw(st.integers(1, size - start)))
        elif kind == "step":
            cut = slice(draw(st.integers(0, size - 1)), None, draw(st.integers(1, 3)))
            tensor = tensor[(slice(None),) * dim + (cut,)]
        elif kind == "select":
            tensor = tensor.select(dim, draw(st.integers(0, size - 1)))
        elif kind == "swap":
            tensor = tensor.transpose(dim, draw(st.integers(0, tensor.dim() - 1)))
        elif kind == "diagonal" and tensor.dim() > 1:
            tensor = tensor.diagonal(0, *draw(st.permutations(range(tensor.dim())))[:2])
        elif kind == "split" and size % 2 == 0:
            tensor = tensor.unflatten(dim, (size // 2, 2))
        elif kind == "expand":
            tensor = tensor.unsqueeze(dim).expand(*tensor.shape[:dim], 2, *tensor.shape[dim:])
        elif kind == "merge" and dim and tensor.stride(dim - 1) == size * tensor.stride(dim):
            tensor = tensor.flatten(dim - 1, dim)
    return tensor


@st.composite
def windows(draw, full):
    """Any strided view within a tensor's memory."""
    left, sizes, strides = full.numel() - 1, [], []
    for _ in range(draw(st.integers(0, 3))):
        strides.append(draw(st.integers(0, max(1, left))))
        most = left // strides[-1] + 1 if strides[-1] else 3
        sizes.append(draw(st.integers(1, min(most, 6))))
        left -= (sizes[-1] - 1) * strides[-1]
    return full.as_strided(sizes, strides, draw(st.integers(0, left)))


def box(view, shape):
    """The block of a contiguous tensor of which a view has each element once, as its walk tells."""
    walk = view.walk(shape)
    return None if walk is None or walk.along() is None else walk.block


def hull_of(values, shape):
    """The smallest block around some elements of a tensor."""
    places = np.unravel_index(values.reshape(-1).numpy(), shape) if shape else ()
    return Block(tuple(int(one.min()) for one in places), tuple(int(one.max()) + 1 for one in places))


@given(st.data())
def test_a_view_is_what_torch_has_of_its_elements(data):
    full = numbered(data.draw(LARGER))
    seen = data.draw(st.one_of(views_of(full), windows(full)))
    view = View.seen(seen)
    assert view.numel == seen.numel()
    assert torch.equal(view.of(full), seen)
    flat = torch.arange(seen.numel())
    assert torch.equal(view.positions(flat), seen.reshape(-1))
    hull = hull_of(seen, full.shape)
    once = len(set(seen.reshape(-1).tolist())) == seen.numel() == hull.numel
    assert box(view, full.shape) in ((hull, None) if once else (None,))
    walk = view.walk(full.shape)
    if walk is not None:
        assert walk.block == hull
        assert torch.equal(walk.of(full, Block.whole(full.shape)), seen)
        inside = full[hull.within(Block.whole(full.shape))]
        assert torch.equal(walk.of(inside.clone(), hull), seen)
        assert torch.equal(walk.of(inside.mT.contiguous().mT if inside.dim() > 1 else inside, hull), seen)


def test_what_has_no_walk():
    """Views of empty tensors, beyond the end of one, and through one whose elements share memory."""
    assert View((0, 4), (4, 1)).walk((0, 4)) is None and View((1,), (1,)).walk((0,)) is None
    assert View((1,), (1,), 7).walk((3, 2)) is None
    assert View((2,), (1,)).walk((2, 3), (0, 1)) is None and View((2,), (2,)).walk((2, 3), (2, 1)) is None


@given(st.data())
def test_shards_of_a_view_are_together_the_view(data):
    shape = data.draw(LARGER)
    full = numbered(shape).permute(data.draw(st.permutations(range(len(shape)))))  # of any strides
    boxes = data.draw(st.booleans())
    seen = data.draw(views_of(full, boxes=boxes))
    walk = View.seen(seen).walk(full.shape, full.stride())
    if walk is None or not walk.straight:
        assert not boxes
        return
    meta, found = ParamMeta("part", seen.dtype, tuple(seen.shape)), torch.full_like(seen, -1)
    whole, cuts = Block.whole(full.shape), [sorted({0, size, data.draw(st.integers(0, size))}) for size in full.shape]
    ends = itertools.product(*map(itertools.pairwise, cuts))
    held = [Block(*map(tuple, zip(*one, strict=True))) if one else whole for one in ends]
    shards = [Shard(meta, one, lambda one=one: full[one.within(whole)]) for one in held]
    for one in shards_of_part(meta, walk, shards):
        where, taken = found[tuple(map(slice, *one.block))], one.take()
        assert bool((where == -1).all()) and taken.shape == one.block.shape
        assert taken.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
        where.copy_(taken)
    assert torch.equal(found, seen)
