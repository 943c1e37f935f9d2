"""Deltas that trainer ranks write together, each in a process of its own: at odds with each other, and killed."""

import re
import signal
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchrl_ext as tx
from tests.data.sharded.shard_ranks import Blocks, blocks, cut, meet, step, weights
from tests.data.transports.chains import same, trainer_at
from tests.processes import WAIT_S, calling, running_python
from tests.ranks import join, on_ranks
from torchrl_ext.base.errors import WeightSyncError
from torchrl_ext.control.serving.processes import free_port
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.local import LocalStore, _LocalDraft
from torchrl_ext.data.versions.full import FullWriter
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.sync.local.inprocess import InProcessEngine


def delta_at(root, version):
    return Chain(LocalStore(root)).version(version).delta


def require_owned_once(transport, tensors):
    """The ranks keep each tensor once between them, and none much more than its share."""
    every, world = [None] * dist.get_world_size(), dist.get_world_size()
    dist.all_gather_object(every, transport._own.nbytes)
    sizes = [tensor.nbytes for tensor in tensors.values()]
    assert sum(every) == sum(sizes) and max(every) <= sum(sizes) / world + max(sizes), (every, sizes)


@on_ranks(1, 2, 4)
def test_ranks_write_a_chain_together_and_readers_end_equal(rank, world, folder):
    with pytest.MonkeyPatch.context() as patch:
        write_a_chain_together(rank, world, folder, patch)


def write_a_chain_together(rank, world, folder, patch):
    for encoding in {1: ["auto"], 2: ["context", "deltas_zstd"], 4: ["auto"]}[world]:
        own, root = weights(), f"{folder}/{encoding}"
        if encoding == "deltas_zstd":  # as in a bucket, which takes files of one rank
            patch.setattr(LocalStore, "joined", False)
            patch.setattr(_LocalDraft, "place", "")
        source = Blocks(own, rank, world, meet=meet)
        trainer = tx.DeltaTransport(root, encoding=encoding, keyframe_every=3, keep_files=True)
        follower = tx.DeltaTransport(root)
        for version in range(1, 6):
            trainer.send_weights(source)
            if rank == 0:
                if version != 2:
                    assert same(follower.receive_weights(60), own), version
                assert same(tx.DeltaTransport(root).receive_weights(60), own), version
            step(own, version)
        if rank == 0:
            versions = map(Chain(LocalStore(root)).version, range(1, 6))
            kinds = [(version.full is not None, version.delta is not None) for version in versions]
            assert kinds == [(True, False), (False, True), (False, True), (True, True), (False, True)]
        if encoding == "deltas_zstd":
            assert trainer._own.nbytes == (rank == 0) * sum(tensor.nbytes for tensor in own.values())
            continue
        require_owned_once(trainer, own)
        if rank == 0:
            assert sorted(delta_at(root, 5).files) == [f"delta-{one:05d}.safetensors" for one in range(1, world + 1)]
            assert len({file for file, _ in Chain(LocalStore(root)).version(4).full}) == world


@on_ranks(2)
def test_every_rank_raises_the_error_of_one_rank(rank, world, folder):
    def holed(name, shape, rank, world):
        return [] if name == "columns" and rank == 1 else blocks(name, shape, rank, world)

    def turned(name, shape, rank, world):  # other blocks than before
        return blocks(name, shape, world - 1 - rank, world)

    class Failing(Blocks):
        fails = "columns"

        def _take(self, name, block):
            if name == self.fails and self._rank == 1:
                raise RuntimeError("a broken disk")
            return super()._take(name, block)

    def full_disk(self, draft, owned, rank, pairs):
        next(pairs)
        raise OSError(28, "No space left on device")

    def fails(source, why):
        with pytest.raises(WeightSyncError, match=re.escape(why)):
            trainer.send_weights(source)

    own = weights()
    source, trainer = Blocks(own, rank, world, meet=meet), tx.DeltaTransport(folder, timeout_s=20)
    trainer.send_weights(source)
    wide = own | ({"columns": torch.zeros(40, 51)} if rank == 1 else {})
    fewer = {name: tensor for name, tensor in own.items() if rank == 0 or name != "uneven"}
    for tensors, words in (
        (wide, "parameter 0 is columns float32[40, 51] on trainer rank 1, and columns float32[40, 50] on rank 0"),
        (fewer, "parameter 11 is none on trainer rank 1, and uneven float32[5, 7] on rank 0"),
    ):
        fails(Blocks(tensors, rank, world, meet=meet), words)
    fails(Blocks(own, rank, world, of=holed, meet=meet), "no trainer rank holds elements [0:40, 25:50] of columns")
    step(own, 1)
    for name in ("columns", "rows", "gathered"):  # owned by one rank or the other, or taken by both
        failing = Failing(own, rank, world)
        failing.fails = name
        fails(failing, "a broken disk")
    trainer.send_weights(Blocks(own, rank, world, of=turned, meet=meet))
    if rank == 0:
        assert same(tx.DeltaTransport(folder).receive_weights(60), own)
        assert Chain(LocalStore(folder)).numbers() == [2]
        assert Chain(LocalStore(folder)).version(2).full is not None
    for wrong in range(world):  # any rank that cannot write
        with pytest.MonkeyPatch.context() as patch:
            if rank == wrong:
                patch.setattr(FullWriter, "write_tensors", full_disk)
            trainer._writer.restart()
            fails(source, "No space left")
    trainer.send_weights(source)
    if rank == 0:
        assert same(tx.DeltaTransport(folder).receive_weights(60), own)


