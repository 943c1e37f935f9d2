from __future__ import annotations

import pytest
import torch
from msgspec import structs
from torch import nn
from torchrl.weight_update.weight_sync_schemes import WeightStrategy

import torchrl_ext as tx
from tests.collectors.collecting import same
from tests.models import tiny_model, tiny_tokenizer
from tests.sync.by_hand import invitation, prepared
from torchrl_ext.errors import ConfigError, IntegrityError, ManifestError, NotConnectedError, UpdateError
from torchrl_ext.landing.loader import TensorsLoader
from torchrl_ext.messages import Join, Prefetch
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.testing import same_bits
from torchrl_ext.weights.digests import tensor_digest
from torchrl_ext.weights.source import as_source


def test_it_follows_whatever_transport_it_is_told_to_join(tmp_path):
    policy, held = nn.Linear(3, 2), nn.Linear(3, 2)
    receiver = tx.WeightReceiver(held)
    for transport in (tx.MemoryTransport(), tx.DiskTransport(tmp_path), tx.MemoryTransport()):
        receiver.connect(invitation(transport, policy))
        with torch.no_grad():
            policy.weight.add_(1)
        version = transport.latest_version() + 1
        load = prepared(transport, policy, version)
        receiver.prefetch(Prefetch(version=version))
        receiver.start()
        receiver.load(load)
        receiver.verify({name: tensor_digest(tensor) for name, tensor in as_source(policy)})
        receiver.finish(version)
        assert receiver.version == version
        assert same_bits(policy.weight.detach(), held.weight.detach())
        transport.shutdown()
    receiver.close()
    receiver.close()


def test_a_digest_that_differs_names_the_parameter():
    receiver, transport = tx.WeightReceiver(nn.Linear(3, 2)), tx.MemoryTransport()
    receiver.connect(invitation(transport, nn.Linear(3, 2)))
    with pytest.raises(IntegrityError, match="'bias'"):
        receiver.verify({"bias": "0" * 32})


def test_parameters_that_cannot_land_are_refused_before_the_transport_is_joined(tmp_path):
    receiver, transport = tx.WeightReceiver(nn.Linear(3, 2)), tx.DiskTransport(tmp_path)
    with pytest.raises(ManifestError, match="weight"):
        receiver.connect(invitation(transport, nn.Linear(2, 2)))
    with pytest.raises(NotConnectedError, match="connect first"):
        receiver.prefetch(Prefetch(version=1))


def test_a_transport_that_nobody_knows_is_refused_with_the_names():
    receiver = tx.WeightReceiver({"x": torch.zeros(1)})
    info = structs.replace(invitation(tx.MemoryTransport(), {"x": torch.zeros(1)}), transport="pigeon")
    with pytest.raises(ConfigError, match=r"no transport called 'pigeon'.*memory"):
        receiver.connect(info)


def test_without_a_model_or_a_transport_it_says_what_is_missing():
    with pytest.raises(NotConnectedError, match=r"register_model"):
        tx.WeightReceiver().connect(Join(transport="disk", params=(), offer={}))
    with pytest.raises(NotConnectedError, match="connect first"):
        tx.WeightReceiver(nn.Linear(2, 2)).start()


def test_alone_it_applies_the_newest_version_when_asked(tmp_path):
    held = nn.Linear(3, 2)
    receiver = tx.WeightReceiver(transport=tx.DiskTransport(tmp_path))
    receiver.register_model(held)
    assert not receiver.poll_and_apply()
    trainer = tx.DiskTransport(tmp_path)
    for _ in range(3):
        policy = nn.Linear(3, 2)
        trainer.send_weights("policy", policy)
    assert receiver.poll_and_apply()
    assert receiver.version == 3
    assert same_bits(policy.weight.detach(), held.weight.detach())
    assert not receiver.poll_and_apply()
    trainer.shutdown()


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


def test_torchrls_llm_wrappers_stand_for_the_model_inside_on_both_ends(tmp_path):
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


def test_weights_at_hand_are_applied_directly():
    policy, held = nn.Linear(3, 2), nn.Linear(3, 2)
    tx.WeightReceiver(held).apply_weights(policy.state_dict())
    assert same_bits(policy.weight.detach(), held.weight.detach())


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
    receiver.apply_weights(nn.Linear(3, 2).state_dict())
    assert not sender.update_weights(only="bias").part
    assert same_bits(policy.weight.detach(), held.weight.detach())
    with pytest.raises(ManifestError):
        receiver.apply_weights(nn.Linear(2, 2).state_dict())
    assert sender.update_weights(only="bias").part, "what was refused changed nothing"


def test_another_model_gets_everything_once_the_trainer_joined_for_it():
    policy, other = nn.Linear(3, 2), nn.Linear(3, 2)
    receiver = tx.WeightReceiver(nn.Linear(3, 2))
    sender = driven(receiver, policy)
    receiver.register_model(other)
    with pytest.raises(UpdateError, match="joined no transport"):
        sender.update_weights(only="bias")
    assert not sender.update_weights(only="bias").part
    assert same_bits(policy.weight.detach(), other.weight.detach())
    receiver.register_model(narrow := nn.Linear(2, 2))
    for what in ("joined no transport", "weight"):
        with pytest.raises(UpdateError, match=what):
            sender.update_weights()
    assert narrow.weight.shape == (2, 2)
