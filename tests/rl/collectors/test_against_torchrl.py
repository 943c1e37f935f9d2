"""Our scheme in the place of TorchRL's own: the calls of its collectors and of its tests, and theirs beside it."""

from __future__ import annotations

import threading

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, WeightSyncScheme

import torchrl_ext as tx
from tests.rl.collectors.collecting import Walk, followers, make_policy, same, train, worker_weights
from torchrl_ext.base.errors import UpdateError

SCHEMES = [
    pytest.param(MultiProcessWeightSyncScheme, id="process"),
    pytest.param(SharedMemWeightSyncScheme, id="shared", marks=pytest.mark.exhaustive),
    pytest.param(lambda: tx.TransportWeightSyncScheme("ipc"), id="ours"),
]
WAIT_S = 60


def attach(collector, scheme, model_id="policy"):
    """Let a collector follow the trainer of ``scheme``, and return its end, which has the first weights."""
    end = tx.TransportWeightSyncScheme("disk")
    end.__setstate__(scheme.__getstate__())
    joining = threading.Thread(target=collector.register_scheme_receiver, args=({model_id: end},))
    joining.start()
    scheme.connect()
    joining.join(WAIT_S)
    return end


def multi(policy, scheme, **settings):
    return MultiSyncCollector(
        [Walk, Walk], policy, frames_per_batch=20, total_frames=400, weight_sync_schemes={"policy": scheme}, **settings
    )


@pytest.mark.parametrize("make", SCHEMES)
def test_multi_process_collector_gets_weights_by_every_scheme(make):
    """A multi-process collector has the same weights and versions with every scheme."""
    policy, scheme = make_policy(), make()
    collector = multi(policy, scheme, track_policy_version=True)
    try:
        batches = iter(collector)
        assert next(batches)["policy_version"].unique().tolist() == [0]
        for update in (lambda: policy, lambda: TensorDict.from_module(policy).data, lambda: None):
            train(policy, 1)
            collector.update_policy_weights_(update())
            assert all(same(held, policy.state_dict()) for held in worker_weights(collector))
        assert next(batches)["policy_version"].max() == 3
        collector.update_policy_weights_(worker_ids=[0, 1])
    finally:
        collector.shutdown()


@pytest.mark.parametrize("transport", ["memory", "delta"])
def test_what_moves_is_torchrls_machinery(transport):
    """The scheme fills in hooks; whoever reads its transports, as TorchRL's collectors may, finds them."""
    policy, model, scheme = make_policy(), make_policy(1), tx.TransportWeightSyncScheme(transport)
    for name in ("connect", "init_on_sender", "init_on_receiver", "apply_weights", "sender_transports"):
        assert getattr(type(scheme), name) is getattr(WeightSyncScheme, name)
    with followers(scheme, [model], model=policy) as (end,):
        assert scheme.sender_transports[0] is scheme.shared_transport is scheme.receiver_transport
        train(policy)
        scheme.shared_transport.send_weights(scheme.prepare_weights(policy, "policy", scheme.strategy))
        assert same(model.state_dict(), policy.state_dict())
        end.apply_weights(TensorDict.from_module(make_policy(3)).data)
        assert same(model.state_dict(), make_policy(3).state_dict())
        with torch.no_grad():
            policy.module[0].bias.add_(1)
        scheme.send()  # what was put in place is no base of a version
        assert same(model.state_dict(), policy.state_dict())
        with pytest.raises(RuntimeError, match="twice"):
            scheme.connect()
        scheme.shutdown()
        assert end.receive() is not None and end.receive() is None  # the trainer has left: there is nothing to wait for


def test_receive_blocks_without_a_timeout():
    policy, model, scheme = make_policy(), make_policy(1), tx.TransportWeightSyncScheme("memory", timeout_s=0.2)
    with followers(scheme, [model], model=policy) as (end,):
        waiting = threading.Event()
        received = []
        thread = threading.Thread(target=lambda: waiting.set() or received.append(end.receive()), daemon=True)
        thread.start()
        assert waiting.wait(WAIT_S)
        thread.join(0.5)
        assert thread.is_alive()
        train(policy)
        scheme.send()
        thread.join(WAIT_S)
        assert torch.equal(received[0]["module", "0", "weight"], policy.module[0].weight)
        assert end.receive(timeout=0) is None  # each version once


def test_nested_collector_passes_a_version_on_before_the_ack():
    """Trainer -> a node with a multi-process collector -> its workers, as in a `RayCollector` of such collectors."""
    policy, middle = make_policy(), make_policy(1)
    outer, inner = tx.TransportWeightSyncScheme("disk"), tx.TransportWeightSyncScheme("ipc")
    collector = multi(middle, inner)
    outer.init_on_sender(model_id="policy", model=policy, num_workers=1)
    try:
        next(iter(collector))
        node = attach(collector, outer)
        train(policy)
        outer.send()
        assert all(same(held, policy.state_dict()) for held in worker_weights(collector))
        collector.update_policy_weights_ = lambda **_: (
            1 / 0
        )  # what the cascade raises comes back to the trainer, by name
        with pytest.raises(UpdateError, match=r"ZeroDivisionError.*worker 0 of model 'policy'"):
            outer.send()
        node.shutdown()
        del collector.update_policy_weights_
    finally:
        outer.shutdown()
        collector.shutdown()


def test_single_process_collector_needs_no_scheme_of_its_own():
    """A leaf: its policy is written in place, its version goes up by one, and a model beside the policy is no error."""
    policy, scheme = make_policy(), tx.TransportWeightSyncScheme("disk")
    collector = Collector(Walk(), make_policy(1), frames_per_batch=10, total_frames=100, track_policy_version=True)
    collector.critic = make_policy(2)
    critic = tx.TransportWeightSyncScheme("memory")
    try:
        for model_id, each in (("policy", scheme), ("critic", critic)):
            each.init_on_sender(model_id=model_id, model=policy, num_workers=1)
            attach(collector, each, model_id)
            train(policy)
            each.send()
            assert same(getattr(collector, model_id).state_dict(), policy.state_dict())
            assert collector.policy_version == 1
    finally:
        for each in (scheme, critic, *collector._receiver_schemes.values()):
            each.shutdown()
        collector.shutdown()
