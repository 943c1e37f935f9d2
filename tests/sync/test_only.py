"""An update may bring some tensors alone: which these are, when everything is sent all the same, and who refuses."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from torch import nn

import torchrl_ext as tx
from tests.models import tiny_model
from tests.processes import WAIT_S
from tests.sync.by_hand import invitation, limited, prepared
from torchrl_ext.errors import ConfigError, EngineUnreachableError, IntegrityError, ManifestError, UpdateError
from torchrl_ext.landing.loader import TensorsLoader, WeightLoader
from torchrl_ext.messages import Finish, Prefetch, Start
from torchrl_ext.rpc.pool import Pool
from torchrl_ext.sync.engines.inprocess import InProcessEngine, Layered
from torchrl_ext.sync.only import chosen, trainable
from torchrl_ext.types import Part
from torchrl_ext.weights.derived import MappedSource
from torchrl_ext.weights.shards.blocks import Block, Shard
from torchrl_ext.weights.source import ModuleSource, WeightSource, as_source


class Counted(ModuleSource):
    """Counts the tensors that are made."""

    made = 0

    def rows(self):
        def noted(row):
            def take():
                self.made += 1
                return row.take()

            return row._replace(take=take)

        return [noted(row) for row in super().rows()]


def policy():
    return nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(2, 2), "bb": nn.Linear(2, 1)})


NAMES = ["a.weight", "a.bias", "b.weight", "b.bias", "bb.weight", "bb.bias"]


class TestWhichTensors:
    @pytest.mark.parametrize(
        ("only", "meant"),
        [
            ("b", ["b.weight", "b.bias"]),
            ("b.weight", ["b.weight"]),
            ("*.bias", ["a.bias", "b.bias", "bb.bias"]),
            ("b[b].*", ["bb.weight", "bb.bias"]),
            (re.compile(r"b+\.weight"), ["b.weight", "bb.weight"]),
            (lambda name: name.startswith("a"), ["a.weight", "a.bias"]),
            ({"a.bias": True, "b.bias": False}, ["a.bias"]),
            (["a.bias", "bb"], ["a.bias", "bb.weight", "bb.bias"]),
            (frozenset(["a.bias"]), ["a.bias"]),
        ],
    )
    def test_they_are_said_by_name_module_pattern_function_or_mask(self, only, meant):
        assert [name for name in NAMES if name in chosen(only, as_source(policy()))] == meant

    @pytest.mark.parametrize("only", ["b.wieght", {"b.wieght": True}, ["a", "b.wieght"]])
    def test_a_name_that_is_not_sent_is_refused_with_the_closest_one(self, only):
        with pytest.raises(ManifestError, match=r"'b\.wieght'(.|\n)*'b\.weight'"):
            chosen(only, as_source(policy()))

    @pytest.mark.parametrize("only", ["*.nothing", lambda name: False, []])
    def test_to_mean_nothing_is_refused(self, only):
        with pytest.raises(ManifestError, match="none of the 6 tensors"):
            chosen(only, as_source(policy()))

    @pytest.mark.parametrize("one", ["*.wieght", re.compile("nobody"), lambda name: False, {"a.bias": False}, []])
    def test_one_of_several_that_means_nothing_is_refused_and_not_passed_over(self, one):
        with pytest.raises(ManifestError, match="none of the 6 tensors"):
            chosen(["a.bias", one], as_source(policy()))

    def test_what_says_nothing_about_names_is_refused(self):
        with pytest.raises(ConfigError, match="only=7 says nothing about names"):
            chosen(7, as_source(policy()))

    def test_a_tied_name_means_the_tensor_that_is_sent(self):
        model = tiny_model(0, tie_word_embeddings=True)
        assert chosen("lm_head.weight", as_source(model)) == {"model.embed_tokens.weight"}

    def test_trainable_tensors_go_by_the_names_of_the_checkpoint(self):
        module = policy()
        module["a"].requires_grad_(False)
        assert trainable(module) == {"b.weight", "b.bias", "bb.weight", "bb.bias"}
        with pytest.raises(ConfigError, match="needs a module"):
            chosen("trainable", as_source({"x": torch.zeros(1)}))


class TestSourceOfAPart:
    def test_tensors_that_are_left_out_are_not_made(self):
        source = Counted(policy())
        part = limited(
            MappedSource(source, rename=lambda name: f"m.{name}", dtype=torch.float64),
            Part(base=1, names=frozenset(["m.b.bias", "m.a.weight"])),
        )
        assert [name for name, _ in part] == [meta.name for meta in part.params()] == ["m.a.weight", "m.b.bias"]
        assert source.made == 2 and all(tensor.dtype == torch.float64 for _, tensor in part)

    def test_layers_above_are_taken_without_those_below(self):
        below = Counted(policy())
        layered = Layered(below, {"b.bias": torch.ones(2)})
        part = limited(layered, Part(base=1, names=frozenset(["b.bias", "bb.bias"])))
        assert [(name, tensor.numel()) for name, tensor in part] == [("b.bias", 2), ("bb.bias", 1)]
        assert below.made == 1

    def test_shards_that_come_from_one_stream_keep_their_tensors(self):
        class Streamed(WeightSource):
            def params(self):
                return ModuleSource(self.module).params()

            def __iter__(self):
                return iter(ModuleSource(self.module))

        source = Streamed()
        source.module = policy()
        part = limited(source, Part(base=1, names=frozenset(["a.bias", "bb.weight"])))
        listed = list(part.shards())
        assert [shard.meta.name for shard in listed] == ["a.bias", "bb.weight"]
        assert torch.equal(listed[0].take(), source.module["a"].bias)
        assert torch.equal(listed[1].take(), source.module["bb"].weight)

    def test_shards_that_gather_nothing_are_passed_over(self):
        taken = []

        class Held(WeightSource):
            def params(self):
                return ModuleSource(policy()).params()

            def __iter__(self):
                raise AssertionError("no pass is needed")

            def shards(self):
                for meta in self.params():
                    yield Shard(meta, Block.whole(meta.shape), lambda name=meta.name: taken.append(name))

        for shard in limited(Held(), Part(base=1, names=frozenset(["b.bias"]))).shards():
            shard.take()
        assert taken == ["b.bias"]


class Plain(TensorsLoader):
    """Takes whole updates only."""

    part = WeightLoader.part


class Restarting(InProcessEngine):
    """An engine that may be started anew, as a process is: with its first weights, and nobody has joined it."""

    def restart(self, target):
        InProcessEngine.__init__(self, target)


def without_parts(engine, receiver, folder):
    receiver._loader = Plain(receiver.target)  # as if it had been that one from the start


def stale(engine, receiver, folder):
    receiver.invalidate()


def replaced(engine, receiver, folder):
    other = tx.WeightSender(tx.MemoryTransport(), tx.make_engine("inprocess", engine=receiver))
    assert other.update_weights(policy()).verified


def restarted(engine, receiver, folder):
    with torch.no_grad():
        for parameter in receiver.target.parameters():
            parameter.zero_()
    engine.restart(tx.WeightReceiver(receiver.target))


def trimmed(engine, receiver, folder):
    for version in folder.glob("weight_v*"):
        shutil.rmtree(version)


class TestOptimistic:
    """A part is sent as if it could land; where it cannot, everything is sent, once, with one warning."""

    @pytest.mark.parametrize("name", ["memory", "disk", "delta", "collective"])
    @pytest.mark.parametrize("happens", [without_parts, stale, replaced, restarted, trimmed])
    def test_everything_arrives_in_the_same_call(self, name, happens, tmp_path, caplog):
        settings = {"root": tmp_path / "root"} if name in ("disk", "delta") else {}
        if happens is trimmed and name != "disk":
            pytest.skip("versions in a root are a disk transport's")
        trained, served = policy(), policy()
        receiver = tx.WeightReceiver(served)
        engine = Restarting(receiver)
        sender = tx.WeightSender(tx.make_transport(name, timeout_s=WAIT_S, **settings), engine)
        sender.register_model(trained)
        assert not sender.update_weights(only="b").part, "nothing was sent before"
        change(trained)
        assert sender.update_weights(only="b").part
        happens(engine, receiver, tmp_path / "root")
        caplog.clear()
        before = served["a"].weight.detach().clone()
        change(trained)
        report = sender.update_weights(only="b")
        assert (report.verified, report.engines[0].state, report.version) == (True, "serving", sender.version)
        by_itself = name == "delta" and happens in (without_parts, stale)  # it brings a reader whatever that lacks
        assert report.part == by_itself
        assert torch.equal(served["b"].weight, trained["b"].weight)
        assert torch.equal(served["a"].weight, before if by_itself else trained["a"].weight)
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) == (0 if report.part else 1), warnings
        change(trained)
        report = sender.update_weights(only="b")
        assert report.part == (happens is not without_parts or name == "delta")
        assert len([record for record in caplog.records if record.levelname == "WARNING"]) == len(warnings)
        sender.shutdown()


def change(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)


class TestSender:
    @pytest.fixture
    def made(self):
        trained, served = policy(), policy()
        sender = tx.WeightSender(tx.MemoryTransport(), tx.make_engine("inprocess", engine=served))
        sender.register_model(trained)
        return sender, trained, served

    def test_what_changed_outside_of_the_part_does_not_arrive_before_a_whole_update(self, made):
        sender, trained, served = made
        sender.update_weights()
        change(trained)
        report = sender.update_weights(only="b")
        assert report.part and report.tensors == 2 and report.bytes == sum(p.nbytes for p in trained["b"].parameters())
        assert torch.equal(served["b"].weight, trained["b"].weight)
        assert torch.equal(served["a"].weight + 1, trained["a"].weight)
        assert not sender.update_weights().part
        assert torch.equal(served["a"].weight, trained["a"].weight)

    def test_the_part_is_given_under_the_names_that_are_sent(self, made):
        _, trained, _ = made
        served = nn.ModuleDict({"x": policy()})
        sender = tx.WeightSender(
            tx.MemoryTransport(), tx.make_engine("inprocess", engine=served), mapper={r"(.*)": r"x.\1"}
        )
        sender.register_model(trained)
        trained["a"].requires_grad_(False)
        sender.update_weights()
        assert sender.update_weights(only="x.b").tensors == 2
        assert sender.update_weights(only="trainable").tensors == 4

    def test_a_part_that_an_engine_refuses_is_sent_whole_at_once_and_before_it_pauses(self, made, caplog):
        class Packed(TensorsLoader):
            pauses = 0

            def part(self, names):
                if names is not None and "b.bias" not in names:
                    raise ManifestError("the engine builds layers anew, and lacks 'b.bias'")
                super().part(names)

            def start(self):
                Packed.pauses += 1

        _, trained, served = made
        sender = tx.WeightSender(tx.MemoryTransport(), InProcessEngine(tx.WeightReceiver(Packed(served))))
        sender.register_model(trained)
        sender.update_weights()
        change(trained)
        report = sender.update_weights(only="b.weight")
        assert (report.part, report.tensors, report.engines[0].state) == (False, 6, "serving")
        assert Packed.pauses == 2 and "lacks 'b.bias'" in caplog.text
        assert torch.equal(served["a"].weight, trained["a"].weight)
        assert sender.update_weights(only="b").part

    def test_what_fails_in_the_pause_is_not_tried_again(self, made):
        class Failing(TensorsLoader):
            loads = 0

            def load(self, pairs):
                Failing.loads += 1
                if Failing.loads == 2:
                    raise ManifestError("nobody knows why")
                super().load(pairs)

        _, trained, served = made
        sender = tx.WeightSender(tx.MemoryTransport(), InProcessEngine(tx.WeightReceiver(Failing(served))))
        sender.register_model(trained)
        sender.update_weights()
        with pytest.raises(UpdateError, match="nobody knows why"):
            sender.update_weights(only="b")
        assert Failing.loads == 2 and sender.engine.rows()[0].state == "paused"
        assert not sender.update_weights(only="b").part
        assert sender.update_weights(only="b").part

    def test_a_new_engine_gets_everything_and_is_sent_what_another_one_did_not_take(self, made):
        _, trained, served = made
        sender = tx.WeightSender(tx.MemoryTransport(), InProcessEngine(tx.WeightReceiver(Plain(served))))
        sender.register_model(trained)
        for _ in range(2):
            assert not sender.update_weights(only="b").part
        sender.init_all_workers_group(vllm_engine=tx.make_engine("inprocess", engine=(other := policy())))
        assert not sender.update_weights(only="b").part
        assert torch.equal(other["a"].weight, trained["a"].weight)
        assert sender.update_weights(only="b").part

    def test_an_engine_that_is_lost_and_was_told_of_does_not_keep_the_others_from_parts(self, made):
        class Losing(InProcessEngine):
            lost = False

            def info(self):
                self.answers()
                return super().info()

            def prefetch(self, version, part=None):
                self.answers()
                super().prefetch(version, part)

            def answers(self):
                if self.lost:
                    raise EngineUnreachableError(f"{self.url} is gone")

        _, trained, _ = made
        served = [policy(), policy()]
        one, other = (Losing(module, url=f"engine-{n}") for n, module in enumerate(served))
        sender = tx.WeightSender(tx.MemoryTransport(), Pool([one, other]))
        sender.register_model(trained)
        sender.update_weights()
        other.lost = True
        with pytest.raises(UpdateError, match="engine-1 is gone"):
            sender.update_weights()
        assert not sender.update_weights(only="b").part, "after a failure everything is sent"
        change(trained)
        report = sender.update_weights(only="b")
        assert report.part and [row.state for row in report.engines] == ["serving", "unreachable"]
        other.lost = False
        assert not sender.update_weights(only="b").part
        for module in served:
            assert torch.equal(module["a"].weight, trained["a"].weight)


def test_a_receiver_says_why_it_takes_no_part():
    source, transport, receiver = as_source(policy()), tx.MemoryTransport(), tx.WeightReceiver(policy())
    receiver.handle(invitation(transport, source))

    def part(base):
        return Part(base=base, names=frozenset(["a.bias"]))

    def send(version, of=source):
        for message in (Start(), prepared(transport, of, version), Finish(version=version)):
            receiver.handle(message)

    def refused(version, base, words):
        with pytest.raises(IntegrityError, match=words):
            receiver.handle(Prefetch(version=version, part=part(base)))

    send(1)
    refused(3, 2, "beside those of version 2, and this one holds version 1")
    with pytest.raises(IntegrityError, match="comes as some tensors of a model, which was not announced"):
        send(2, limited(source, part(1)))
    refused(3, 1, "parts of several versions")
    send(3)
    receiver.handle(Prefetch(version=4, part=part(3)))
    with pytest.raises(IntegrityError, match="comes as all tensors of a model"):
        send(4)
    receiver.invalidate(empty=True)
    refused(5, 4, "holds no weights")
