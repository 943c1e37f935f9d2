"""The delta transport: what it publishes, who can read it, and from which base."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import torchrl_ext as tx
from tests.data.sharded import shard_ranks
from tests.data.sharded.shard_ranks import cut
from tests.data.transports.chains import checkpoint, folder, same, step, trainer_at, weights
from torchrl_ext.base.errors import ConfigError, IntegrityError, StoreError, UpdateError
from torchrl_ext.control.engine import EngineUpdate
from torchrl_ext.data.landing.loader import TensorsLoader
from torchrl_ext.data.weights.source import MappingSource
from torchrl_ext.sync.local.inprocess import InProcessEngine
from torchrl_ext.testing import WAIT_S

LAYOUTS = [(name, False) for name in ("auto", "deltas", "indices")]
LAYOUTS += [(name, True) for name in ("auto", "bitmap", "context", "deltas_zstd", "ulp")]
"""Encodings, and whether the rank holds its tensors in several blocks."""


class Failing(MappingSource):
    """Breaks at its second tensor, however it is read."""

    def __iter__(self):
        yield next(super().__iter__())
        self._fail()

    def shards(self):
        return (replace(shard, take=self._fail) for shard in super().shards())

    def _fail(self):
        raise ValueError("gathering failed")


def copied(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def zeros(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def gone(*_):
    raise StoreError("the mount is gone")


class Chains(RuleBasedStateMachine):
    """A root, an engine and a reader that follow, and readers that come late: all get what was sent, bit for bit."""

    @initialize(layout=st.sampled_from(LAYOUTS), keyframe_every=st.sampled_from([0, 2, 3]), based=st.booleans())
    def begins(self, layout, keyframe_every, based):
        self.folder = tempfile.TemporaryDirectory()
        self.root, self.own = Path(self.folder.name) / "root", shard_ranks.weights()
        self.base = {}
        if based:  # which the engine and all readers hold
            del self.own["complex"]
            self.base = {"base": checkpoint(Path(self.folder.name) / "base", self.own)}
        self.served = copied(self.own) if based else zeros(self.own)
        self.how = {"encoding": layout[0], "keyframe_every": keyframe_every, "keep_files": True}
        self.in_blocks = layout[1]
        self.engine, self.follower = InProcessEngine(self.served), trainer_at(self.root, **self.base)
        self.version = self.seen = self.steps = 0
        self.starts()

    def starts(self):
        transport = trainer_at(self.root, **self.how, **self.base)
        self.sender, self.builds = tx.WeightSender(transport, self.engine, finite=False), False

    def source(self, share):
        self.steps += 1
        if share:
            shard_ranks.step(self.own, self.steps, share=share)
        return cut(self.own) if self.in_blocks else self.own

    def sends(self, source, only=None):
        report = self.sender.update_weights(source, only=only)
        assert report.verified and report.version > self.version
        assert report.part == (self.builds and only is not None)
        self.version, self.builds = report.version, True
        if not report.part:
            self.sent = {}
        self.sent |= copied({name: self.own[name] for name in (only if report.part else self.own)})
        assert same(self.served, self.sent)
        assert same(trainer_at(self.root, **self.base).receive_weights(WAIT_S), self.sent)  # which comes late
        if self.base and self.steps == report.version == 1:  # a delta on the checkpoint
            assert not list(self.root.rglob("model*.safetensors")) and report.bytes < report.model_bytes

    @rule(share=st.sampled_from([0.0, 0.02, 0.5]))
    def sends_everything(self, share):
        self.sends(self.source(share))

    @rule(only=st.sampled_from([["rows"], ["columns", "pairs", "scalar"]]))
    def sends_a_part(self, only):
        self.sends(self.source(0.05), only)

    @rule()
    def fails(self):
        before = sorted(self.root.rglob("weight_v*/*"))
        with pytest.raises((ValueError, tx.WeightSyncError), match="gathering failed"):
            self.sender.update_weights(Failing(self.own))
        assert sorted(self.root.rglob("weight_v*/*")) == before
        self.builds = False

    @rule()
    def is_started_again(self):
        self.sender.shutdown()
        self.in_blocks = not self.in_blocks
        self.starts()

    @rule()
    def follows(self):
        received = self.follower.receive_weights(0.0)
        assert (received is None) == (self.seen == self.version)
        assert received is None or same(received, self.sent)
        self.seen = self.version

    def teardown(self):
        if hasattr(self, "sender"):
            self.sender.shutdown()
            self.folder.cleanup()


TestChains = Chains.TestCase
TestChains.settings = settings(max_examples=12, stateful_step_count=12)


def test_a_model_with_other_parameters_begins_anew(root):
    trainer, reader = trainer_at(root), trainer_at(root)
    for sent in (weights(), {"x": torch.randn(5)}):
        trainer.send_weights("policy", sent)
        assert same(reader.receive_weights(WAIT_S), sent)


def test_who_holds_another_base_reads_the_named_one_or_is_refused(tmp_path, root):
    own, other = weights(), weights()
    other["b.weight"][7] = 1.5
    base, served, into = checkpoint(tmp_path / "base", own), copied(other), copied(other)
    sender = tx.WeightSender(trainer_at(root, base=base), InProcessEngine(served), finite=False)
    step(own, 1)
    assert sender.update_weights(own).verified and same(served, own)
    with pytest.raises(IntegrityError, match=r"'b.weight' of the base"):
        trainer_at(root, base=checkpoint(tmp_path / "other", other)).receive_weights(WAIT_S, weights=into)
    assert same(into, other)
    with pytest.raises(IntegrityError, match="weight_v000000"):
        trainer_at(root).receive_weights(WAIT_S)


def test_base_checkpoint_of_another_model_is_refused_at_start(tmp_path, root):
    base = checkpoint(tmp_path / "base", {"a.weight": torch.zeros(3)})
    with pytest.raises(ConfigError, match=r"a.weight"):
        trainer_at(root, base=base).send_weights("policy", weights())
    assert not [path for path in root.iterdir() if path.name != "latest"]


class TestFleet:
    def test_engine_that_missed_versions_catches_up_by_changes(self, root, monkeypatch):
        loads, load = [], TensorsLoader.load
        monkeypatch.setattr(TensorsLoader, "load", lambda self, pairs: loads.append(self) or load(self, pairs))
        own, trainer = weights(), trainer_at(root, keyframe_every=0, keep_files=True)
        loaders = [TensorsLoader(zeros(own)) for _ in range(2)]
        senders = [tx.WeightSender(trainer, InProcessEngine(tx.WeightReceiver(one)), finite=False) for one in loaders]
        for version, number in enumerate((0, 1, 0, 0, 0, 1)):
            step(own, version)
            assert senders[number].update_weights(own).verified
            assert same(loaders[number].targets(), own)
        assert loads == loaders

    def test_an_engine_that_fails_acknowledges_nothing(self, root, monkeypatch):
        own, served = weights(), zeros(weights())
        sender = tx.WeightSender(trainer_at(root, keyframe_every=2), InProcessEngine(served), finite=False)
        sender.update_weights(own)
        with monkeypatch.context() as patch:
            patch.setattr(EngineUpdate, "stage", gone)
            for version in (2, 3):
                step(own, version)
                with pytest.raises(UpdateError, match="the mount is gone"):
                    sender.update_weights(own)
        assert folder(root, 1).exists()  # collected only by an acknowledgement
        assert sender.update_weights(own).verified
        assert same(served, own)
        assert not folder(root, 1).exists()
