from __future__ import annotations

import pytest
import torch
from torch import nn
from torchrl.weight_update.weight_sync_schemes import WeightStrategy

import torchrl_ext as tx
from tests.models import tiny_model, tiny_tokenizer
from tests.sync.by_hand import invitation, prepared
from tests.sync.ends import change, same
from torchrl_ext.base.errors import ManifestError, NotConnectedError, StaleBaseError, UpdateError
from torchrl_ext.base.messages import Finish, Join, Prefetch, Start
from torchrl_ext.data.landing.loader import TensorsLoader, WeightLoader
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.data.weights.digests import position_digest
from torchrl_ext.sync.local.inprocess import InProcessEngine
from torchrl_ext.sync.receiver import WeightsState


def test_alone_a_loader_is_told_when_a_load_begins_and_ends(tmp_path):
    calls = []

    class Told(TensorsLoader):
        def start(self):
            calls.append("start")

        def load(self, pairs):
            calls.append("load")
            super().load(pairs)

        def finish(self):
            calls.append("finish")

    policy, loader = nn.Linear(3, 2), Told(nn.Linear(3, 2))
    with tx.DeltaTransport(tmp_path) as trainer, tx.DeltaTransport(tmp_path) as transport:
        receiver = tx.WeightReceiver(loader, transport)
        for _ in range(2):
            change(policy)
            trainer.send_weights(policy)
            assert receiver.poll_and_apply(5.0)
        trainer.send_weights(policy)
        assert transport.receive_weights(5.0, model=loader) is not None
    assert calls == 3 * ["start", "load", "finish"]


def test_torchrl_llm_wrapper_stands_for_its_model_on_both_ends(tmp_path):
    from torchrl.modules.llm import TransformersWrapper

    def wrapped(seed):
        model = tiny_model(seed)
        return model, TransformersWrapper(model, tokenizer=tiny_tokenizer(), input_mode="text", generate=False)

    (policy, sent), (held, held_wrapped) = wrapped(1), wrapped(2)
    assert as_source(sent).params() == as_source(policy).params()
    with tx.DiskTransport(tmp_path) as trainer, tx.DiskTransport(tmp_path) as reader:
        trainer.send_weights("policy", sent)
        receiver = tx.WeightReceiver(transport=reader)
        receiver.register_model(held_wrapped)
        assert receiver.poll_and_apply(5.0) and same(held, policy)
        change(policy)
        trainer.send_weights(sent)
        strategy = WeightStrategy(extract_as="state_dict")
        assert reader.receive_weights(5.0, model=held_wrapped, strategy=strategy) is not None
        assert same(held, policy)


def driven(receiver, policy):
    sender = tx.WeightSender(tx.MemoryTransport(), InProcessEngine(receiver))
    sender.register_model(policy)
    sender.update_weights()
    change(policy)
    return sender


def test_no_part_lands_beside_weights_that_were_applied_directly():
    policy, held, other = (nn.Linear(3, 2) for _ in range(3))
    receiver = tx.WeightReceiver(held)
    sender = driven(receiver, policy)
    receiver.apply_weights(other.state_dict())
    assert same(held, other)
    assert not sender.update_weights(only="bias").part and same(held, policy)
    with pytest.raises(ManifestError):
        receiver.apply_weights(nn.Linear(2, 2).state_dict())
    assert sender.update_weights(only="bias").part, "what was refused changed nothing"


def test_newly_registered_model_gets_a_full_version_after_join():
    policy, other = nn.Linear(3, 2), nn.Linear(3, 2)
    receiver = tx.WeightReceiver()
    with pytest.raises(NotConnectedError, match=r"register_model"):
        receiver.connect(Join(transport="disk", params=(), offer={}))
    receiver.register_model(nn.Linear(3, 2))
    sender = driven(receiver, policy)
    receiver.register_model(other)
    with pytest.raises(UpdateError, match="has not joined a transport"):
        sender.update_weights(only="bias")
    assert not sender.update_weights(only="bias").part and same(other, policy)
    receiver.register_model(nn.Linear(2, 2))
    for what in ("has not joined a transport", "weight"):
        with pytest.raises(UpdateError, match=what):
            sender.update_weights()


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
    loader, policy = Whole({"weight": torch.zeros(20, 30)}), {"weight": torch.zeros(20, 30)}
    for transport in (tx.DeltaTransport(tmp_path), tx.MemoryTransport()):
        with tx.WeightSender(transport, InProcessEngine(tx.WeightReceiver(loader))) as sender:
            for _ in range(3):
                policy["weight"][0, 0] += 1
                assert sender.update_weights(policy).proof == "sent" and same(loader.live, policy)


