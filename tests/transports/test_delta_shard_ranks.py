"""Deltas by shard on real ranks, each in a process of its own: together, at odds with each other, and killed."""

from __future__ import annotations

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
from tests.processes import WAIT_S, calling, running_python
from tests.ranks import join, on_ranks
from tests.transports.chains import same, trainer_at
from tests.transports.shard_ranks import Blocks, blocks, cut, meet, step, weights
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, DeadlineError, TransportError, WeightSyncError
from torchrl_ext.serving.processes import free_port
from torchrl_ext.stores import Chain, LocalStore
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.transports.base import Update
from torchrl_ext.versions.checkpoint_writer import FullWriter
from torchrl_ext.weights.source import as_source


def delta_at(root, version):
    return Chain(LocalStore(root)).version(version).delta


def require_held_once(transport, tensors):
    """The ranks hold each element once between them, and share the elements out."""
    every, world = [None] * dist.get_world_size(), dist.get_world_size()
    dist.all_gather_object(every, transport.baseline_bytes)
    model = sum(tensor.nbytes for tensor in tensors.values())
    assert sum(every) == model and max(every) < 1.25 * model / world, (every, model)


@on_ranks(2, 4)
def test_ranks_write_a_chain_together_and_readers_end_equal(rank, world, folder):
    for encoding in {2: ["context"], 4: ["auto", "bitmap"]}[world]:
        own, root = weights(), f"{folder}/{encoding}"
        source = Blocks(own, rank, world, meet=meet)
        trainer = tx.DeltaTransport(root, by_shard=True, encoding=encoding, keyframe_every=3, keep_files=True)
        follower = tx.DeltaTransport(root)
        for version in range(1, 6):
            trainer.send_weights(source)
            if rank == 0:
                if version != 2:
                    assert same(follower.receive_weights(60), own), version
                assert same(tx.DeltaTransport(root).receive_weights(60), own), version
            step(own, version)
        if rank == 0:
            files = sorted(delta_at(root, 5).files)
            assert files == [f"rank{one:05d}-00001.bin" for one in range(world)]
            versions = map(Chain(LocalStore(root)).version, range(1, 6))
            kinds = [(version.full is not None, version.delta is not None) for version in versions]
            assert kinds == [(True, False), (False, True), (False, True), (True, True), (False, True)]
        require_held_once(trainer, own)


@on_ranks(2)
def test_what_differs_or_fails_is_said_on_every_rank_and_the_next_version_is_whole(rank, world, folder):
    def holed(name, shape, rank, world):
        return [] if name == "columns" and rank == 1 else blocks(name, shape, rank, world)

    def turned(name, shape, rank, world):  # other blocks than before
        return blocks(name, shape, world - 1 - rank, world)

    class Failing(Blocks):  # while others wait in a gather
        def _take(self, name, block):
            if name == "columns" and self._rank == 1:
                raise RuntimeError("a broken disk")
            return super()._take(name, block)

    def full_disk(self, draft, source, version, run_id):
        next(iter(source))
        raise OSError(28, "No space left on device")

    def fails(source, why):
        with pytest.raises(WeightSyncError, match=re.escape(why)):
            trainer.send_weights(source)

    own = weights()
    source, trainer = Blocks(own, rank, world, meet=meet), tx.DeltaTransport(folder, by_shard=True, timeout_s=20)
    trainer.send_weights(source)
    wide = own | ({"columns": torch.zeros(40, 51)} if rank == 1 else {})
    fails(
        Blocks(wide, rank, world, meet=meet),
        "parameter 0 is columns float32[40, 51] on trainer rank 1, and columns float32[40, 50] on rank 0",
    )
    fewer = {name: tensor for name, tensor in own.items() if rank == 0 or name != "uneven"}
    fails(
        Blocks(fewer, rank, world, meet=meet),
        "parameter 11 is none on trainer rank 1, and uneven float32[5, 7] on rank 0",
    )
    fails(
        Blocks(own, rank, world, of=holed, meet=meet),
        "no trainer rank holds elements [0:40, 25:50] of columns",
    )
    step(own, 1)
    fails(Failing(own, rank, world, meet=meet), "a broken disk")
    trainer.send_weights(Blocks(own, rank, world, of=turned, meet=meet))
    if rank == 0:
        assert same(tx.DeltaTransport(folder).receive_weights(60), own)
        assert Chain(LocalStore(folder)).numbers() == [2]
        assert Chain(LocalStore(folder)).version(2).full is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FullWriter, "write", full_disk)
        fails(source, "No space left")
    trainer.send_weights(source)
    if rank == 0:
        assert same(tx.DeltaTransport(folder).receive_weights(60), own)


@on_ranks(2)
def test_a_call_that_fails_on_some_ranks_before_it_sends_fails_once_and_for_all_ranks(rank, world, folder):
    for wrong in ((0,), (1,), (0, 1)):
        own, trainer = weights(), tx.DeltaTransport(f"{folder}/{wrong}", by_shard=True, timeout_s=100)
        source = Blocks(own, rank, world)  # a gather has a deadline of its own
        with pytest.raises(ConfigError, match="a int holds no weights" if rank in wrong else "^trainer rank"):
            trainer.send_weights("policy", 3 if rank in wrong else source)
        writes_two(trainer, source, own)