class Tied(nn.Module):
    """Layers of which two share a weight; dimensions that no mesh divides, and one that leaves ranks without rows."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(30, 50), nn.LayerNorm(50), nn.Linear(50, 30)
        self.head, self.few = nn.Linear(30, 50, bias=False), nn.Linear(30, 3)
        self.head.weight = self.inner.weight
        self.register_buffer("count", torch.tensor(3))


@on_ranks(4)
def test_fsdp2_and_hsdp_trainers_and_replicas_end_equal(rank, world, folder):
    for shape, names in (((world,), ("shard",)), ((2, world // 2), ("replicate", "shard")), ((), ())):
        torch.manual_seed(0)
        model, root = Tied().bfloat16(), f"{folder}/{len(shape)}"
        if shape:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            for layer in (model.norm, model.outer, model.few, model):
                fully_shard(layer, mesh=mesh)
        transport = tx.DeltaTransport(root, keyframe_every=3)
        served = {name: torch.zeros_like(tensor) for name, tensor in as_source(model)}
        sender = tx.WeightSender(transport, InProcessEngine(served) if rank == 0 else None, rank=rank, finite=False)
        sender.register_model(model)
        for version in range(1, 6):
            report = sender.update_weights(only=["few.weight"] if version == 5 else None)
            expected = dict(as_source(model))
            if rank == 0:
                assert report.verified and same(served, expected)
                assert same(tx.DeltaTransport(root).receive_weights(60), expected)
                if version > 1:
                    assert len(report.rank_bytes) == world, report
                    assert sum(report.rank_bytes) == sum(delta_at(root, version).files.values())
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    local = parameter.to_local() if shape else parameter
                    seed = version if shape[:1] == (world,) else 100 * version  # replicas change alike
                    where = torch.rand(local.shape, generator=torch.Generator().manual_seed(seed)) < 0.2
                    if version < 4 or name == "few.weight":
                        local[where] *= 1.5
        require_owned_once(transport, expected)
        sender.shutdown()


POINTS = ["as it looks", "as it gives", "as it codes", "as it writes", "when it wrote", "in a keyframe"]


def stopped(rank, world, port, root, point):
    """A rank of two that write three versions; rank 1 stops at a point of the third one, and says so."""

    def stop(*_):
        if rank == 1:
            print("now", flush=True)
            sys.stdin.read()

    join(rank, world, port)
    own, write = weights(), _LocalDraft.write
    source = Blocks(own, rank, world, meet=meet)
    trainer = tx.DeltaTransport(root, keyframe_every=2 if point == "in a keyframe" else 0, timeout_s=5)
    for version in (1, 2):
        trainer.send_weights(source)
        step(own, version)
    if rank == 1:
        owner, name = {
            "as it looks": (source, "shards"),
            "as it gives": (trainer._own._gather, "_send"),
            "as it codes": (trainer._own._gather, "_received"),
            "in a keyframe": (trainer._own.full, "write_tensors"),
        }.get(point, (_LocalDraft, "write"))
        setattr(owner, name, (lambda *args: (write(*args), stop())) if point == "when it wrote" else stop)
    with pytest.raises((WeightSyncError, RuntimeError)) as met:
        trainer.send_weights(source)
    print(met.value, flush=True)


@pytest.mark.parametrize("point", POINTS)
def test_a_rank_that_is_killed_leaves_the_chain_as_it_was(tmp_path, point):
    port, own = free_port(), weights()
    step(own, 1)
    programs = [calling(stopped, rank, 2, port, str(tmp_path), point) for rank in range(2)]
    with running_python(programs[0]) as first, running_python(programs[1]) as second:
        assert second.stdout.readline() == "now\n"
        second.send_signal(signal.SIGKILL)
        said = first.stdout.readline()
        first.wait(WAIT_S)
    assert "trainer rank 1" in said, said
    assert sorted(path.name for path in tmp_path.glob("*weight_v*")) == ["weight_v000001", "weight_v000002"]
    reader = trainer_at(tmp_path)
    assert same(reader.receive_weights(WAIT_S), own)
    step(own, 2)
    trainer_at(tmp_path).send_weights("policy", cut(own))
    for one in (reader, trainer_at(tmp_path)):
        assert same(one.receive_weights(WAIT_S), own)
