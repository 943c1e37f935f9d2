from __future__ import annotations

import pytest
import torch
from torch import nn

import torchrl_ext as tx
from tests.transports.contract import same_bits
from torchrl_ext.errors import ConfigError, IntegrityError, ManifestError, NotConnectedError
from torchrl_ext.weights.digest import tensor_digest
from torchrl_ext.weights.source import as_source


def invitation(transport, model):
    params = as_source(model).params()
    return {**transport.open(1, params).info, "params": [meta.to_json() for meta in params], "world_size": 2}


def test_it_follows_whatever_transport_it_is_told_to_join(tmp_path):
    policy, held = nn.Linear(3, 2), nn.Linear(3, 2)
    receiver = tx.WeightReceiver(held)
    for transport in (tx.MemoryTransport(), tx.DiskTransport(tmp_path), tx.MemoryTransport()):
        receiver.connect(invitation(transport, policy))
        with torch.no_grad():
            policy.weight.add_(1)
        version = transport.latest_version() + 1
        handoffs = list(transport.prepare(as_source(policy), version))
        receiver.prefetch(version)
        receiver.start()
        for handoff in handoffs:
            receiver.load(handoff.info)
        receiver.load({"verify": {name: tensor_digest(tensor) for name, tensor in as_source(policy)}})
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
        receiver.load({"verify": {"bias": "0" * 32}})


def test_parameters_that_cannot_land_are_refused_before_the_transport_is_joined(tmp_path):
    receiver, transport = tx.WeightReceiver(nn.Linear(3, 2)), tx.DiskTransport(tmp_path)
    with pytest.raises(ManifestError, match="weight"):
        receiver.connect(invitation(transport, nn.Linear(2, 2)))
    with pytest.raises(NotConnectedError, match="connect first"):
        receiver.prefetch(1)


def test_a_transport_that_nobody_knows_is_refused_with_the_names():
    receiver = tx.WeightReceiver({"x": torch.zeros(1)})
    info = invitation(tx.MemoryTransport(), {"x": torch.zeros(1)}) | {"transport": "pigeon"}
    with pytest.raises(ConfigError, match=r"no transport called 'pigeon'.*memory"):
        receiver.connect(info)


def test_without_a_model_or_a_transport_it_says_what_is_missing():
    with pytest.raises(NotConnectedError, match=r"register_model"):
        tx.WeightReceiver().connect({"params": []})
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


def test_weights_at_hand_are_applied_directly():
    policy, held = nn.Linear(3, 2), nn.Linear(3, 2)
    tx.WeightReceiver(held).apply_weights(policy.state_dict())
    assert same_bits(policy.weight.detach(), held.weight.detach())
