"""Where parts of tensors lie: their blocks, put together, are the view that they were made from."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.groups import Part
from torchrl_ext.weights.shards.blocks import Block, Shard
from torchrl_ext.weights.shards.parts import place_of


def _viewed(random_, tensor):
    """A view of ``tensor`` by a few random steps that keep it a box."""
    for _ in range(random_.randrange(5)):
        dim = random_.randrange(max(1, tensor.dim()))
        size = tensor.shape[dim] if tensor.dim() else 1
        kind = random_.choice(["narrow", "step", "select", "swap", "one"])
        if kind == "one" or not tensor.dim():
            tensor = tensor.unsqueeze(dim if tensor.dim() else 0)
        elif kind == "narrow":
            start = random_.randrange(size)
            tensor = tensor.narrow(dim, start, random_.randint(1, size - start))
        elif kind == "step":
            tensor = tensor[(slice(None),) * dim + (slice(random_.randrange(size), None, random_.randint(1, 3)),)]
        elif kind == "select":
            tensor = tensor.select(dim, random_.randrange(size))
        else:
            tensor = tensor.transpose(dim, random_.randrange(tensor.dim()))
    return tensor


@pytest.mark.parametrize("seed", range(40))
def test_blocks_of_a_part_are_those_of_its_tensor(seed):
    random_ = random.Random(seed)
    shape = [random_.randint(1, 6) for _ in range(random_.randint(1, 4))]
    order = random_.sample(range(len(shape)), len(shape))
    tensor = torch.arange(torch.Size(shape).numel()).view(shape).permute(order)  # of any strides
    view = _viewed(random_, tensor)
    part = Part(tuple(view.shape), view.stride(), int(view.storage_offset()))
    place = place_of(part, tuple(tensor.shape), tensor.stride())
    assert place is not None
    meta, found = ParamMeta("part", tensor.dtype, tuple(view.shape)), torch.full_like(view, -1)
    cuts = [sorted({0, size, random_.randint(0, size)}) for size in tensor.shape]
    blocks = [((), ())]
    for cut in cuts:
        blocks = [((*a, low), (*b, high)) for a, b in blocks for low, high in pairwise(cut)]
    boxes = [Block(*bounds) for bounds in blocks]
    whole = Block.whole(tensor.shape)
    shards = [Shard(meta, box, lambda box=box: tensor[box.within(whole)]) for box in boxes]
    for one in place.shards(meta, shards):
        where = found[tuple(map(slice, one.block.start, one.block.stop))]
        assert bool((where == -1).all())
        assert one.take().shape == one.block.shape
        assert one.take().untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        where.copy_(one.take())
    assert torch.equal(found, view)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda tensor: tensor.view(12, 5), id="dimensions in one"),
        pytest.param(lambda tensor: tensor.view(3, 2, 2, 5), id="a dimension in two"),
        pytest.param(lambda tensor: tensor.diagonal(0, 0, 1), id="a diagonal"),
        pytest.param(lambda tensor: tensor[:, :1].expand(3, 4, 5), id="one element often"),
        pytest.param(lambda tensor: tensor.as_strided((2, 3), (5, 7)), id="steps across dimensions"),
    ],
)
def test_a_part_that_is_no_box_has_no_place(view):
    tensor = torch.arange(60).view(3, 4, 5)
    part = view(tensor)
    assert place_of(Part(tuple(part.shape), part.stride(), 0), (3, 4, 5), tensor.stride()) is None


def test_parts_of_a_tensor_whose_elements_share_memory_have_no_place():
    assert place_of(Part((2,), (1,), 0), (2, 3), (0, 1)) is None
