"""Which blocks of tensors a trainer's ranks hold: together they are what a gather gives, and nothing is gathered."""

from __future__ import annotations

import pytest
import torch

from tests.processes import python
from tests.weights.shards.ranks import outcomes_of, require_passed

WORLD = 4

PRELUDE = """
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from tests.models import converted_model
from tests.weights.shards.ranks import no_collectives, require_assembled
from torchrl_ext.sync.update_source import UpdateSource
from torchrl_ext.testing import any_bits, same_bits
from torchrl_ext.weights.derived import CastSource, RenamedSource
from torchrl_ext.weights.shards.blocks import Block
from torchrl_ext.weights.source import as_source

line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.body = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 6))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.one = nn.Parameter(torch.randn(1, 3))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("nothing", torch.empty(0, 2))

def policy(**how):
    torch.manual_seed(0)
    made = Policy()
    fully_shard(made.body, **how)
    fully_shard(made, **how)
    return made

def names(shards):
    return [shard.meta.name for shard in shards]
"""

RANKS = {
    "FSDP2 holds rows, split as evenly as they can be, and some ranks hold nothing": """
model = policy()
shards = require_assembled(as_source(model))
expected = ["embed.weight", "one", *(name for name, _ in model.body.named_parameters(prefix="body")), "steps"]
held = [name for name in expected if name == "steps" or model.get_parameter(name).to_local().numel()]
assert sorted(names(shards)) == sorted(held) and ("one" in names(shards)) == (rank == 0), names(shards)
assert "head.weight" not in names(shards)
assert {shard.meta.name: shard.block for shard in shards}["steps"] == Block((), ())
""",
    "what is taken is the live memory as it is then, without the padding that FSDP2 adds": """
model = policy()
shards = list(as_source(model).shards())
with torch.no_grad():
    for parameter in model.parameters():
        parameter.mul_(-2)
for shard in shards:
    if shard.meta.name != "steps":
        local = model.get_parameter(shard.meta.name).to_local()
        assert shard.take().data_ptr() == local.data_ptr() and same_bits(shard.take(), local.detach())
        assert shard.block.shape == tuple(local.shape)
model.load_state_dict(policy().state_dict())
require_assembled(as_source(model))
""",
    "FSDP2 holds columns where it is told to": """
model = policy()
require_assembled(as_source(model))
wide = nn.Linear(8, 3)
fully_shard(wide, shard_placement_fn=lambda parameter: Shard(1) if parameter.ndim > 1 else None)
(columns, *_) = require_assembled(as_source(wide))
assert columns.block == Block((0, 2 * rank), (3, 2 * rank + 2))
""",
    "replicas of HSDP are told by every rank that has one": """
model = policy(mesh=square)
shards = require_assembled(as_source(model))
blocks = [None] * world
dist.all_gather_object(blocks, [(shard.meta.name, shard.block) for shard in shards])
assert blocks[0] == blocks[2] and blocks[1] == blocks[3] and blocks[0] != blocks[1]
""",
    "tensor parallel layers hold rows and columns": """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 7), nn.LayerNorm(7))
parallelize_module(model, line, {"0": ColwiseParallel(), "1": RowwiseParallel()})
shards = require_assembled(as_source(model))
assert names(shards)[-1] == "2.bias"
""",
    "any placement on one or two dimensions of a mesh": """
torch.manual_seed(0)
kinds = {line: [[Shard(0)], [Shard(1)], [Shard(2)], [Replicate()]]}
kinds[square] = [
    [Shard(0), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Shard(0)], [Replicate(), Shard(2)], [Shard(1), Replicate()]
]
weights = {}
for mesh, several in kinds.items():
    for placements in several:
        for shape in ((1, 2, 3), (4, 5, 8), (9, 7, 2), (0, 3, 4)):
            weights[f"{mesh.ndim}{placements}{shape}"] = distribute_tensor(torch.randn(shape), mesh, placements)
weights["one"] = distribute_tensor(torch.tensor(2.5), line, [Replicate()])
require_assembled(as_source(weights))
""",
    "FSDP2 over tensor parallel layers, split unevenly": """
def split(rows):
    made = nn.Module()
    full = torch.arange(rows * 4.0).view(rows, 4)
    made.rows = nn.Parameter(distribute_tensor(full, square["tensor"], [Shard(0)]))
    made.columns = nn.Parameter(distribute_tensor(full, square["tensor"], [Shard(1)]))
    made.both = nn.Parameter(distribute_tensor(full, square["tensor"], [Replicate()]))
    fully_shard(made, mesh=square["data"])
    assert type(made.rows.placements[0]) is _StridedShard
    return made
for rows in (1, 2, 3, 5, 7, 8):
    require_assembled(as_source(split(rows)))
""",
    "a strided block is yielded piece by piece": """
weights = {"three": distribute_tensor(torch.arange(48.0).view(24, 2), line, [_StridedShard(0, split_factor=3)])}
shards = require_assembled(as_source(weights))
assert [shard.block.start for shard in shards] == [(at + 2 * rank, 0) for at in (0, 8, 16)]
pointers = {shard.take().untyped_storage().data_ptr() for shard in shards}
assert pointers == {weights["three"].to_local().untyped_storage().data_ptr()}
""",
    "what placements do not tell is gathered, in order, and says why": """
mine = torch.arange(6.0).view(2, 3) * (rank + 1)
weights = {
    "a": distribute_tensor(torch.arange(5.0), line, [Shard(0)]),
    "b": DTensor.from_local(mine, line, [Partial()]),
    "c": torch.arange(3.0),
    "d": DTensor.from_local(mine, square, [Partial(), Shard(0)]),
}
shards = require_assembled(as_source(weights), gathers={"b", "d"})
assert ["sum" in shard.why for shard in shards if shard.gathers] == [True, True]
from torch.distributed.tensor import _dtensor_spec as specs
if "ShardOrderEntry" in vars(specs):  # since torch 2.10: first by the second dimension of the mesh
    full, (at, first) = torch.arange(8.0), square.get_coordinate()
    turned = specs.DTensorSpec(
        square, (Shard(0), Shard(0)), specs.TensorMeta(full.shape, full.stride(), full.dtype),
        shard_order=(specs.ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),), use_strided_shard_as_shard_order=False,
    )
    local = full.chunk(2)[first].chunk(2)[at].clone()
    require_assembled(as_source({"turned": DTensor(local, turned, requires_grad=False)}), gathers={"turned"})
try:
    with no_collectives():
        shards[-1].take()
except AssertionError:
    pass
else:
    raise AssertionError("a gather was not noticed")
""",
    "a local tensor that is not what its placement says is refused by name": """
from torchrl_ext.errors import ManifestError
wrong = DTensor.from_local(torch.ones(rank + 1, 2), line, [Shard(0)], run_check=False, shape=(10, 2), stride=(2, 1))
try:
    list(as_source({"odd": wrong}).shards())
except ManifestError as error:
    assert "odd" in str(error) and rank != 2, error  # rank 2 holds three rows either way
else:
    assert rank == 2
""",
    "ranks outside of a tensor's mesh hold nothing of it": """
from torch.distributed.device_mesh import DeviceMesh
pair = DeviceMesh("cpu", [1, 2])
full = torch.arange(10.0).view(5, 2)
held = {"pair": distribute_tensor(full, pair, [Shard(0)]), "sum": DTensor.from_local(full, pair, [Partial()])}
shards = list(as_source(held).shards())
assert [shard.block for shard in shards if not shard.gathers] == {
    1: [Block((0, 0), (3, 2))], 2: [Block((3, 0), (5, 2))]
}.get(rank, [])
assert names(shards) == (["pair", "sum"] if rank in (1, 2) else [])
""",
    "a cast of a block is the block of the cast": """
torch.manual_seed(0)
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
    anything = any_bits(dtype, 37, 11)
    if dtype is torch.float16:  # to widen it, torch's vectors and its loop over the rest make NaNs of other payloads
        anything = torch.where(anything.isnan(), torch.inf, anything)
    weights = {
        "any": distribute_tensor(anything, line, [Shard(0)]),
        "wide": distribute_tensor(torch.randn(8, 64).mul(1e3).to(dtype), line, [Shard(1)]),
        "whole": any_bits(dtype, 5),
        "count": distribute_tensor(torch.arange(10), line, [Shard(0)]),
    }
    for target in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2):
        shards = require_assembled(CastSource(as_source(weights), target))
        assert {shard.meta.dtype for shard in shards} == {target, torch.int64}
        assert {shard.take().dtype for shard in shards} == {dtype, torch.int64}
""",
    "float32 masters of mixed precision are cast as they are copied, and an update counts them": """
model = policy(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
source = UpdateSource(as_source(model), mapper={"(.*)weight": r"it.\\1w"}, dtype=torch.bfloat16)
shards = require_assembled(source)
assert "it.embed.w" in [meta.name for meta in source.params()]
list(source.shards())
assert source.count == len(source.params()) and source.bytes == source.model_bytes
by_name = {shard.meta.name: shard for shard in shards}
assert by_name["it.embed.w"].meta.dtype == torch.bfloat16 and by_name["it.embed.w"].take().dtype == torch.float32
""",
    "models that transformers converts are told under the names of their checkpoints": """
for kind in ("qwen3_moe", "hrm_text"):
    model = converted_model(kind)
    inner = getattr(model.model, "language_model", model.model)
    for layer in getattr(inner, "layers", ()):
        fully_shard(layer)
    fully_shard(model)
    source = as_source(model)
    gathered = {shard.meta.name for shard in source.shards() if shard.gathers}
    assert bool(gathered) == (kind == "hrm_text"), (kind, gathered)
    shards = require_assembled(source, gathers=gathered)
    require_assembled(CastSource(source, torch.bfloat16), gathers=gathered)
    if kind == "qwen3_moe":
        experts = {name.split(".experts.")[1].split(".")[0] for name in names(shards) if ".experts." in name}
        assert experts == {str(rank)}, experts  # as many as ranks
""",
    "stacked experts that are split along any dimension": """
for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(2)], [Shard(2), Replicate()], [Shard(1), Shard(1)]):
    model = converted_model("qwen3_moe")
    for name, parameter in list(model.named_parameters()):
        if ".experts." in name:
            owner, _, last = name.rpartition(".")
            split = nn.Parameter(distribute_tensor(parameter.detach(), square, placements))
            setattr(model.get_submodule(owner), last, split)
    require_assembled(as_source(model))
""",
    "weights into which adapters are merged are gathered, the others are not": """
import peft
torch.manual_seed(0)
base = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5))
model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["1"], init_lora_weights=False))
fully_shard(model)
shards = require_assembled(as_source(model), gathers={"1.weight"})
assert [shard.why for shard in shards if shard.gathers] == ["adapters are merged into it"]
from torchrl_ext.weights.adapter import as_adapter
require_assembled(as_adapter(model))
""",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What became of each scenario on each rank; four processes run them one after the other."""
    return outcomes_of(RANKS, PRELUDE, WORLD, tmp_path_factory.mktemp("ranks"))


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.parametrize("scenario", RANKS)
def test_with_four_ranks(scenario, outcomes):
    require_passed(scenario, outcomes, WORLD)


def test_fully_shard_over_many_ranks_holds_what_it_says():
    """Each rank in a process of its own that talks to nobody: splits by up to three dimensions of a mesh."""
    python("""
import multiprocessing, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrl_ext.weights.source import as_source

SIZES = (1, 2, 3, 5, 7, 11, 12, 13, 24, 31)

def rows(size):
    return 1 + torch.arange(size * 3.0).view(size, 3)

def held(told):
    shape, inner, rank = told
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=torch.Size(shape).numel())
    names = ("data", "one", "two")[: len(shape)]
    mesh, found = init_device_mesh("cpu", shape, mesh_dim_names=names), []
    for size in SIZES:
        model = nn.Module()
        split = distribute_tensor(rows(size), mesh[names[1:]], list(map(Shard, inner)), src_data_rank=None)
        model.rows = nn.Parameter(split)
        fully_shard(model, mesh=mesh["data"])
        for shard in as_source(model).shards():
            assert not shard.gathers, shard.why
            found.append((size, shard.block.start, shard.block.stop, shard.take().tolist()))
    return found

with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
    for shape, inner in (((3, 2), (0,)), ((2, 3), (1,)), ((3, 2, 2), (0, 0))):
        whole = {size: torch.zeros(size, 3) for size in SIZES}
        ranks = range(torch.Size(shape).numel())
        for found in pool.imap(held, [(shape, inner, rank) for rank in ranks], chunksize=1):
            for size, start, stop, values in found:
                where = whole[size][tuple(map(slice, start, stop))]
                assert not where.any(), "an element is on two ranks"
                where += torch.tensor(values)
        for size, tensor in whole.items():
            assert torch.equal(tensor, rows(size)), (shape, size)
""")
