from __future__ import annotations

import pytest
import torch
from torch import nn
from torchrl.weight_update.weight_sync_schemes import WeightStrategy

import torchrl_ext as tx
from tests.models import tiny_model, tiny_tokenizer
from tests.rl.collectors.collecting import same
from tests.sync.by_hand import invitation, prepared
from torchrl_ext.base.errors import EngineRefusedError, ManifestError, NotConnectedError, UpdateError
from torchrl_ext.base.messages import Finish, Join, Prefetch, Seal, Start, State
from torchrl_ext.data.landing.loader import TensorsLoader, WeightLoader
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.data.weights.digests import position_digest
from torchrl_ext.sync.local.inprocess import InProcessEngine
from torchrl_ext.sync.receiver import WeightsState
from torchrl_ext.testing import same_bits


@pytest.mark.parametrize("name", ["delta", "disk", "memory"])
def test_alone_a_loader_is_told_when_a_load_begins_and_ends(name, tmp_path):
    class Told(TensorsLoader):
        def __init__(self, target):
            super().__init__(target)
            self.calls = []

        def start(self):
            self.calls.append("start")

        def load(self, pairs):
            self.calls.append("load")
            super().load(pairs)

        def finish(self):
            self.calls.append("finish")

    settings = {"channel": str(tmp_path)} if name == "memory" else {"root": tmp_path}
    trainer, transport = tx.make_transport(name, **settings), tx.make_transport(name, **settings)
    policy, loader = nn.Linear(3, 2), Told(nn.Linear(3, 2))
    receiver = tx.WeightReceiver(loader, transport)
    for _ in range(2):
        with torch.no_grad():
            policy.weight.add_(1)
        trainer.send_weights(policy)
        assert receiver.poll_and_apply(5.0)
    trainer.send_weights(policy)
    assert transport.receive_weights(5.0, model=loader) is not None
    assert loader.calls == 3 * ["start", "load", "finish"]
    trainer.shutdown()
    transport.shutdown()


def test_torchrl_llm_wrapper_stands_for_its_model_on_both_ends(tmp_path):
    from torchrl.modules.llm import TransformersWrapper

    def wrapped(seed):
        model = tiny_model(seed)
        return model, TransformersWrapper(model, tokenizer=tiny_tokenizer(), input_mode="text", generate=False)

    (policy, sent), (held, held_wrapped), (other, other_wrapped) = wrapped(1), wrapped(2), wrapped(3)
    assert as_source(sent).params() == as_source(policy).params()
    trainer, reader = tx.DiskTransport(tmp_path), tx.DiskTransport(tmp_path)
    trainer.send_weights("policy", sent)
    receiver = tx.WeightReceiver(transport=reader)
    receiver.register_model(held_wrapped)
    assert receiver.poll_and_apply(5.0)
    assert same(held.state_dict(), policy.state_dict())
    sender = tx.WeightSender(tx.MemoryTransport(), InProcessEngine(tx.WeightReceiver(other_wrapped)))
    assert sender.update_weights(sent).verified
    assert same(other.state_dict(), policy.state_dict())
    sender.shutdown()
    with torch.no_grad():
        next(policy.parameters()).add_(1)
    trainer.send_weights(sent)
    strategy = WeightStrategy(extract_as="state_dict")
    assert reader.receive_weights(5.0, model=other_wrapped, strategy=strategy) is not None
    assert same(other.state_dict(), policy.state_dict())
    trainer.shutdown()
    reader.shutdown()


def driven(receiver, policy):
    sender = tx.WeightSender(tx.MemoryTransport(), InProcessEngine(receiver))
    sender.register_model(policy)
    sender.update_weights()
    with torch.no_grad():
        policy.weight.add_(1)
        policy.bias.add_(1)
    return sender


def test_no_part_lands_beside_weights_that_were_applied_directly():
    policy, held = nn.Linear(3, 2), nn.Linear(3, 2)
    receiver = tx.WeightReceiver(held)
    sender = driven(receiver, policy)
    receiver.apply_weights((other := nn.Linear(3, 2)).state_dict())
    assert same_bits(other.weight.detach(), held.weight.detach())
    assert not sender.update_weights(only="bias").part
    assert same_bits(policy.weight.detach(), held.weight.detach())
    with pytest.raises(ManifestError):
        receiver.apply_weights(nn.Linear(2, 2).state_dict())
    assert sender.update_weights(only="bias").part, "what was refused changed nothing"


def test_newly_registered_model_gets_a_full_version_after_join():
    """A model registered later gets all of the weights once the trainer has joined for it."""
    policy, other = nn.Linear(3, 2), nn.Linear(3, 2)
    receiver = tx.WeightReceiver()
    with pytest.raises(NotConnectedError, match=r"register_model"):
        receiver.connect(Join(transport="disk", params=(), offer={}))
    receiver.register_model(nn.Linear(3, 2))
    sender = driven(receiver, policy)
    receiver.register_model(other)
    with pytest.raises(UpdateError, match="has not joined a transport"):
        sender.update_weights(only="bias")
    assert not sender.update_weights(only="bias").part
    assert same_bits(policy.weight.detach(), other.weight.detach())
    receiver.register_model(narrow := nn.Linear(2, 2))
    for what in ("has not joined a transport", "weight"):
        with pytest.raises(UpdateError, match=what):
            sender.update_weights()
    assert narrow.weight.shape == (2, 2)


class Whole(WeightLoader):
    """Takes whole tensors, and nothing else."""

    def __init__(self, live):
        self.live = live

    def check(self, params):
        assert {meta.name for meta in params} == self.live.keys()

    def load(self, pairs):
        for name, tensor in pairs:
            self.live[name].copy_(tensor)

    def digests(self):
        return {name: position_digest(tensor).hex() for name, tensor in self.live.items()}


