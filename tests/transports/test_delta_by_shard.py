"""Deltas by shard: each rank of a trainer writes what it holds, and a worker reads what it needs."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import zstandard

from tests.processes import finished, running_python
from tests.transports.chains import checkpoint, flip, folder, same, trainer_at
from tests.transports.chains import step as plain_step
from tests.transports.chains import weights as plain_weights
from tests.transports.members import free_port
from tests.transports.shard_ranks import Blocks, blocks, chunk, step, weights
from torchrl_ext.cli.main import main
from torchrl_ext.errors import ConfigError, IntegrityError, ManifestError
from torchrl_ext.kernels.base import Piece
from torchrl_ext.landing.loader import WeightLoader
from torchrl_ext.landing.patcher import Patcher
from torchrl_ext.messages import Join, Load
from torchrl_ext.stores import LocalStore
from torchrl_ext.stores.chain import Chain
from torchrl_ext.sync.receiver import WeightReceiver
from torchrl_ext.testing import WAIT_S
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.digests import PositionDigest
from torchrl_ext.weights.shards.blocks import Block

ENCODINGS = ["auto", "ulp", "dense", "context"]
PARTS = 4


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


def in_parts(name, shape, rank, world):
    """All that four ranks hold, on the only rank that there is."""
    found = [block for part in range(PARTS) for block in blocks(name, shape, part, PARTS)]
    return [Block.whole(shape)] if name in ("gathered", "overlap", "scalar", "replica") else list(dict.fromkeys(found))


def cut(tensors):
    return Blocks(tensors, of=in_parts)


def published(root, count, **settings):
    trainer, own, history = trainer_at(root, by_shard=True, **settings), weights(), {}
    for version in range(1, count + 1):
        trainer.send_weights("policy", cut(own))
        history[version] = {name: tensor.clone() for name, tensor in own.items()}
        step(own, version)
    return trainer, own, history


class TestOneRank:
    @pytest.mark.parametrize("encoding", ENCODINGS)
    def test_every_encoding_follows_and_joins(self, root, encoding):
        trainer, own = trainer_at(root, by_shard=True, encoding=encoding, keyframe_every=3, keep_files=True), weights()
        follower = trainer_at(root)
        for version in range(1, 8):
            trainer.send_weights("policy", cut(own))
            if version not in (3, 5):  # and catches up with several at once
                assert same(follower.receive_weights(WAIT_S), own)
            assert same(trainer_at(root).receive_weights(WAIT_S), own)
            step(own, version, share=0.4 if version == 4 else 0.02)
        delta = Chain(LocalStore(root)).version(6).delta
        assert delta.container == "shards"
        assert len({row.meta.name: row for row in delta.params}["corner"].parts) == 2 * PARTS

    def test_a_chain_that_was_written_whole_goes_on_by_shard_and_back(self, root):
        own, reader = weights(), trainer_at(root)
        for version in range(1, 7):
            with_parts = version in (3, 4)
            if version in (1, 3, 5):
                trainer = trainer_at(root, by_shard=with_parts, keyframe_every=0, keep_files=True)
            trainer.send_weights("policy", cut(own))
            assert same(reader.receive_weights(WAIT_S), own)
            step(own, version)
            if version % 2 == 0:
                trainer.shutdown()
        containers = [Chain(LocalStore(root)).version(version).delta.container for version in (2, 4, 6)]
        assert containers == ["packed", "shards", "packed"]

    def test_both_kinds_of_version_say_the_same_of_the_tensors(self, tmp_path):
        documents, digests = [], []
        for by_shard in (False, True):
            root, own = tmp_path / str(by_shard), plain_weights()
            trainer = trainer_at(root, by_shard=by_shard, keyframe_every=0)
            trainer.send_weights("policy", own)
            plain_step(own, 1)
            trainer.send_weights("policy", own)
            documents.append(json.loads(zstandard.decompress((folder(root, 2) / "manifest.json").read_bytes())))
            digests.append([row.digest for row in Chain(LocalStore(root)).version(2).delta.params])
        plain, parted = documents
        assert digests[0] == digests[1]
        assert (plain["format_number"], parted["format_number"]) == (2, 3)
        assert [len(row) for row in plain["params"]] == [9, 9, 4]
        assert [len(row) for row in parted["params"]] == [5, 5, 4]

    def test_tools_read_it(self, root, tmp_path, capsys):
        _, _, history = published(root, 5, keyframe_every=3, keep_files=True)
        assert main(["chain", "verify", str(root), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["damaged"] == []
        assert main(["chain", "show", str(root), "5", "--json"]) == 0
        shown = {row["name"]: row for row in json.loads(capsys.readouterr().out)["tensors"]}
        assert shown["corner"]["file"] == "rank00000-00001.bin" and shown["corner"]["encoding"] == "ulp"
        assert shown["still"]["changed"] == 0
        assert main(["chain", "materialize", str(root), "5", str(tmp_path / "out"), "--json"]) == 0
        assert same(dict(CheckpointSource(str(tmp_path / "out"))), history[5])

    def test_a_part_that_is_damaged_is_refused_and_named(self, root):
        published(root, 2, keyframe_every=0)
        delta = Chain(LocalStore(root)).version(2).delta
        part = next(row for row in delta.params if row.meta.name == "columns").parts[2]
        reader = trainer_at(root)
        flip(folder(root, 2) / part.file, part.offset + part.nbytes // 2)
        with pytest.raises(IntegrityError, match=r"'columns' in .*rank00000-00001.bin is damaged"):
            reader.receive_weights(WAIT_S)
        (folder(root, 2) / part.file).write_bytes(b"")
        with pytest.raises(
            IntegrityError, match=r"rank00000-00001.bin has 0 bytes, so that tensor '\w+' cannot be read"
        ):
            reader.receive_weights(WAIT_S)
        (folder(root, 2) / part.file).unlink()
        with pytest.raises(IntegrityError, match=r"rank00000-00001.bin is missing, which holds tensor"):
            reader.receive_weights(WAIT_S)

    def test_a_failed_publication_leaves_nothing_and_the_next_is_a_keyframe(self, root, monkeypatch):
        trainer, own, _ = published(root, 2, keyframe_every=0)
        with monkeypatch.context() as broken, pytest.raises(RuntimeError, match="lost"):
            broken.setattr(Blocks, "_take", lambda self, name, block: (_ for _ in ()).throw(RuntimeError("lost")))
            trainer.send_weights("policy", cut(own))
        assert sorted(path.name for path in root.glob("weight_v*")) == ["weight_v000001", "weight_v000002"]
        assert not [path for path in root.iterdir() if ".tmp-" in path.name]
        trainer.send_weights("policy", cut(own))
        assert Chain(LocalStore(root)).version(3).full is not None
        assert same(trainer_at(root).receive_weights(WAIT_S), own)

    def test_shards_that_are_not_what_the_source_yields_are_refused(self, root):
        class Lying(Blocks):
            def _take(self, name, block):
                return super()._take(name, block) + (name == "columns")

        trainer = trainer_at(root, by_shard=True)
        with pytest.raises(ManifestError, match="'columns' of the source is not what"):
            trainer.send_weights("policy", Lying(weights(), of=in_parts))
        assert not list(root.glob("weight_v*"))

    def test_elements_that_nobody_holds_are_named(self, root):
        def holed(name, shape, rank, world):
            return [Block((0, 0), (40, 20))] if name == "columns" else in_parts(name, shape, rank, world)

        with pytest.raises(ManifestError, match=r"no trainer rank holds elements \[0, 20\] to \[40, 50\] of 'columns'"):
            trainer_at(root, by_shard=True).send_weights("policy", Blocks(weights(), of=holed))

    def test_the_first_version_may_be_a_delta_on_a_checkpoint(self, root, tmp_path):
        own = weights()
        base = checkpoint(tmp_path / "base", own)
        step(own, 1)
        trainer = trainer_at(root, by_shard=True, base=base)
        trainer.send_weights("policy", cut(own))
        version = Chain(LocalStore(root)).version(1)
        assert version.full is None and version.delta.base_version == 0
        assert same(trainer_at(root, base=base).receive_weights(WAIT_S), own)

    def test_through_an_object_store(self):
        url, own = f"memory://by-shard-{torch.randint(1 << 60, ()).item()}", weights()
        trainer, reader = trainer_at(url, by_shard=True, keyframe_every=3), trainer_at(url)
        for version in range(1, 5):
            trainer.send_weights("policy", cut(own))
            assert same(reader.receive_weights(WAIT_S), own)
            step(own, version)

    @pytest.mark.parametrize("settings", [{"encoding": "xor"}, {"encoding": "deltas"}, {"carrier": "collective"}])
    def test_what_has_no_parts_is_refused(self, root, settings):
        with pytest.raises(ConfigError, match="by_shard with"):
            trainer_at(None if "carrier" in settings else root, by_shard=True, **settings)


class Half(WeightLoader):
    """A worker that holds a part of every tensor that has more than one dimension, and the others in whole."""

    def __init__(self, number, count=2):
        self.number, self.count, self.pieces, self.live = number, count, {}, {}
        self.coverage = {}

    def check(self, params):
        for meta in params:
            block = Block.whole(meta.shape)
            if len(meta.shape) > 1 and meta.numel:
                block = chunk(meta.shape, int(meta.name in ("columns", "complex")), self.number, self.count)
            self.live[meta.name], self.pieces[meta.name] = torch.zeros(block.shape, dtype=meta.dtype), block

    def _patcher(self, params):
        found = {}
        for meta in params:
            live, shape, start = self.live[meta.name], meta.shape, self.pieces[meta.name].start
            strides = torch.empty(shape, device="meta").stride()
            offset = sum(a * b for a, b in zip(start, strides, strict=True))
            found[meta.name] = [Piece(destination=live, offset=offset, strides=strides)]
        return Patcher(found)

    def slices(self):
        return {name: (block,) if block.numel else () for name, block in self.pieces.items()}

    def patchable(self, name):
        return name != "uneven"  # which this worker wants whole

    def position_digests(self):
        return {}

    def load(self, pairs):
        params = []
        for name, tensor in pairs:
            params.append(ParamMeta.of(name, tensor))
            self.live[name].copy_(tensor[self.pieces[name].within(Block.whole(tensor.shape))])
        self.patcher = self._patcher(meta for meta in params if meta.name != "uneven")

    def stage(self, changes):
        self.coverage = self.patcher.stage(changes)
        self.whole_ones = dict(changes.whole(["uneven"]))
        self.expected = changes.digests

    def commit(self):
        self.patcher.commit()
        for name, tensor in self.whole_ones.items():
            self.live[name].copy_(tensor[self.pieces[name].within(Block.whole(tensor.shape))])


class TestSlices:
    def test_a_worker_reads_the_parts_that_meet_its_slices_and_lands_them(self, root, monkeypatch):
        monkeypatch.setattr(LocalStore, "gap_bytes", 0)
        trainer, own = trainer_at(root, by_shard=True, keyframe_every=0), weights()
        params = cut(own).params()
        workers = [WeightReceiver(Half(number), rank=number) for number in range(2)]
        offer = trainer.open(2, params)
        for worker in workers:
            worker.connect(
                Join(
                    transport="delta",
                    params=params,
                    rank_offset=0,
                    world_size=2,
                    compares=False,
                    offer=dict(offer.info),
                )
            )
        offer.transfer()
        for version in range(1, 6):
            handoff = trainer.prepare(cut(own), version)
            handoff.ahead()
            for worker in workers:
                worker.prefetch(version)
                worker.start()
                worker.load(Load(version=version, handoff=dict(handoff.info)))
                worker.seal()
                worker.finish(version)
            handoff.transfer()
            handoff.acknowledge(version)
            trainer.dismiss(cut(own))
            for worker in workers:
                for name, live in worker.target.live.items():
                    part = own[name][worker.target.pieces[name].within(Block.whole(own[name].shape))]
                    assert torch.equal(live.view(-1).view(torch.uint8), part.contiguous().view(-1).view(torch.uint8)), (
                        name
                    )
            step(own, version, share=0.1)
        delta = Chain(LocalStore(root)).version(5).delta
        for name, (digest, _) in workers[0].target.coverage.items():  # parts of all workers add up
            if len(own[name].shape) > 1 and own[name].numel():
                digest = digest + workers[1].target.coverage[name][0]
            assert digest.hex() == workers[0].target.expected[name]
        assert PositionDigest().hex() == workers[0].target.expected["nothing"]
        for worker in workers:
            assert 0 < worker._transport.stats.worker_bytes[0] < 0.75 * sum(delta.files.values())


PRELUDE = """
import hashlib, sys, time, torch, torch.distributed as dist, torchrl_ext as tx
from tests.transports.chains import same
from tests.transports.shard_ranks import Blocks, blocks, enter, step, weights
from torchrl_ext.stores import Chain, LocalStore
from torchrl_ext.sync.engines.inprocess import InProcessEngine
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
        assert len(trainer.stats.rank_bytes) == world and sum(trainer.stats.rank_bytes) == sum(delta.files.values())
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

LONG = """
from torchrl_ext.transports.ranks import TrainerRanks
ranks, text = TrainerRanks("test", 30), "x" * (9 << 20)  # more than one value of the store takes
store, before = dist.distributed_c10d._get_default_store(), None
for turn in range(5):
    if rank == 0:
        assert [answer["text"] for answer in ranks.ask("echo", text=text)] == [text] * (world - 1)
        ranks.dismiss()
    else:
        ranks.serve({"echo": lambda order: {"text": order["text"]}})
    dist.barrier()
    keys = store.num_keys()
    dist.barrier()
    assert turn < 2 or keys <= before + 8, (keys, before)  # what was read is gone
    before = keys if turn < 2 else before
"""


def on_ranks(world, code, *args):
    """Run code on every rank; what each printed."""
    port = free_port()
    with ThreadPoolExecutor(world) as pool:
        calls = [pool.submit(finished, PRELUDE + code, rank, world, port, *args) for rank in range(world)]
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

    def test_orders_of_any_length_pass_and_what_was_read_is_gone(self, root):
        on_ranks(2, LONG, root)


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
        assert "trainer rank 1 said nothing" in said or "onnection" in said, said
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
