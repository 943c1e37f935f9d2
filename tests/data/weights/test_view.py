"""Views, blocks and memory that tensors share, against torch: what they say of elements is what indexing gives."""

import itertools
import json
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_ext.base.errors import ManifestError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.weights.blocks import Block, Shard, checked_shards
from torchrl_ext.data.weights.gather import disjoint
from torchrl_ext.data.weights.hf_names import shards_of_part
from torchrl_ext.data.weights.shared import differing, refuse_digests, shared, shared_in, tied_by_config
from torchrl_ext.data.weights.source import MappingSource
from torchrl_ext.data.weights.view import View

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


def test_shared_names_and_what_differs_among_them():
    places = [("one", "a"), ("other", "b"), ("one", "c"), ("one", "a"), ("third", "a"), ("third", "c")]
    ((a, c),) = groups = shared(places)
    assert (a, c) == ("a", "c")
    assert shared_in(json.loads(json.dumps({"shared": groups}))) == [["a", "c"]] and shared_in({}) == []
    nan = torch.tensor([float("nan"), 0.0])
    assert differing(groups[0], {"a": nan, "c": nan.clone()}) is None
    assert differing(groups[0], {"a": torch.ones(2).bfloat16(), "c": torch.ones(2)}) is None
    assert differing(groups[0], {"a": nan, "c": -nan}) == ("a", "c")


@pytest.mark.parametrize(("digests", "refused"), [({"a": "1", "b": "1"}, False), ({"a": "1", "b": "2"}, True)])
def test_digests_of_one_memory_have_to_be_equal(digests, refused):
    with pytest.raises(ManifestError, match="one memory for 'a' and 'b'") if refused else nullcontext():
        refuse_digests([("a", "b")], digests)
    refuse_digests([("a", "b")], {"a": digests["a"], "b": ""})
    refuse_digests([("a", "b")], {})


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}, False),
        ({"text_config": {"tie_word_embeddings": True}}, True),
        ({}, False),
    ],
)
def test_a_config_ties_the_head_to_the_embedding_of_its_shape(config, tied):
    class Source(MappingSource):
        def files(self):
            return {"config.json": json.dumps(config).encode()}

    names = {"lm_head.weight": (6, 4), "model.embed_tokens.weight": (6, 4), "model.embed_positions.weight": (3, 4)}
    found = tied_by_config(Source({name: torch.zeros(shape) for name, shape in names.items()}))
    expected = [{"lm_head.weight", "model.embed_tokens.weight"}] if tied else []
    assert [{*names} for names in found] == expected
