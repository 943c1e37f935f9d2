"""Deltas by shard on real ranks, each in a process of its own: together, at odds with each other, and killed."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.processes import WAIT_S, finished, running_python
from tests.transports.chains import same, trainer_at
from tests.transports.shard_ranks import cut, step, weights
from torchrl_ext.launch.processes import free_port


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


PRELUDE = """
import hashlib, sys, time, torch, torch.distributed as dist, torchrl_ext as tx
from tests.transports.chains import same
from tests.transports.shard_ranks import Blocks, blocks, enter, step, weights
from torchrl_ext.deadline import Deadline
from torchrl_ext.stores import Chain, LocalStore
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.transports.base import Update
from torchrl_ext.versions.shards.own import OwnBlocks
rank, world, port, root = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
meet = enter(rank, world, port)
own = weights()
source = Blocks(own, rank, world, meet=meet)
def failed(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing failed")
"""

CHAIN = """
for encoding in ("auto", "context", "dense"):
    own.update(weights())
    there = f"{root}/{encoding}"
    trainer = tx.DeltaTransport(there, by_shard=True, encoding=encoding, keyframe_every=3, keep_files=True)
    follower = tx.DeltaTransport(there)
    for version in range(1, 6):
        trainer.send_weights(source)
        if rank == 0:
            if version != 2:
                assert same(follower.receive_weights(60), own), version
            assert same(tx.DeltaTransport(there).receive_weights(60), own), version
        step(own, version)
    held = trainer._by_shard.own.nbytes
    if rank == 0:
        delta = Chain(LocalStore(there)).version(5).delta
        written = trainer._by_shard.rank_bytes
        assert len(written) == world and sum(written) == sum(delta.files.values())
        assert sorted(delta.files) == [f"rank{one:05d}-00001.bin" for one in range(world)], delta.files
        versions = map(Chain(LocalStore(there)).version, range(1, 6))
        kinds = [(version.full is None, version.delta is None) for version in versions]
        assert kinds == [(False, True), (True, False), (True, False), (False, False), (True, False)], kinds
    every = [None] * world
    dist.all_gather_object(every, held)
    model = sum(tensor.nbytes for tensor in own.values())
    assert sum(every) == model, (every, model)  # each element once
    assert max(every) < 1.1 * model / world, (every, model)
"""

SENDER = """
served = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
transport = tx.DeltaTransport(root, by_shard=True, keyframe_every=4)
sender = tx.WeightSender(transport, InProcessEngine(served) if rank == 0 else None, rank=rank)
for version in range(1, 7):
    report = sender.update_weights(source)
    assert report.version == version
    if rank == 0:
        assert report.verified and same(served, own)
        assert version in (1, ) or len(report.rank_bytes) == world
    step(own, version)
sender.shutdown()
"""

DISAGREE = """
trainer = tx.DeltaTransport(root, by_shard=True, timeout_s=20)
trainer.send_weights(source)
other = dict(own)
if rank == 1:
    other["columns"] = torch.zeros(40, 51)
said = failed(lambda: trainer.send_weights(Blocks(other, rank, world, meet=meet)))
assert "parameter 0 is columns float32[40, 51] on trainer rank 1, and columns float32[40, 50] on rank 0" in said, said
other = dict(own)
if rank == 1:
    del other["uneven"]
said = failed(lambda: trainer.send_weights(Blocks(other, rank, world, meet=meet)))
assert "parameter 11 is none on trainer rank 1, and uneven float32[5, 7] on rank 0" in said, said
def holed(name, shape, rank, world):
    return [] if name == "columns" and rank == 1 else blocks(name, shape, rank, world)
said = failed(lambda: trainer.send_weights(Blocks(own, rank, world, of=holed, meet=meet)))
assert "no trainer rank holds elements [0, 25] to [40, 50] of 'columns'" in said, said
class Failing(Blocks):  # while others wait in a gather
    def _take(self, name, block):
        if name == "columns" and self._rank == 1:
            raise RuntimeError("a broken disk")
        return super()._take(name, block)
step(own, 1)
said = failed(lambda: trainer.send_weights(Failing(own, rank, world, meet=meet)))
assert "a broken disk" in said, said
def here(name, shape, rank, world):  # other blocks than before
    return blocks(name, shape, world - 1 - rank, world)
trainer.send_weights(Blocks(own, rank, world, of=here, meet=meet))
if rank == 0:
    assert same(tx.DeltaTransport(root).receive_weights(60), own)
    assert Chain(LocalStore(root)).numbers() == [2]
    assert Chain(LocalStore(root)).version(2).full is not None
from torchrl_ext.versions.checkpoint_writer import FullWriter
write = FullWriter.write
def broken(self, draft, source, version, run_id):
    next(iter(source))
    raise OSError(28, "No space left on device")
FullWriter.write = broken
said = failed(lambda: trainer.send_weights(Blocks(own, rank, world, meet=meet)))
assert "No space left" in said, said
FullWriter.write = write
trainer.send_weights(Blocks(own, rank, world, meet=meet))
if rank == 0:
    assert same(tx.DeltaTransport(root).receive_weights(60), own)
"""

FAILED_ONCE = """
how = sys.argv[5]
from torchrl_ext.errors import WeightSyncError
trainer = tx.DeltaTransport(root, by_shard=True, timeout_s=2 if how == "rank 1 sends nothing" else 100)
source = Blocks(own, rank, world)  # a gather has a deadline of its own
wrong = {"on rank 1": [1], "on rank 0": [0], "on both": [0, 1]}.get(how, [])
if rank in wrong:
    said = failed(lambda: trainer.send_weights("policy", 3))
    assert "a int holds no weights" in said, said
elif not (rank == 1 and how == "rank 1 sends nothing"):
    said = failed(lambda: trainer.send_weights(source))
    other = "did not answer within 2 s" if how == "rank 1 sends nothing" else "ConfigError: trainer rank"
    assert other in said, said
dist.barrier()
for version in (1, 2):
    trainer.send_weights(source)
    step(own, version)
if rank == 0:
    assert Chain(LocalStore(root)).newest() >= 2
"""

RANK_OF_ITS_OWN = """
trainer = tx.DeltaTransport(root, by_shard=True)
if rank == 1:
    said = failed(lambda: trainer.prepare(Update(source=source, version=1), Deadline(20)))
    assert "this trainer rank leads no update" in said, said
"""

END = """
import os
dist.barrier()
sys.stdout.flush()
os._exit(0)  # gloo's threads may abort an interpreter that takes its time to end
"""


def on_ranks(world, code, *args):
    """Run code on every rank; what each printed."""
    port = free_port()
    with ThreadPoolExecutor(world) as pool:
        calls = [pool.submit(finished, PRELUDE + code + END, rank, world, port, *args) for rank in range(world)]
        done = [call.result(2 * WAIT_S) for call in calls]
    for rank, one in enumerate(done):
        assert one.returncode == 0, f"rank {rank}\n{one.stdout}\n{one.stderr[-4000:]}"
    return [one.stdout for one in done]


class TestRanks:
    @pytest.mark.parametrize("world", [2, 4])
    def test_ranks_write_a_chain_together_and_readers_end_equal(self, root, world):
        on_ranks(world, CHAIN, root)

    def test_a_sender_drives_them(self, root):
        on_ranks(2, SENDER, root)

    def test_what_differs_or_fails_is_said_on_every_rank_and_the_next_version_is_whole(self, root):
        on_ranks(2, DISAGREE, root)

    @pytest.mark.parametrize("how", ["on rank 1", "on rank 0", "on both", "rank 1 sends nothing"])
    def test_a_call_that_fails_before_it_sends_fails_once_and_for_all_ranks(self, root, how):
        on_ranks(2, FAILED_ONCE, root, how)

    def test_a_rank_that_does_not_drive_is_named(self, root):
        on_ranks(2, RANK_OF_ITS_OWN, root)


KILLED = """
point = sys.argv[5]
def stop(*_):
    if rank == 1:
        print("now", flush=True)
        sys.stdin.read()
trainer = tx.DeltaTransport(root, by_shard=True, keyframe_every=0, timeout_s=3)
trainer.send_weights(source)
step(own, 1)
trainer.send_weights(source)
step(own, 2)
if point == "while it codes":
    source._take = stop if rank == 1 else source._take
if point == "when it wrote":
    write = LocalStore.add
    LocalStore.add = lambda *args: (write(*args), stop())
if point == "in a keyframe":
    if rank == 0:
        trainer._writer._keyframe_every = 1
    source._meet = lambda name: (stop() if name == "pairs" else None, meet(name))
print(failed(lambda: trainer.send_weights(source)), flush=True)
"""


class TestKilled:
    @pytest.mark.parametrize("point", ["while it codes", "when it wrote", "in a keyframe"])
    def test_a_rank_that_dies_leaves_the_chain_as_it_was(self, root, point):
        port, own = free_port(), weights()
        step(own, 1)
        with (
            running_python(PRELUDE + KILLED, 0, 2, port, root, point) as first,
            running_python(PRELUDE + KILLED, 1, 2, port, root, point) as second,
        ):
            assert second.stdout.readline() == "now\n"
            second.send_signal(signal.SIGKILL)
            said = first.stdout.readline()
            first.wait(WAIT_S)
        assert "trainer rank 1 did not answer" in said or "onnection" in said, said
        assert sorted(path.name for path in root.glob("*weight_v*")) == ["weight_v000001", "weight_v000002"]
        reader = trainer_at(root)
        assert same(reader.receive_weights(WAIT_S), own)
        step(own, 2)
        trainer_at(root, by_shard=True).send_weights("policy", cut(own))
        assert same(reader.receive_weights(WAIT_S), own)
        assert same(trainer_at(root).receive_weights(WAIT_S), own)


FSDP = """
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchrl_ext.weights.source import as_source
for shape, names in (((world,), ("shard",)), ((2, world // 2), ("replicate", "shard"))):
    torch.manual_seed(0)
    layers = [nn.Linear(30, 50), nn.LayerNorm(50), nn.Linear(50, 30), nn.Linear(30, 50), nn.Linear(50, 30, bias=False)]
    model = nn.Sequential(*layers).bfloat16()
    model.register_buffer("count", torch.tensor(3))
    mesh, there = init_device_mesh("cpu", shape, mesh_dim_names=names), f"{root}/{len(shape)}"
    for layer in (model[0], model[2], model[3], model):
        fully_shard(layer, mesh=mesh)
    transport = tx.DeltaTransport(there, by_shard=True, keyframe_every=3)
    served = {name: torch.zeros_like(tensor) for name, tensor in as_source(model)}
    sender = tx.WeightSender(transport, InProcessEngine(served) if rank == 0 else None, rank=rank)
    sender.register_model(model)
    for version in range(1, 6):
        report = sender.update_weights()
        expected = dict(as_source(model))
        if rank == 0:
            assert report.verified and same(served, expected)
            assert same(tx.DeltaTransport(there).receive_weights(60), expected)
            assert version == 1 or len(report.rank_bytes) == world, report
        with torch.no_grad():
            for parameter in model.parameters():
                local = parameter.to_local()
                local[torch.rand(local.shape, generator=torch.Generator().manual_seed(version)) < 0.2] *= 1.5
    every = [None] * world
    dist.all_gather_object(every, transport.baseline_bytes)
    model_bytes = sum(tensor.nbytes for tensor in expected.values())
    assert sum(every) == model_bytes and max(every) < 1.25 * model_bytes / world, (every, model_bytes)
    sender.shutdown()
"""


def test_fsdp2_and_hsdp_trainers_write_each_element_once(root):
    on_ranks(4, FSDP, root)
