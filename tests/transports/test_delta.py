"""The delta transport: what it publishes, who can read it, and from which base."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

import torchrl_ext as tx
from tests.transports import shard_ranks
from tests.transports.chains import checkpoint, folder, published, same, step, trainer_at, weights
from tests.transports.shard_ranks import cut
from torchrl_ext.errors import ConfigError, IntegrityError, StoreError, UpdateError
from torchrl_ext.landing.loader import TensorsLoader
from torchrl_ext.stores import LocalStore
from torchrl_ext.stores.chain import Chain
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.testing import WAIT_S
from torchrl_ext.weights.source import MappingSource

ENCODINGS = list(tx.DeltaTransport.encodings())
IN_PARTS = ("auto", "ulp", "dense", "context")
LAYOUTS = [*((name, False, 3) for name in ENCODINGS), *((name, True, 3) for name in IN_PARTS)]
LAYOUTS += [("auto", False, 0), ("ulp", True, 0)]


class TestVersions:
    @pytest.mark.parametrize(("encoding", "by_shard", "keyframe_every"), LAYOUTS)
    def test_every_encoding_follows_joins_and_keeps_an_engine(self, root, encoding, by_shard, keyframe_every):
        own = shard_ranks.weights()
        served = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
        how = {"encoding": encoding, "by_shard": by_shard, "keyframe_every": keyframe_every, "keep_files": True}
        sender = tx.WeightSender(trainer_at(root, **how), InProcessEngine(served))
        follower = trainer_at(root)
        for version in range(1, 8):
            report = sender.update_weights(cut(own))
            assert report.verified and report.version == version
            assert version == 1 or report.density < 0.9
            assert same(served, own)
            if version not in (3, 5):  # and catches up with several at once
                assert same(follower.receive_weights(WAIT_S), own)
            assert same(trainer_at(root).receive_weights(WAIT_S), own)
            shard_ranks.step(own, version, share=0.4 if version == 4 else 0.02)
        delta = Chain(LocalStore(root)).version(7).delta
        if by_shard:
            assert len(delta.table.places[delta.table.number["corner"]]) == 2 * shard_ranks.PARTS
        else:
            assert delta.table.tiles == 1
        sender.shutdown()

    @pytest.mark.parametrize("encoding", ["auto", "context", "deltas", "xor"])  # one that reads all, and each container
    def test_a_part_is_a_delta_of_the_named_tensors_also_where_a_keyframe_is_due(self, root, encoding):
        own, served = weights(), {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
        sender = tx.WeightSender(trainer_at(root, encoding=encoding, keyframe_every=3), InProcessEngine(served))
        follower, expected = trainer_at(root), {}
        for version, only in enumerate((None, "a", "b.*", ["a.weight"], None, "b", "a"), 1):
            report = sender.update_weights(own, only=only)
            expected |= {
                name: tensor.clone() for name, tensor in own.items() if only in (None, name[0], f"{name[0]}.*", [name])
            }
            assert report.part == (only is not None) and report.verified
            assert same(served, expected) and same(follower.receive_weights(WAIT_S), expected)
            assert same(trainer_at(root).receive_weights(WAIT_S), expected)  # a late one finds a whole keyframe
            step(own, version)
        sender.shutdown()

    def test_a_version_without_changes_moves_next_to_nothing(self, root):
        trainer, reader, own = trainer_at(root, encoding="xor"), trainer_at(root), weights()
        for _ in range(2):
            trainer.send_weights("policy", own)
        assert same(reader.receive_weights(WAIT_S), own)
        assert reader.received_version == 2
        assert sorted(path.name for path in folder(root, 2).iterdir()) == [
            "manifest.json",
            "model.safetensors.index.json",
        ]

    def test_a_model_with_other_parameters_begins_anew(self, root):
        trainer, reader = trainer_at(root), trainer_at(root)
        trainer.send_weights("policy", weights())
        assert same(reader.receive_weights(WAIT_S), weights())
        other = {"x": torch.randn(5)}
        trainer.send_weights("policy", other)
        assert same(reader.receive_weights(WAIT_S), other)

    def test_a_second_trainer_on_the_root_goes_on_with_a_keyframe(self, root):
        trainer, own, _ = published(root, 3, keyframe_every=0)
        reader = trainer_at(root)
        reader.receive_weights(WAIT_S)
        trainer.shutdown()
        second = trainer_at(root)
        second.send_weights("policy", own)
        assert same(reader.receive_weights(WAIT_S), own)
        assert reader.received_version == 4
        assert Chain(LocalStore(root)).version(4).full is not None

    @pytest.mark.parametrize("by_shard", [False, True])
    def test_a_failed_publication_leaves_nothing_and_makes_the_next_one_a_keyframe(self, root, by_shard):
        class Failing(MappingSource):
            def __iter__(self):
                yield next(super().__iter__())
                self._fail()

            def shards(self):
                return (replace(shard, take=self._fail) for shard in super().shards())

            def _fail(self):
                raise ValueError("gathering failed")

        trainer, own, _ = published(root, 2, keyframe_every=0, by_shard=by_shard)
        before = sorted(path.name for path in root.rglob("*"))
        with pytest.raises(ValueError, match="gathering failed"):
            trainer.send_weights("policy", Failing(own))
        assert sorted(path.name for path in root.rglob("*")) == before
        reader = trainer_at(root)
        reader.receive_weights(WAIT_S)
        trainer.send_weights("policy", own)
        assert (folder(root, 3) / "model.safetensors").exists()
        assert same(reader.receive_weights(WAIT_S), own)

    def test_an_unknown_encoding_is_refused_with_those_there_are(self, root):
        with pytest.raises(ConfigError, match="deltas_zstd"):
            trainer_at(root, encoding="deltaz")

    def test_hooks_see_what_was_written_and_when_it_is_looked_for(self, root):
        CALLS.clear()
        trainer = trainer_at(root, post_write_hook=f"{__name__}:wrote")
        reader = trainer_at(root, pre_read_hook=f"{__name__}:reads")
        trainer.send_weights("policy", weights())
        reader.receive_weights(WAIT_S)
        assert [("wrote", str(root), "weight_v000001", b"1\n"), ("reads", str(root))] == CALLS

    def test_a_reader_that_waits_calls_its_hook_less_and_less_often(self, root, monkeypatch):
        CALLS.clear()
        reader, pauses = trainer_at(root, pre_read_hook=f"{__name__}:reads"), []

        def pause(stop, seconds):
            pauses.append(seconds)
            if len(pauses) == 12:
                reader.abort()
            return stop.is_set()

        monkeypatch.setattr(threading.Event, "wait", pause)
        assert reader.receive_weights(WAIT_S) is None
        assert pauses == sorted(pauses) and pauses[-1] > 10 * pauses[0]
        assert len(CALLS) == len(pauses)

    def test_a_hook_that_cannot_be_imported_is_told_whatever_its_module_raises(self, root, tmp_path, monkeypatch):
        (tmp_path / "hook_that_raises.py").write_text("raise RuntimeError('no licence')")
        monkeypatch.syspath_prepend(tmp_path)
        for path in ("nowhere:nothing", "", ":", ".relative:name", "json:", "hook_that_raises:name"):
            with pytest.raises(ConfigError, match="cannot be imported"):
                trainer_at(root, post_write_hook=path)

    @pytest.mark.parametrize("hook", ["post_write_hook", "pre_read_hook"])
    def test_hooks_are_refused_where_no_files_are_shared(self, hook):
        with pytest.raises(ConfigError, match="hooks are for files that both sides see"):
            tx.DeltaTransport(carrier="collective", world_size=2, **{hook: f"{__name__}:wrote"})


CALLS = []


def wrote(root, name):
    CALLS.append(("wrote", root, name, LocalStore(root).get("latest")))


def reads(root):
    CALLS.append(("reads", root))


class TestBase:
    @pytest.mark.parametrize("how", [{"encoding": "auto"}, {"encoding": "xor"}, {"by_shard": True}], ids=str)
    def test_the_first_version_is_a_delta_for_whoever_holds_the_checkpoint(self, tmp_path, root, how):
        own = weights()
        base = checkpoint(tmp_path / "base", own)
        served = {name: tensor.clone() for name, tensor in own.items()}
        sender = tx.WeightSender(trainer_at(root, base=base, **how), InProcessEngine(served))
        reader = trainer_at(root, base=base)
        for version in (1, 2, 3):
            step(own, version)
            report = sender.update_weights(own)
            assert report.bytes < report.model_bytes / 2
            assert same(served, own)
            assert same(reader.receive_weights(WAIT_S), own)
            assert same(trainer_at(root, base=base).receive_weights(WAIT_S), own)
        assert not list(root.rglob("model.safetensors"))
        sender.shutdown()

    def test_an_engine_with_other_weights_refuses_by_name_and_keeps_them(self, tmp_path, root):
        own = weights()
        base = checkpoint(tmp_path / "base", own)
        served = {name: tensor.clone() for name, tensor in own.items()}
        served["b.weight"][7] = 1.5
        before = {name: tensor.clone() for name, tensor in served.items()}
        sender = tx.WeightSender(trainer_at(root, base=base), InProcessEngine(served))
        step(own, 1)
        with pytest.raises(UpdateError, match=r"'b.weight' of the base") as refused:
            sender.update_weights(own)
        assert refused.value.rows[0].state == "serving"
        assert same(served, before)
        assert sender.update_weights(own).verified  # a keyframe now
        assert same(served, own)

    def test_a_reader_with_another_checkpoint_refuses_by_name(self, tmp_path, root):
        own, other = weights(), weights()
        other["b.weight"][7] = 1.5
        trainer = trainer_at(root, base=checkpoint(tmp_path / "base", own))
        step(own, 1)
        trainer.send_weights("policy", own)
        into = {name: tensor.clone() for name, tensor in other.items()}
        with pytest.raises(IntegrityError, match=r"'b.weight' of the base"):
            trainer_at(root, base=checkpoint(tmp_path / "other", other)).receive_weights(WAIT_S, weights=into)
        assert same(into, other)
        with pytest.raises(IntegrityError, match="weight_v000000"):
            trainer_at(root).receive_weights(WAIT_S)

    def test_a_checkpoint_of_another_model_is_refused_when_the_trainer_starts(self, tmp_path, root):
        base = checkpoint(tmp_path / "base", {"a.weight": torch.zeros(3)})
        with pytest.raises(ConfigError, match=r"a.weight"):
            trainer_at(root, base=base).send_weights("policy", weights())
        assert not [path for path in root.iterdir() if path.name != "latest"]

    def test_an_engine_that_connects_again_is_recognised_and_gets_a_delta(self, tmp_path, root):
        own = weights()
        base = checkpoint(tmp_path / "base", own)
        served = {name: tensor.clone() for name, tensor in own.items()}
        trainer = trainer_at(root, base=base)
        for version in (1, 2):
            step(own, version)
            tx.WeightSender(trainer, InProcessEngine(served)).update_weights(own)
            assert same(served, own)
        assert not list(root.rglob("model.safetensors"))


class TestFleet:
    def test_an_engine_that_missed_versions_catches_up_by_changes_alone(self, root):
        class Counted(TensorsLoader):
            loads = 0

            def load(self, pairs):
                self.loads += 1
                super().load(pairs)

        own, trainer = weights(), trainer_at(root, keyframe_every=0, keep_files=True)
        loaders = [Counted({name: torch.zeros_like(tensor) for name, tensor in own.items()}) for _ in range(2)]
        senders = [tx.WeightSender(trainer, InProcessEngine(tx.WeightReceiver(one))) for one in loaders]
        for version, number in enumerate((0, 1, 0, 0, 0, 1)):
            step(own, version)
            assert senders[number].update_weights(own).verified
            assert same(loaders[number].targets(), own)
        assert [one.loads for one in loaders] == [1, 1]

    def test_an_engine_that_fails_acknowledges_nothing(self, root):
        own, served = weights(), {k: torch.zeros_like(v) for k, v in weights().items()}

        class Refusing(InProcessEngine):
            fails = False

            def prefetch(self, version, part=None):
                if self.fails:
                    raise StoreError("the mount is gone")
                super().prefetch(version, part)

        engine = Refusing(served)
        sender = tx.WeightSender(trainer_at(root, keyframe_every=2), engine)
        sender.update_weights(own)
        engine.fails = True
        for version in (2, 3):
            step(own, version)
            with pytest.raises(UpdateError, match="the mount is gone"):
                sender.update_weights(own)
        assert folder(root, 1).exists()  # collected only by an acknowledgement
        engine.fails = False
        assert sender.update_weights(own).verified
        assert same(served, own)
        assert not folder(root, 1).exists()