def writes_two(trainer, source, own):
    dist.barrier()
    for version in (1, 2):
        trainer.send_weights(source)
        step(own, version)
    if trainer.ranks.drives:
        assert Chain(LocalStore(trainer.root)).newest() >= 2


@on_ranks(2)
def test_a_rank_that_sends_nothing_fails_one_call_of_rank_0(rank, world, folder):
    own, trainer = weights(), tx.DeltaTransport(folder, by_shard=True, timeout_s=2)
    source = Blocks(own, rank, world)
    if rank == 0:
        with pytest.raises(DeadlineError, match="did not answer within 2 s"):
            trainer.send_weights(source)
    writes_two(trainer, source, own)


@on_ranks(2)
def test_a_rank_that_does_not_drive_is_named(rank, world, folder):
    trainer, source = tx.DeltaTransport(folder, by_shard=True), Blocks(weights(), rank, world, meet=meet)
    assert trainer.ranks  # whose name every rank counts
    if rank == 1:
        with pytest.raises(TransportError, match="this trainer rank leads no update"):
            trainer.prepare(Update(source=source, version=1), Deadline(20))


@on_ranks(4)
def test_fsdp2_and_hsdp_trainers_write_each_element_once(rank, world, folder):
    for shape, names in (((world,), ("shard",)), ((2, world // 2), ("replicate", "shard"))):
        torch.manual_seed(0)
        layers = [nn.Linear(30, 50), nn.LayerNorm(50), nn.Linear(50, 30), nn.Linear(30, 50), nn.Linear(50, 30, False)]
        model = nn.Sequential(*layers).bfloat16()
        model.register_buffer("count", torch.tensor(3))
        mesh, root = init_device_mesh("cpu", shape, mesh_dim_names=names), f"{folder}/{len(shape)}"
        for layer in (model[0], model[2], model[3], model):
            fully_shard(layer, mesh=mesh)
        transport = tx.DeltaTransport(root, by_shard=True, keyframe_every=3)
        served = {name: torch.zeros_like(tensor) for name, tensor in as_source(model)}
        sender = tx.WeightSender(transport, InProcessEngine(served) if rank == 0 else None, rank=rank, finite=False)
        sender.register_model(model)
        for version in range(1, 6):
            report = sender.update_weights()
            expected = dict(as_source(model))
            if rank == 0:
                assert report.verified and same(served, expected)
                assert same(tx.DeltaTransport(root).receive_weights(60), expected)
                if version > 1:
                    assert len(report.rank_bytes) == world, report
                    assert sum(report.rank_bytes) == sum(delta_at(root, version).files.values())
            with torch.no_grad():
                for parameter in model.parameters():
                    local = parameter.to_local()
                    local[torch.rand(local.shape, generator=torch.Generator().manual_seed(version)) < 0.2] *= 1.5
        require_held_once(transport, expected)
        sender.shutdown()


def stopped(rank, world, port, root, point):
    """A rank of two that write three versions; rank 1 stops at a point of the third one, and says so."""

    def stop(*_):
        if rank == 1:
            print("now", flush=True)
            sys.stdin.read()

    join(rank, world, port)
    own, write = weights(), LocalStore.add
    source = Blocks(own, rank, world, meet=meet)
    every = 2 if point == "in a keyframe" else 0
    trainer = tx.DeltaTransport(root, by_shard=True, keyframe_every=every, timeout_s=3)
    for version in (1, 2):
        trainer.send_weights(source)
        step(own, version)
    if point == "while it codes" and rank == 1:
        source._take = stop
    elif point == "when it wrote":
        LocalStore.add = lambda *args: (write(*args), stop())
    elif point == "in a keyframe":
        source._meet = lambda name: (stop() if name == "pairs" else None, meet(name))
    with pytest.raises((WeightSyncError, RuntimeError)) as met:
        trainer.send_weights(source)
    print(met.value, flush=True)


@pytest.mark.parametrize("point", ["while it codes", "when it wrote", "in a keyframe"])
def test_a_rank_that_is_killed_leaves_the_chain_as_it_was(tmp_path, point):
    port, own = free_port(), weights()
    step(own, 1)
    programs = [calling(stopped, rank, 2, port, str(tmp_path), point) for rank in range(2)]
    with running_python(programs[0]) as first, running_python(programs[1]) as second:
        assert second.stdout.readline() == "now\n"
        second.send_signal(signal.SIGKILL)
        said = first.stdout.readline()
        first.wait(WAIT_S)
    assert "trainer rank 1 did not answer" in said or "onnection" in said, said
    assert sorted(path.name for path in tmp_path.glob("*weight_v*")) == ["weight_v000001", "weight_v000002"]
    reader = trainer_at(tmp_path)
    assert same(reader.receive_weights(WAIT_S), own)
    step(own, 2)
    trainer_at(tmp_path, by_shard=True).send_weights("policy", cut(own))
    assert same(reader.receive_weights(WAIT_S), own)
    assert same(trainer_at(tmp_path).receive_weights(WAIT_S), own)
