"""What ranks of FSDP and tensor parallelism hold: together it is what a gather gives; and failures on one of them."""

import functools
import itertools

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import _dtensor_spec as specs
from torch.distributed.tensor.placement_types import _StridedShard

import torchrl_ext as tx
from tests.data.weights.ranks import Policy, no_collectives, require_assembled, sharded
from tests.models import converted_model
from tests.ranks import on_ranks, raises_if
from torchrl_ext.base.errors import ConfigError, ManifestError, TransportError, UpdateError
from torchrl_ext.data.weights.blocks import Block
from torchrl_ext.data.weights.derived import MappedSource, as_source
from torchrl_ext.sync.local.inprocess import InProcessEngine
from torchrl_ext.testing import any_bits, same_bits


@functools.cache
def line():
    return init_device_mesh("cpu", (4,))


@functools.cache
def square():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


def policy(**how):
    return sharded(Policy(), **how)


def names(shards):
    return [shard.meta.name for shard in shards]


@on_ranks(4)
def test_fsdp2_shards_are_views_of_each_ranks_live_rows(rank, world, folder):
    model = policy()
    shards = require_assembled(as_source(model))
    local = {name: parameter.to_local() for name, parameter in model.named_parameters()}
    held = {name for name, tensor in local.items() if tensor.numel()}
    assert set(names(shards)) == held | {"steps"} and ("one" in held) == (rank == 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-2)
    for shard in shards:
        if shard.meta.name == "steps":
            assert shard.block == Block((), ())
            continue
        tensor = local[shard.meta.name]
        assert shard.take().data_ptr() == tensor.data_ptr() and same_bits(shard.take(), tensor.detach())
        assert shard.block.shape == tuple(tensor.shape)  # without the padding that FSDP2 adds
    model.load_state_dict(policy().state_dict())
    require_assembled(as_source(model))


@on_ranks(4)
def test_any_placement_on_one_or_two_dimensions_of_a_mesh(rank, world, folder):
    torch.manual_seed(0)
    kinds, weights = [Shard(0), Shard(1), Shard(2), Replicate()], {}
    for mesh in (line(), square()):
        for placements in itertools.product(kinds, repeat=mesh.ndim):
            for shape in ((1, 2, 3), (4, 5, 8), (9, 7, 2), (0, 3, 4)):
                full = torch.randn(shape)
                weights[f"{mesh.ndim}{placements}{shape}"] = distribute_tensor(full, mesh, placements)
    weights["one"] = distribute_tensor(torch.tensor(2.5), line(), [Replicate()])
    require_assembled(as_source(weights))


@on_ranks(4)
def test_fsdp2_over_tensor_parallel_layers_split_unevenly(rank, world, folder):
    def split(rows):
        made = nn.Module()
        full = torch.arange(rows * 4.0).view(rows, 4)
        made.rows = nn.Parameter(distribute_tensor(full, square()["tensor"], [Shard(0)]))
        made.columns = nn.Parameter(distribute_tensor(full, square()["tensor"], [Shard(1)]))
        made.both = nn.Parameter(distribute_tensor(full, square()["tensor"], [Replicate()]))
        fully_shard(made, mesh=square()["data"])
        assert type(made.rows.placements[0]) is _StridedShard
        return made

    for rows in (1, 2, 3, 5, 7, 8):
        require_assembled(as_source(split(rows)))


@on_ranks(4)
def test_partial_or_reordered_placements_are_gathered(rank, world, folder):
    mine = torch.arange(6.0).view(2, 3) * (rank + 1)
    weights = {
        "a": distribute_tensor(torch.arange(5.0), line(), [Shard(0)]),
        "b": DTensor.from_local(mine, line(), [Partial()]),
        "c": torch.arange(3.0),
        "d": DTensor.from_local(mine, square(), [Partial(), Shard(0)]),
        "e": distribute_tensor(torch.arange(12.0), line(), [_StridedShard(0, split_factor=3)]),
    }
    shards = require_assembled(as_source(weights), gathers={"b", "d", "e"})
    assert ["sum" in shard.why for shard in shards if shard.gathers] == [True, True, False]
    if "ShardOrderEntry" in vars(specs):  # since torch 2.10: first by the second dimension of the mesh
        full, (at, first) = torch.arange(8.0), square().get_coordinate()
        turned = specs.DTensorSpec(
            square(),
            (Shard(0), Shard(0)),
            specs.TensorMeta(full.shape, full.stride(), full.dtype),
            shard_order=(specs.ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),),
            use_strided_shard_as_shard_order=False,
        )
        local = full.chunk(2)[first].chunk(2)[at].clone()
        source = as_source({"turned": DTensor(local, turned, requires_grad=False)})
        require_assembled(source, gathers={"turned"})
        assert [whole.tolist() for _, whole in source] == [full.tolist()]
    with pytest.raises(AssertionError), no_collectives():
        shards[-1].take()


@on_ranks(4)
def test_local_tensor_unlike_its_placement_is_refused_by_name(rank, world, folder):
    wrong = DTensor.from_local(
        torch.ones(rank + 1, 2), line(), [Shard(0)], run_check=False, shape=(10, 2), stride=(2, 1)
    )
    with raises_if(rank != 2, ManifestError, match="odd"):  # rank 2 holds three rows either way
        list(as_source({"odd": wrong}).shards())


