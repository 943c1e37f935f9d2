"""An update may bring some tensors alone: which these are, when everything is sent all the same, and who refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchrl_ext as tx
from tests.models import tiny_model
from tests.processes import WAIT_S
from tests.sync.by_hand import limited
from tests.sync.ends import before, change, made
from torchrl_ext.base.errors import EngineUnreachableError, ManifestError, UpdateError
from torchrl_ext.base.types import Part
from torchrl_ext.control.fleet import Fleet
from torchrl_ext.data.landing.loader import TensorsLoader, WeightLoader
from torchrl_ext.data.update_source import named
from torchrl_ext.data.weights.derived import MappedSource, as_source
from torchrl_ext.data.weights.source import ModuleSource, WeightSource
from torchrl_ext.sync.local.inprocess import InProcessEngine, Layered

B = ["b.weight", "b.bias"]


class Counted(ModuleSource):
    """Counts the tensors that are made."""

    made = 0

    def take(self, name, tensor):
        self.made += 1
        return super().take(name, tensor)


def policy():
    return nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(2, 2), "bb": nn.Linear(2, 1)})


class TestWhichTensors:
    def test_they_are_said_by_name(self):
        assert named(["b.weight", "a.bias"], as_source(policy())) == {"a.bias", "b.weight"}
        assert named("b.weight", as_source(policy())) == {"b.weight"}
        tied = tiny_model(0, tie_word_embeddings=True)
        assert named("lm_head.weight", as_source(tied)) == {"model.embed_tokens.weight"}, "the tensor that is sent"

    @pytest.mark.parametrize(
        ("only", "words"),
        [(["a.bias", "b.wieght"], r"'b\.wieght'(.|\n)*'b\.weight'"), ("b", "'b'"), ([], "names no tensor")],
    )
    def test_names_that_are_not_sent_and_no_name_at_all_are_refused(self, only, words):
        with pytest.raises(ManifestError, match=words):
            named(only, as_source(policy()))


class TestSourceOfAPart:
    @pytest.mark.parametrize(
        ("above", "taken"),
        [
            (lambda source: MappedSource(source, rename=lambda name: f"m.{name}"), {"m.a.weight": 6, "m.b.bias": 2}),
            (lambda source: Layered(source, {"b.bias": torch.ones(2)}), {"b.bias": 2, "bb.bias": 1}),
        ],
    )
    def test_tensors_that_are_left_out_are_not_made(self, above, taken):
        source = Counted(policy())
        part = limited(above(source), Part(base=1, names=frozenset(taken)))
        assert {name: tensor.numel() for name, tensor in part} == taken
        assert [meta.name for meta in part.params()] == list(taken)
        assert source.made == (2 if "m.b.bias" in taken else 1)

    def test_shards_that_come_from_one_stream_keep_their_tensors(self):
        module = policy()

        class Streamed(WeightSource):
            def params(self):
                return ModuleSource(module).params()

            def __iter__(self):
                return iter(ModuleSource(module))

        listed = list(limited(Streamed(), Part(base=1, names=frozenset(["a.bias", "bb.weight"]))).shards())
        assert [shard.meta.name for shard in listed] == ["a.bias", "bb.weight"]
        assert torch.equal(listed[0].take(), module["a"].bias) and torch.equal(listed[1].take(), module["bb"].weight)


class Plain(TensorsLoader):
    """Takes whole updates only."""

    part = WeightLoader.part


class Packed(TensorsLoader):
    """Takes no part without ``b.bias``."""

    def part(self, names):
        if names is not None and "b.bias" not in names:
            raise ManifestError("the engine rebuilds layers and lacks 'b.bias'")
        super().part(names)


class Restarting(InProcessEngine):
    """An engine that may be started anew, as a process is: with its first weights, and nobody has joined it."""

    pauses = 0

    def restart(self, target):
        InProcessEngine.__init__(self, target)

    def update(self, version, manner):
        return counted(super().update(version, manner), self)


def counted(update, engine):
    """The same update; its beginning counts as a pause of the engine."""
    begin = update.begin

    def beginning():
        engine.pauses += 1
        begin()

    update.begin = beginning
    return update


def without_parts(engine, receiver):
    receiver._loader = Plain(receiver.target)  # as if it had been that one from the start


def packed(engine, receiver):
    receiver._loader = Packed(receiver.target)


def stale(engine, receiver):
    receiver.invalidate()


def replaced(engine, receiver):
    other = tx.WeightSender(tx.MemoryTransport(), InProcessEngine(receiver))
    assert other.update_weights(policy()).verified


def restarted(engine, receiver):
    with torch.no_grad():
        for parameter in receiver.target.parameters():
            parameter.zero_()
    engine.restart(tx.WeightReceiver(receiver.target))


class TestOptimistic:
    """A part is sent as if it could land; where it cannot, everything is sent, once, with one warning."""

    @pytest.mark.parametrize("name", ["memory", "delta", "collective"])
    @pytest.mark.parametrize("happens", [without_parts, packed, stale, replaced, restarted])
    def test_everything_arrives_in_the_same_call_and_the_same_pause(self, name, happens, tmp_path, caplog):
        trained, served = policy(), policy()
        receiver = tx.WeightReceiver(served)
        engine = Restarting(receiver)
        sender = tx.WeightSender(made(name, tmp_path / "root", timeout_s=WAIT_S), engine)
        sender.register_model(trained)
        assert not sender.update_weights(only=B).part, "nothing was sent before"
        change(trained)
        assert sender.update_weights(only=B).part
        happens(engine, receiver)
        caplog.clear()
        before, engine.pauses = served["a"].weight.detach().clone(), 0
        change(trained)
        report = sender.update_weights(only="b.weight")
        assert (report.verified, report.engines[0].state, report.version) == (True, "serving", sender.version)
        by_itself = name == "delta" and happens in (without_parts, packed, stale)  # it brings a reader what that lacks
        assert report.part == by_itself and engine.pauses == 1
        assert torch.equal(served["b"].weight, trained["b"].weight)
        assert torch.equal(served["a"].weight, before if by_itself else trained["a"].weight)
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) == (0 if report.part else 1), warnings
        change(trained)
        report = sender.update_weights(only="b.weight")
        assert report.part == (happens not in (without_parts, packed) or name == "delta")
        assert len([record for record in caplog.records if record.levelname == "WARNING"]) == len(warnings)
        assert happens is without_parts or sender.update_weights(only=B).part
        sender.shutdown()


def test_lost_engine_does_not_keep_other_engines_from_parts():
    def gone(*_):
        raise EngineUnreachableError("engine-1 is gone")

    trained, served = policy(), [policy(), policy()]
    one, other = (InProcessEngine(module, url=f"engine-{n}") for n, module in enumerate(served))
    sender = tx.WeightSender(tx.MemoryTransport(), Fleet([one, other]))
    sender.register_model(trained)
    sender.update_weights()
    other.info = gone
    before(other, "stage", gone)
    with pytest.raises(UpdateError, match="engine-1 is gone"):
        sender.update_weights()
    assert not sender.update_weights(only=B).part, "after a failure everything is sent"
    change(trained)
    report = sender.update_weights(only=B)
    assert report.part and [row.state for row in report.engines] == ["serving", "unreachable"]
    del other.info
    assert not sender.update_weights(only=B).part
    assert all(torch.equal(module["a"].weight, trained["a"].weight) for module in served)