def steps(receiver, load, *last):
    """Take the steps of an update, and return the answer to the last one."""
    for message in (Prefetch(version=load.version), Start(), load, *(last or (Finish(version=load.version),))):
        answer = receiver.handle(message)
    return answer


@pytest.mark.parametrize("moment", ["staging", "last"])
def test_weights_that_are_lost_while_staging_are_not_built_on(moment, tmp_path):
    """What the engine's thread does meanwhile; at last right after the last look at what is held."""
    policy, held, looks = nn.Linear(3, 2), nn.Linear(3, 2), []

    def lose():
        held.weight.data.zero_()
        receiver.invalidate()

    class Staging(TensorsLoader):
        def stage(self, changes):
            super().stage(changes)
            if moment == "staging":
                lose()
            else:
                looks[:] = "before", "now"

    class Lost(WeightsState):
        def __getattribute__(self, name):
            found = super().__getattribute__(name)
            if name == "intact" and looks and looks.pop() == "before":
                lose()
            return found

    receiver = tx.WeightReceiver(Staging(held))
    with tx.DeltaTransport(tmp_path) as transport:
        receiver.handle(invitation(transport, policy))
        for version in (1, 2, 3):
            change(policy)
            load = prepared(transport, policy, version)
            if (moment, version) == ("staging", 2):
                with pytest.raises(StaleBaseError, match="loaded other weights while version 2 was staged"):
                    receiver.handle(Prefetch(version=2))
                continue
            steps(receiver, load)
            assert same(held, policy)
            receiver.held = Lost(base=version, intact=True)
        assert not looks


def test_memory_that_a_load_took_is_freed_once_at_its_end(tmp_path, monkeypatch):
    freed, held, transport = [], {"a": torch.zeros(4)}, tx.DeltaTransport(tmp_path)
    monkeypatch.setattr("torchrl_ext.sync.receiver.free_cached", lambda: freed.append(float(held["a"][0])))
    receiver = tx.WeightReceiver(held)
    receiver.handle(invitation(transport, held))
    for version in (1, 2):  # a load of all, and changes
        load = prepared(transport, {"a": torch.full((4,), float(version))}, version)
        for message in (Prefetch(version=version), Start(), load):
            receiver.handle(message)
        assert freed == [1.0][: version - 1]
        receiver.handle(Finish(version=version))
        assert freed == [1.0]


def test_a_full_version_is_read_back_from_the_model(tmp_path):
    class Losing(TensorsLoader):
        """Takes every tensor that arrives, and leaves one of the model as it was."""

        def targets(self):
            return {}

        def load(self, pairs):
            super().load((name, tensor) for name, tensor in pairs if name != "b")

    held = {"a": torch.zeros(4), "b": torch.zeros(4)}
    engine = InProcessEngine(tx.WeightReceiver(Losing(held)))
    sender = tx.WeightSender(tx.DeltaTransport(tmp_path), engine)
    with sender, pytest.raises(UpdateError, match="parameter 'b' of the model differs"):
        sender.update_weights({"a": torch.ones(4), "b": torch.ones(4)})
    assert float(held["a"][0]) == 1.0 and engine.look()[0].state == "paused"


def test_model_on_the_meta_device_is_refused_before_any_send():
    engine = InProcessEngine(nn.Linear(3, 2, device="meta"))
    with tx.WeightSender(tx.MemoryTransport(), engine) as sender:
        with pytest.raises(UpdateError, match="meta device") as refused:
            sender.update_weights(nn.Linear(3, 2))
        assert isinstance(refused.value.__cause__, ManifestError) and engine.look()[0].state == "serving"
