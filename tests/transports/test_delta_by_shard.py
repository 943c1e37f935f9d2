"""Deltas by shard: each rank of a trainer writes what it holds, and a worker reads what it needs."""

from __future__ import annotations

import json

import pytest
import torch

from tests.transports.chains import same, trainer_at
from tests.transports.shard_ranks import Blocks, chunk, cut, in_parts, step, weights
from torchrl_ext.cli.main import main
from torchrl_ext.codecs import streams
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.kernels.base import Piece
from torchrl_ext.landing.loader import Patchable, Sliceable, WeightLoader
from torchrl_ext.landing.patcher import Patcher
from torchrl_ext.messages import Join, Load, Prefetch
from torchrl_ext.stores import LocalStore
from torchrl_ext.stores.chain import Chain
from torchrl_ext.sync.receiver import WeightReceiver
from torchrl_ext.testing import WAIT_S
from torchrl_ext.transports.base import Update
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.digests import PositionDigest
from torchrl_ext.weights.shards.blocks import Block


class TestOneRank:
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
        deltas = [Chain(LocalStore(root)).version(version).delta for version in (2, 4, 6)]
        assert [delta.table.tiles for delta in deltas] == [1, 0, 1]

    def test_tools_read_it(self, root, tmp_path, capsys):
        trainer, own = trainer_at(root, by_shard=True, keyframe_every=3, keep_files=True), weights()
        for version in range(1, 6):
            trainer.send_weights("policy", cut(own))
            sent = {name: tensor.clone() for name, tensor in own.items()}
            step(own, version)
        assert main(["chain", "verify", str(root), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["damaged"] == []
        assert main(["chain", "show", str(root), "5", "--json"]) == 0
        shown = {row["name"]: row for row in json.loads(capsys.readouterr().out)["tensors"]}
        assert shown["corner"]["file"] == "rank00000-00001.bin" and shown["corner"]["encoding"] == "ulp"
        assert shown["still"]["changed"] == 0
        assert main(["chain", "materialize", str(root), "5", str(tmp_path / "out"), "--json"]) == 0
        assert same(dict(CheckpointSource(str(tmp_path / "out"))), sent)

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

        with pytest.raises(ManifestError, match=r"no trainer rank holds elements \[0:40, 20:50\] of 'columns'"):
            trainer_at(root, by_shard=True).send_weights("policy", Blocks(weights(), of=holed))

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


class Half(WeightLoader, Patchable, Sliceable):
    """A worker that holds a part of every tensor that has more than one dimension, and the others in whole."""

    def __init__(self, number, count=2):
        self.number, self.count, self.pieces, self.live = number, count, {}, {}
        self.staged = {}

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

    def by_slices(self, wanted):
        pass

    def whole(self):
        return {}

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
        self.staged = self.patcher.stage(changes)
        self.whole_ones = dict(changes.whole(["uneven"]))
        self.expected = changes.digests

    def commit(self):
        self.patcher.commit()
        for name, tensor in self.whole_ones.items():
            self.live[name].copy_(tensor[self.pieces[name].within(Block.whole(tensor.shape))])


class TestSlices:
    @pytest.mark.parametrize("share", [0.1, 0.9])
    def test_a_worker_reads_the_parts_that_meet_its_slices_and_lands_them(self, root, monkeypatch, share):
        monkeypatch.setattr(LocalStore, "gap_bytes", 0)
        trainer, own = trainer_at(root, by_shard=True, keyframe_every=0), weights()
        params = cut(own).params()
        workers = [WeightReceiver(Half(number), rank=number) for number in range(2)]
        opening = trainer.open(2, params, Deadline(WAIT_S))
        for worker in workers:
            worker.connect(Join(transport="delta", params=params, compares=False, offer=dict(opening.info)))
        opening.transfer(Deadline(WAIT_S))
        monkeypatch.setattr(streams, "BLOCK_UNITS", 32)
        for version in range(1, 6):
            handoff = trainer.prepare(Update(source=cut(own), version=version), Deadline(WAIT_S))
            handoff.ahead(Deadline(WAIT_S))
            for worker in workers:
                worker.prefetch(Prefetch(version=version))
                worker.start()
                worker.load(Load(version=version, handoff=dict(handoff.info)))
                worker.seal()
                worker.finish(version)
            handoff.transfer(Deadline(WAIT_S))
            handoff.served(version)
            for worker in workers:
                for name, live in worker.target.live.items():
                    part = own[name][worker.target.pieces[name].within(Block.whole(own[name].shape))]
                    assert torch.equal(live.view(-1).view(torch.uint8), part.contiguous().view(-1).view(torch.uint8)), (
                        name
                    )
            step(own, version, share=share)
        delta = Chain(LocalStore(root)).version(5).delta
        for name, digest in workers[0].target.staged.items():  # parts of all workers add up
            if len(own[name].shape) > 1 and own[name].numel():
                digest = digest + workers[1].target.staged[name]
            assert digest.hex() == workers[0].target.expected[name]
        assert PositionDigest().hex() == workers[0].target.expected["nothing"]
        for worker in workers:
            assert 0 < worker._end._reader.read_bytes < 0.75 * sum(delta.files.values())