@on_ranks(4)
def test_ranks_outside_of_a_tensors_mesh_hold_nothing_of_it(rank, world, folder):
    pair = DeviceMesh("cpu", [1, 2])
    full = torch.arange(10.0).view(5, 2)
    held = {"pair": distribute_tensor(full, pair, [Shard(0)]), "sum": DTensor.from_local(full, pair, [Partial()])}
    shards = list(as_source(held).shards())
    assert [shard.block for shard in shards if not shard.gathers] == {
        1: [Block((0, 0), (3, 2))],
        2: [Block((3, 0), (5, 2))],
    }.get(rank, [])
    assert names(shards) == (["pair", "sum"] if rank in (1, 2) else [])


@on_ranks(4)
def test_a_cast_of_a_block_is_the_block_of_the_cast(rank, world, folder):
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        anything = any_bits(dtype, 37, 11)
        if dtype is torch.float16:  # torch's vectors, and its loop over the rest, widen NaNs to other ones
            anything = torch.where(anything.isnan(), torch.inf, anything)
        weights = {
            "any": distribute_tensor(anything, line(), [Shard(0)]),
            "wide": distribute_tensor(torch.randn(8, 64).mul(1e3).to(dtype), line(), [Shard(1)]),
            "whole": any_bits(dtype, 5),
            "count": distribute_tensor(torch.arange(10), line(), [Shard(0)]),
        }
        for target in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2):
            shards = require_assembled(MappedSource(as_source(weights), dtype=target))
            assert {shard.meta.dtype for shard in shards} == {target, torch.int64}
            assert {shard.take().dtype for shard in shards} == {dtype, torch.int64}


@on_ranks(4)
def test_converted_transformers_models_have_checkpoint_names(rank, world, folder):
    for kind in ("qwen3_moe", "qwen2_5_vl", "hrm_text"):
        model, reference = converted_model(kind), dict(as_source(converted_model(kind)))
        inner = getattr(model.model, "language_model", model.model)
        for layer in getattr(inner, "layers", ()):
            fully_shard(layer)
        fully_shard(model)
        source = as_source(model)
        assert not source.held() and all(same_bits(tensor, reference.pop(name)) for name, tensor in source)
        assert not reference
        gathered = {shard.meta.name for shard in source.shards() if shard.gathers}
        assert bool(gathered) == (kind == "hrm_text"), (kind, gathered)
        shards = require_assembled(source, gathers=gathered)
        require_assembled(MappedSource(source, dtype=torch.bfloat16), gathers=gathered)
        if kind == "qwen3_moe":
            experts = {name.split(".experts.")[1].split(".")[0] for name in names(shards) if ".experts." in name}
            assert experts == {str(rank)}, experts  # as many as ranks


@on_ranks(4)
def test_only_weights_with_merged_adapters_are_gathered(rank, world, folder):
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5))
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["1"], init_lora_weights=False))
    fully_shard(model)
    shards = require_assembled(as_source(model), gathers={"1.weight"})
    assert [shard.why for shard in shards if shard.gathers] == ["adapters are merged into it"]


@on_ranks(2)
def test_rank_0_failure_at_any_step_reaches_every_rank(rank, world, folder):
    class Broken(tx.MemoryTransport):
        at = None

        def fail_at(self, moment):
            if self.at == moment:
                raise TransportError(f"broken at {moment}")

        def latest_version(self):
            self.fail_at("look")
            return super().latest_version()

        def open(self, workers, params, within):
            self.fail_at("open")
            return super().open(workers, params, within)

        def prepare(self, update, within):
            stream = iter(update.source)
            for _ in range(self.at):
                next(stream)
            self.fail_at(self.at)

    policy, transport = sharded(Policy()), Broken()
    sender = tx.WeightSender(transport, InProcessEngine(Policy()) if rank == 0 else None)
    sender.register_model(policy)
    for transport.at in ("look", "open", 0, 1, 4, len(as_source(policy).params())):
        with pytest.raises(UpdateError, match="broken at"):
            sender.update_weights()
        dist.barrier()


@on_ranks(2)
def test_fsdp1_flat_parameters_are_refused_on_every_rank(rank, world, folder):
    def flat(**how):
        torch.manual_seed(0)
        how["device_id"] = torch.device("cpu")
        yield FullyShardedDataParallel(nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 2)), **how)
        yield nn.Sequential(nn.Linear(6, 6), FullyShardedDataParallel(nn.Linear(6, 9), **how))

    for policy in (*flat(use_orig_params=False), *flat(use_orig_params=True)):
        sender = tx.WeightSender(tx.MemoryTransport(), rank=rank)
        sender.register_model(policy)
        for call in (sender.update_weights, sender.init_all_workers_group):
            with pytest.raises(ConfigError, match=r"(?s)FSDP1.*fully_shard"):
                call()
            dist.barrier()  # a rank that comes late takes the newest call of rank 0
        sender.shutdown()