def test_whole_tensor_loader_needs_no_other_load_methods(tmp_path):
    """A loader that takes whole tensors needs no methods for blocks or changes."""
    loader, policy = Whole({"weight": torch.zeros(20, 30)}), {"weight": torch.zeros(20, 30)}
    for transport in (tx.DeltaTransport(tmp_path), tx.MemoryTransport()):
        sender = tx.WeightSender(transport, InProcessEngine(tx.WeightReceiver(loader)))
        for _ in range(3):
            policy["weight"][0, 0] += 1
            assert sender.update_weights(policy).proof == "sent"
            assert same_bits(loader.live["weight"], policy["weight"])
        sender.shutdown()


def test_weights_that_are_lost_as_staging_ends_are_not_built_on(tmp_path):
    policy, held, transport, looks = nn.Linear(3, 2), nn.Linear(3, 2), tx.DeltaTransport(tmp_path), []

    class Staging(TensorsLoader):
        def stage(self, changes):
            super().stage(changes)
            looks[:] = "before", "now"

    class Lost(WeightsState):
        """By what the engine's thread does right after the last look."""

        def __getattribute__(self, name):
            found = super().__getattribute__(name)
            if name == "intact" and looks and looks.pop() == "before":
                held.weight.data.zero_()
                receiver.invalidate()
            return found

    receiver = tx.WeightReceiver(Staging(held))
    receiver.handle(invitation(transport, policy))
    for version in (1, 2):
        with torch.no_grad():
            policy.weight[0, 0] += 1
        load = prepared(transport, policy, version)
        for message in (Prefetch(version=version), Start(), load, Finish(version=version)):
            receiver.handle(message)
        assert torch.equal(held.weight, policy.weight)
        receiver.held = Lost(base=version, intact=True)
    assert not looks
    transport.shutdown()


class TestFinish:
    """The end of a version is taken where all of its loads have landed."""

    def refused(self, receiver, message, held):
        with pytest.raises(EngineRefusedError) as refused:
            receiver.handle(message)
        assert {name: float(tensor[0]) for name, tensor in receiver.target.items()} == held
        return str(refused.value)

    @pytest.mark.parametrize("name", ["disk", "delta"])
    def test_a_version_that_did_not_land_is_not_held(self, name, tmp_path):
        held, transport = {"a": torch.zeros(4), "b": torch.zeros(4)}, tx.make_transport(name, root=tmp_path)
        receiver = tx.WeightReceiver(held)
        receiver.handle(invitation(transport, held))
        loads = []
        for version in (1, 2):
            weights = {one: torch.full((4,), float(version)) for one in held}
            loads.append(prepared(transport, weights, version))
            receiver.handle(Prefetch(version=version))
            receiver.handle(Start())
            before = {one: version - 1.0 for one in held}
            assert "its previous weights" in self.refused(receiver, Finish(version=version), before)
            receiver.handle(Start())
            receiver.handle(loads[-1])
            landed = {one: float(version) for one in held}
            self.refused(receiver, Finish(version=version, loads=2), landed)
            self.refused(receiver, Finish(version=version + 1), landed)
            assert receiver.held.base != version
            assert receiver.handle(Finish(version=version))["version"] == receiver.held.base == version
        assert receiver.handle(State())["whole"] is True


def test_memory_that_a_load_took_is_freed_once_at_its_end(tmp_path, monkeypatch):
    freed, held, transport = [], {"a": torch.zeros(4)}, tx.make_transport("delta", root=tmp_path)
    monkeypatch.setattr("torchrl_ext.sync.receiver.free_cached", lambda: freed.append(float(held["a"][0])))
    receiver = tx.WeightReceiver(held)
    receiver.handle(invitation(transport, held))
    for version in (1, 2):  # a load of all, and changes
        load = prepared(transport, {"a": torch.full((4,), float(version))}, version)
        for message in (Prefetch(version=version), Start(), load, Seal()):
            receiver.handle(message)
            assert freed == [1.0][: version - 1]
        receiver.handle(Finish(version=version))
        assert freed == [1.0]


class Losing(TensorsLoader):
    """Takes every tensor that arrives, and leaves one of the model as it was."""

    def targets(self):
        return {}

    def load(self, pairs):
        super().load((name, tensor) for name, tensor in pairs if name != "b")


@pytest.mark.parametrize("transport", ["delta", "disk"])
def test_a_full_version_is_read_back_from_the_model(transport, tmp_path):
    held = {"a": torch.zeros(4), "b": torch.zeros(4)}
    engine = tx.make_engine("inprocess", engine=tx.WeightReceiver(Losing(held)))
    sender = tx.WeightSender(tx.make_transport(transport, root=tmp_path), engine)
    with sender, pytest.raises(UpdateError, match="parameter 'b' of the model differs"):
        sender.update_weights({"a": torch.ones(4), "b": torch.ones(4)})
    assert float(held["a"][0]) == 1.0 and engine.rows()[0].state == "paused"


@pytest.mark.parametrize("transport", ["delta", "disk", "memory"])
def test_model_on_the_meta_device_is_refused_before_any_send(transport, tmp_path):
    root = {} if transport == "memory" else {"root": tmp_path}
    engine = tx.make_engine("inprocess", engine=nn.Linear(3, 2, device="meta"))
    with tx.WeightSender(tx.make_transport(transport, **root), engine) as sender:
        with pytest.raises(UpdateError) as refused:
            sender.update_weights(nn.Linear(3, 2))
        assert isinstance(refused.value.__cause__, ManifestError) and "meta device" in str(refused.value)
        assert engine.rows()[0].state == "serving"
