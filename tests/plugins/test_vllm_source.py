"""Weight sources of vLLM's trainers, in both of their forms: what each rank gives, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as some
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.plugins.vllm_api import Declared, Placed, coordinates
from tests.processes import calling, python
from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.plugins.vllm.source import VLLMSource
from torchrl_ext.weights.shards.blocks import checked_shards
from torchrl_ext.weights.source import checked

LAYOUTS = some.integers(1, 3).flatmap(
    lambda axes: some.tuples(
        some.lists(some.integers(0, 9), min_size=1, max_size=3),
        some.lists(some.integers(1, 4), min_size=axes, max_size=axes),
        some.lists(some.one_of(some.none(), some.integers(0, 2)), min_size=axes, max_size=axes),
    )
)


def chunked(tensor, mesh, dims, place):
    """What `torch.chunk` leaves at a place, one dimension of the mesh after the other."""
    for count, dim, at in zip(mesh, dims, place, strict=True):
        if dim is not None:
            chunks = tensor.chunk(count, dim)
            tensor = chunks[at] if at < len(chunks) else tensor.narrow(dim, 0, 0)
    return tensor


def layout(drawn):
    shape, mesh, dims = drawn
    return shape, mesh, [None if dim is None else dim % len(shape) for dim in dims]


def held(source):
    """A rank's elements of every parameter: NaN where it holds nothing."""
    found = {}
    for meta, shards in checked_shards(source.shards(), source.params()):
        found[meta.name] = torch.full(meta.shape, float("nan"))
        for shard in shards:
            found[meta.name][tuple(map(slice, *shard.block))] = shard.take()
    return found


@given(LAYOUTS)
def test_pieces_are_those_of_torchs_chunk_the_outer_dimension_first(drawn):
    shape, mesh, dims = layout(drawn)
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    owners = [3 + 2 * rank for rank in range(torch.Size(mesh).numel())]
    placements = [SimpleNamespace() if dim is None else SimpleNamespace(dim=dim) for dim in dims]
    meta = SimpleNamespace(name="w", dtype=whole.dtype, shape=shape, owners=tuple(owners), mesh_shape=tuple(mesh))
    meta.placements = tuple(placements) if any(dim is not None for dim in dims) else None
    everything = torch.full(shape, float("nan"))
    for rank, place in zip(owners, coordinates(mesh), strict=True):
        piece = chunked(whole, mesh, dims, place)
        source = SimpleNamespace(metadata=[meta], iter_local=lambda: iter([("w", piece)]))  # noqa: B023
        own = held(VLLMSource(source, rank=rank))["w"]
        there = ~own.isnan()
        assert torch.equal(own[there], piece.flatten()) and torch.equal(own[there], whole[there])
        everything[there] = own[there]
    assert torch.equal(everything, whole)
    assert not [*VLLMSource(source, rank=1).shards()]


LAID = (
    ((7,), (0,)), ((5, 3), (1,)), ((6, 5), (0, 1)), ((9, 2), (0, 0)), ((3, 3), (0, 0, 1)), ((1,), (0,)),
    ((17, 4), (None, 0)), ((17, 4), (0, None, 0)),
)  # fmt: skip
"""Shapes, and the dimension that each dimension of a mesh splits."""


def be_dtensors(rank):
    """A rank of eight compares with DTensor, which computes from the layout alone."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    torch.manual_seed(rank)
    for shape, dims in LAID:
        mesh = init_device_mesh("cpu", {1: (8,), 2: (2, 4), 3: (2, 2, 2)}[len(dims)])
        how = [Replicate() if dim is None else Shard(dim) for dim in dims]
        source = Placed({"w": torch.empty(0)}, rank)
        whole = torch.randn(shape)
        local = chunked(whole, mesh.shape, dims, mesh.get_coordinate())
        stride = whole.stride()
        source.tensors["w"] = DTensor.from_local(local, mesh, how, shape=whole.shape, stride=stride, run_check=False)
        own = held(VLLMSource(source, rank=rank))["w"]
        there = ~own.isnan()
        assert torch.equal(own[there], whole[there]) and int(there.sum()) == local.numel(), (shape, dims)


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [0, 3, 7])
def test_pieces_are_those_of_dtensors(rank):
    python(calling(be_dtensors, rank))


WEIGHTS = {"a": torch.randn(5, 2), "b": torch.randn(4), "c": torch.randn(3).to(torch.bfloat16)}


def pairs(source):
    return {name: tensor for name, tensor in source}


@pytest.mark.parametrize("form", [Declared, Placed])
def test_full_tensors_come_as_declared_and_without_autograd(form):
    weights = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in WEIGHTS.items()}
    source = VLLMSource(form(weights))
    source.require(gathers=True)
    found = {meta.name: tensor for meta, tensor in checked(source)}
    assert all(torch.equal(found[name], tensor) and not found[name].requires_grad for name, tensor in WEIGHTS.items())
    assert [meta.name for meta in source.params()] == [*WEIGHTS] and source.params()[2].dtype == torch.bfloat16
    with torch.no_grad():
        weights["b"] += 1
    assert torch.equal(pairs(source)["b"], WEIGHTS["b"] + 1)  # each pass is fresh


@pytest.mark.parametrize("source", [Declared(WEIGHTS, held={"a", "c"}), Placed(WEIGHTS, owners={"b": (1, 2)})])
def test_what_rank_0_lacks_is_refused_where_it_sends_alone_and_moves_where_all_send(source):
    first = VLLMSource(source)
    with pytest.raises(ConfigError, match=r"does not own 'b'.*by_shard"):
        first.require(gathers=True)
    first.require(gathers=False)
    assert {*pairs(first)} == {"a", "c"}  # as a rank replays its part of a pass
    assert {shard.meta.name for shard in first.shards()} == {"a", "c"}
    other = Declared(WEIGHTS, held={"b"}) if isinstance(source, Declared) else Placed(WEIGHTS, 1, owners=source.owners)
    assert "b" in {shard.meta.name for shard in VLLMSource(other, rank=1).shards()}


def test_owners_that_make_a_tensor_together_take_it_in_step():
    shards = {one.meta.name: one for one in VLLMSource(Placed(WEIGHTS, owners={"b": (0, 1)})).shards()}
    assert shards["b"].gathers and not shards["a"].gathers
    assert torch.equal(shards["c"].take(), WEIGHTS["c"]) and torch.equal(shards["a"].take(), WEIGHTS["a"])
    assert torch.equal(shards["b"].take(), WEIGHTS["b"])


def test_a_source_that_makes_only_pieces_or_only_full_tensors():
    pieces = VLLMSource(Placed(WEIGHTS, modes=("local",)))
    with pytest.raises(ConfigError, match=r"yields only the pieces.*sharded"):
        pieces.require(gathers=True)
    assert torch.equal(held(pieces)["a"], WEIGHTS["a"])
    whole = VLLMSource(Placed(WEIGHTS, modes=("full",)))
    whole.require(gathers=True)
    shards = [*whole.shards()]
    assert all(shard.gathers for shard in shards) and torch.equal(shards[0].take(), WEIGHTS["a"])


def test_a_pass_that_is_not_what_was_declared_is_refused():
    source = Placed(WEIGHTS)
    source.iter_local = lambda: iter([("a", torch.ones(2, 5))])
    first, second, _ = VLLMSource(source).shards()
    with pytest.raises(ManifestError, match=r"\[2, 5\] as this rank's piece of 'a'.*\[5, 2\]"):
        first.take()
    with pytest.raises(ManifestError, match="ended before 'b'"):
        second.take()
    with pytest.raises(ConfigError, match="declares no weights"):
        VLLMSource(None)
