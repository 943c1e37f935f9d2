"""Tensors of which only some blocks are there, against the full tensors that they stand for."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.data.sharded.test_plan import partition
from torchrl_ext.base.errors import ConfigError, IntegrityError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.landing.sliced import Sliced, part_of
from torchrl_ext.data.weights.blocks import Block


def made(shape, dtype=torch.float32):
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float64).to(dtype).reshape(shape)


def sliced(full, *blocks, name="w"):
    """``full`` with only these blocks, each in memory of its own, every other one with its dimensions the other way."""
    parts = []
    for index, block in enumerate(blocks):
        block = Block(*block)
        data = full[block.within(Block.whole(full.shape))].clone()
        if index % 2 == 0:
            order = tuple(reversed(range(data.dim())))
            data = data.permute(order).contiguous().permute(order)
        parts.append((block, data))
    return Sliced.of(ParamMeta.of(name, full), parts)


def whole(full):
    return sliced(full, Block.whole(full.shape))


@pytest.fixture(params=[torch.no_grad, torch.inference_mode])
def mode(request):
    """Engines load in either; operators come in other pieces in inference mode."""
    with request.param():
        yield


def random_view(rng, shape):
    """A view of a tensor of this shape, as a call."""
    dim, other = rng.randrange(len(shape)), rng.randrange(len(shape))
    first = rng.randrange(shape[dim])
    length = rng.randint(1, shape[dim] - first)
    views = [
        lambda one: one.narrow(dim, first, length),
        lambda one: one.transpose(dim, other),
        lambda one: one.select(dim, first),
        lambda one: one[(slice(None),) * dim + (slice(first, None, 2),)],
        lambda one: one.unsqueeze(dim),
        lambda one: one.chunk(2, dim)[-1],
        lambda one: one.to(torch.float64),
        lambda one: one.contiguous(),
        torch.clone,
        lambda one: one.reshape(-1),
        lambda one: one.unsqueeze(dim).expand(*shape[:dim], 2, *shape[dim:]),
        lambda one: one.reshape(-1)[first :: length + 1],
    ]
    if dim != other:
        views.append(lambda one: one.diagonal(0, dim, other))
    if shape[dim] % 2 == 0:
        views.append(lambda one: one.unflatten(dim, (2, -1)))
    return rng.choice(views)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@settings(max_examples=150, deadline=None, derandomize=True)
@given(rng=st.randoms(use_true_random=False))
def test_random_views_read_full_tensor_or_name_missing_block(mode, rng):
    with mode():
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3)))
        held = [block for block in partition(rng, shape, rng.randint(1, 4)) if rng.random() < 0.8]
        full, there = made(shape), torch.zeros(shape, dtype=torch.bool)
        lazy = sliced(full, *held)
        for block in held:
            there[block.within(Block.whole(shape))] = True
        try:
            for _ in range(rng.randint(0, 4)):
                if full.dim():
                    view = random_view(rng, full.shape)
                    lazy, full, there = view(lazy), view(full), view(there).bool()
                    assert lazy.shape == full.shape and lazy.dtype == full.dtype
            found = lazy + 0
        except IntegrityError as error:
            assert re.search(r"\[.*\] of tensor 'w' did not come", str(error)) and not there.all()
        else:
            assert there.all() and torch.equal(found, full)


@pytest.mark.parametrize("change", [lambda one: one.to(torch.bfloat16), torch.clone, lambda one: one.t().contiguous()])
def test_cast_of_partial_tensor_keeps_its_blocks(change, mode):
    full = made((8, 6))
    part, expected = change(sliced(full, ((2, 2), (4, 6)), ((6, 1), (8, 3)))), change(full)
    assert isinstance(part, Sliced) and part.dtype == expected.dtype and part.shape == expected.shape
    assert torch.equal(part[2:4, 2:4] + 0, expected[2:4, 2:4])
    with pytest.raises(IntegrityError):
        part[0] + 0


def test_a_tensor_without_dimensions_is_there_or_not(mode):
    meta, value = ParamMeta("scale", torch.float32, ()), torch.tensor(2.5)
    there = Sliced.of(meta, [(Block((), ()), value)])
    assert there.item() == 2.5 and there.view(1).shape == (1,) and float(there.reshape(1)[0]) == 2.5
    target = torch.zeros(1)
    target[0] = there
    assert target[0] == 2.5 and torch.equal(part_of(there, Block((), ())), value)
    with pytest.raises(IntegrityError, match="'scale'"):
        Sliced.of(meta, []).item()


class Counter(TorchDispatchMode):
    """As vLLM counts what a loader copies, before there is anything to copy to."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            assert args[0].numel() == args[1].numel()
            self.numel += args[0].numel()
        return func(*args, **(kwargs or {}))


def test_copy_to_meta_device_is_counted_without_reading(mode):
    part = Sliced.of(ParamMeta("w", torch.float32, (8, 6)), [])
    target = torch.empty(4, 6, device="meta")
    with Counter() as counter:
        target.copy_(part[2:6])
        target.data[:2].copy_(part.narrow(0, 2, 4)[:2])
        assert part.to("meta").is_meta
    assert counter.numel == 24 + 12
    with pytest.raises(RuntimeError):
        target.copy_(part[:3])


def test_nothing_writes_into_it(mode):
    part = whole(made((8, 6)))
    for write in (lambda: part.zero_(), lambda: part[0].copy_(torch.zeros(6)), lambda: part.data.mul_(2)):
        with pytest.raises(ConfigError, match="came in slices"):
            write()
    with pytest.raises(ConfigError):
        torch.add(torch.zeros(8, 6), 1, out=part)
    assert torch.equal(part + 0, made((8, 6)))


def test_a_block_that_one_part_has_is_read_from_its_memory():
    full = made((8, 6))
    part = Sliced.of(ParamMeta.of("w", full), [(Block((2, 0), (6, 6)), full[2:6])])
    assert part[3:5].t().read().data_ptr() == full[3:5].data_ptr()
    for tensor in (full, part):
        assert part_of(tensor, Block((3, 1), (4, 3))).data_ptr() == full[3:4, 1:3].data_ptr()
    assert part_of(part, Block((1, 1), (4, 3))) is None
    with pytest.raises(IntegrityError, match=r"^\[0:2, 1:4\]"):
        part[:3, 1:4] + 0
