"""`TransportWeightSyncScheme` in collectors, and with workers in threads, which connect over TCP as processes do."""

from __future__ import annotations

import os
import pickle
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, WeightSyncScheme

import torchrl_ext as tx
from tests.rl.collecting import (
    BETWEEN_PROCESSES,
    WAIT_S,
    Mortal,
    Walk,
    followers,
    forking,
    join,
    make_policy,
    processes,
    same,
    train,
    worker_weights,
)
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import (
    ConcurrentUpdateError,
    ConfigError,
    DeadlineError,
    EngineUnreachableError,
    NotConnectedError,
    UpdateError,
)
from torchrl_ext.data.versions.reader import ChainReader

Scheme = tx.TransportWeightSyncScheme
STATE = "policy.module[2]"


def sampled(usual, names):
    """Cases of which all but some are left to ``--exhaustive``."""
    return [pytest.param(name, marks=() if name in usual else pytest.mark.exhaustive) for name in names]


# collectors of several processes


@pytest.fixture(scope="module")
def forked():
    with forking() as context:
        yield context


@pytest.mark.parametrize("transport", sampled(["delta", "process"], ["process", "shared", *BETWEEN_PROCESSES]))
def test_processes_of_a_collector_follow_the_trainer(forked, transport):
    """By TorchRL's own schemes as by ours, which also update some workers, and several models at once."""
    theirs = {"process": MultiProcessWeightSyncScheme, "shared": SharedMemWeightSyncScheme}
    make, ours = theirs.get(transport, partial(Scheme, transport)), transport not in theirs
    policy, schemes = make_policy(), {name: make() for name in (("policy", STATE) if ours else ("policy",))}
    collector = MultiSyncCollector(
        [Walk, Walk],
        policy,
        frames_per_batch=20,
        total_frames=200,
        weight_sync_schemes=schemes,
        track_policy_version=True,
    )
    try:
        batches = iter(collector)
        assert next(batches)["policy_version"].unique().tolist() == [0]
        assert all(same(held, policy.state_dict()) for held in worker_weights(collector))
        for weights in (lambda: policy, lambda: TensorDict.from_module(policy).data, lambda: None):
            train(policy, 1)
            collector.update_policy_weights_(weights())
            assert all(same(held, policy.state_dict()) for held in worker_weights(collector))
        assert next(batches)["policy_version"].max() == 3  # one bump per update
        if ours:
            other = make_policy(7)
            collector.update_policy_weights_(other, worker_ids=1)
            zero, one = worker_weights(collector)
            assert same(zero, policy.state_dict()) and same(one, other.state_dict())
            collector.update_policy_weights_(weights_dict={"policy": policy, STATE: other.module[2]})
            last = {key: tensor for key, tensor in other.state_dict().items() if key.startswith("module.2.")}
            assert all(same(held, {**policy.state_dict(), **last}) for held in worker_weights(collector))
    finally:
        collector.shutdown()
        for scheme in schemes.values():
            scheme.shutdown()


@pytest.mark.parametrize("first", [(3, 4), (7, 7)])
def test_workers_keep_their_factories_policies_without_one(forked, first):
    """Until the first update, if the trainer has no ``policy`` beside the factories to start them with."""
    scheme, factories = Scheme("disk"), [partial(make_policy, seed) for seed in (3, 4)]
    settings = {"weight_sync_schemes": {"policy": scheme}, "frames_per_batch": 20, "total_frames": 200}
    policy = make_policy(7) if first == (7, 7) else None
    collector = MultiSyncCollector([Walk, Walk], policy, policy_factory=factories, **settings)
    try:
        next(iter(collector))
        for own, held in zip(first, worker_weights(collector), strict=True):
            assert same(held, make_policy(own).state_dict())
        collector.update_policy_weights_(TensorDict.from_module(make_policy(5)).data, worker_ids=1)
        for own, held in zip((first[0], 5), worker_weights(collector), strict=True):
            assert same(held, make_policy(own).state_dict())
    finally:
        collector.shutdown()
        scheme.shutdown()


@pytest.mark.parametrize("transport", sampled(["collective", "delta"], BETWEEN_PROCESSES))
def test_worker_that_dies_during_a_send_is_named_and_replaceable(forked, transport):
    trained, scheme = Mortal(), Scheme(transport, timeout_s=20)
    scheme.init_on_sender(model=trained, num_workers=2)
    with processes(forked, scheme, Mortal, 2) as (pids, pipes):
        trained.doomed = torch.tensor([float(pids[1])])
        with torch.no_grad():
            trained.weight.add_(1)
        with pytest.raises(UpdateError, match=rf"worker 1 of model 'policy' \(pid {pids[1]}\) ended") as caught:
            scheme.send()
        states = {row.engine.split()[1]: row.state for row in caught.value.rows}
        assert states == {"0": "serving", "1": "unreachable"}
        pipes[0].send(True)
        assert torch.equal(pipes[0].recv()["weight"], trained.weight)  # the other one has the version
        trained.doomed = torch.zeros(1)
        with pytest.raises(EngineUnreachableError, match=r"worker 1 of model 'policy'.*nothing was sent"):
            scheme.send()
        scheme.send(worker_ids=0)
        model, end = Mortal(), pickle.loads(pickle.dumps(scheme))
        joining = threading.Thread(target=join, args=(end, model, 1))
        joining.start()
        Deadline(WAIT_S).poll(lambda: scheme.shared_transport._hub.links[1].alive)
        scheme.send()
        joining.join(WAIT_S)
        assert torch.equal(model.weight, trained.weight)
        end.shutdown()


# collectors of this process


@pytest.mark.parametrize("transport", sorted(tx.transports()))
def test_a_collector_of_one_process_is_updated_in_place(transport):
    policy, scheme = make_policy(), Scheme(transport)
    collector = Collector(
        Walk(), policy, frames_per_batch=10, total_frames=100, weight_sync_schemes={"policy": scheme},
        track_policy_version=True,
    )  # fmt: skip
    try:
        batches, logged = iter(collector), []
        next(batches)
        other = make_policy(1)
        scheme.log_to(logged.append)
        collector.update_policy_weights_(other)
        assert same(collector.policy.state_dict(), other.state_dict())
        assert collector.policy_version == 1 and logged == [scheme.report]
        assert scheme.report.verified
        with pytest.raises(UpdateError, match=r"model 'policy'.*'module\.0\.bias'"):
            collector.update_policy_weights_(make_policy(hidden=8))
        assert [one.error is None for one in logged] == [True, False]
        assert collector.policy_version == 1
        assert same(collector.policy.state_dict(), other.state_dict())
    finally:
        collector.shutdown()
        scheme.shutdown()


def attach(collector, scheme, model_id="policy"):
    """Let a collector follow the trainer of ``scheme``, and return its end, which has the first weights."""
    end = pickle.loads(pickle.dumps(scheme))
    joining = threading.Thread(target=collector.register_scheme_receiver, args=({model_id: end},))
    joining.start()
    scheme.connect()
    joining.join(WAIT_S)
    return end


def test_nested_collector_passes_a_version_on_before_the_ack():
    """Trainer -> a node with a collector -> what runs its policy, as in a `RayCollector` of collectors."""
    policy, outer, inner = make_policy(), Scheme("disk"), Scheme("memory")
    collector = Collector(
        Walk(), make_policy(1), frames_per_batch=10, total_frames=100, weight_sync_schemes={"policy": inner},
        track_policy_version=True,
    )  # fmt: skip
    outer.init_on_sender(model_id="policy", model=policy, num_workers=1)
    try:
        next(iter(collector))
        node = attach(collector, outer)
        train(policy)
        outer.send()
        assert same(collector.policy.state_dict(), policy.state_dict()) and collector.policy_version == 1
        collector.update_policy_weights_ = lambda **_: 1 / 0  # what it raises comes back to the trainer, by name
        with pytest.raises(UpdateError, match=r"ZeroDivisionError.*worker 0 of model 'policy'"):
            outer.send()
        node.shutdown()
        del collector.update_policy_weights_
    finally:
        outer.shutdown()
        collector.shutdown()


def test_single_process_collector_needs_no_scheme_of_its_own():
    """A leaf: its policy is written in place, its version goes up by one, and a model beside the policy is no error."""
    policy, scheme = make_policy(), Scheme("disk")
    collector = Collector(Walk(), make_policy(1), frames_per_batch=10, total_frames=100, track_policy_version=True)
    collector.critic = make_policy(2)
    critic = Scheme("memory")
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


# first weights


class Tied(nn.Module):
    """Two layers that share a weight, and a buffer that no state dict has."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.register_buffer("scratch", torch.ones(2), persistent=False)


class Stateful(Tied):
    """One that has extra state besides."""

    seen = torch.zeros(1)

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"].clone()


@pytest.mark.parametrize("transport", ["collective", "delta", "disk"])
def test_meta_policy_gets_storage_ties_and_extra_state(transport, monkeypatch):
    """A policy on the meta device gets storage, ties and extra state, and its reader keeps no copies."""
    readers, make = [], ChainReader.__init__
    monkeypatch.setattr(
        ChainReader, "__init__", lambda self, *how, **more: readers.append(self) or make(self, *how, **more)
    )
    trained, bare, scheme = Stateful(), Stateful(), Scheme(transport, verify=True)
    TensorDict.from_module(bare).data.to("meta").apply(nn.Parameter, filter_empty=False).to_module(bare)
    assert bare.a.weight.is_meta
    with followers(scheme, [bare], model=trained):
        for version in (1, 2, 3):
            assert bare.b.weight is bare.a.weight and isinstance(bare.a.weight, nn.Parameter)
            assert all(torch.equal(getattr(bare, one).bias, getattr(trained, one).bias) for one in "ab")
            assert torch.equal(bare.b.weight, trained.a.weight) and bare.scratch.tolist() == [1, 1]
            assert torch.equal(bare.seen, trained.seen)
            with torch.no_grad():
                trained.a.weight.mul_(3)
            trained.seen = torch.tensor([-float(version)])
            scheme.send()
    assert all(len(tensor) == 1 for one in readers for tensor in one.mirror.values())  # of extra state, come whole


def test_a_buffer_without_storage_that_does_not_come_is_named(recwarn):
    """By the strategy that sends state dicts; that of TensorDicts sends such buffers, too."""
    trained, bare, scheme = Tied(), Tied().to("meta"), Scheme("disk", strategy="state_dict", start_timeout_s=5)
    with followers(Scheme("disk", strategy="state_dict"), [own := make_policy(1)], model=make_policy()):
        assert same(own.state_dict(), make_policy().state_dict())
    with (
        pytest.raises(UpdateError, match="'scratch' of the policy has no storage"),
        followers(scheme, [bare], model=trained),
    ):
        pass


# without a collector


@pytest.mark.parametrize("transport", ["memory", "delta"])
def test_what_moves_is_torchrls_machinery(transport):
    """The scheme fills in hooks; whoever reads its transports, as TorchRL's collectors may, finds them."""
    policy, model, scheme = make_policy(), make_policy(1), Scheme(transport)
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


# bad input, and failures


def test_settings_are_checked_when_the_scheme_is_made():
    with pytest.raises(ConfigError, match="no transport called 'dsik'"):
        Scheme("dsik")
    with pytest.raises(ConfigError, match="'disk' has no setting 'rot'"):
        Scheme("disk", rot="/tmp")
    with pytest.raises(ConfigError, match="timeout_s=0"):
        Scheme("disk", timeout_s=0)
    for given, said in (
        ({"model": make_policy()}, "number of workers of model 'critic'"),
        ({"num_workers": 1}, "nothing to send for model 'critic'"),
    ):
        with pytest.raises(ConfigError, match=said):
            Scheme("disk").init_on_sender(model_id="critic", **given)


def test_a_folder_of_its_own_lasts_until_the_scheme_is_shut_down():
    scheme = Scheme("disk")
    transport = scheme.create_transport()
    transport.send_weights({"w": torch.ones(2)})
    assert os.listdir(transport.root)
    transport.shutdown()
    scheme.shutdown()
    assert not os.path.exists(transport.root)


@pytest.mark.parametrize("transport", sorted(tx.transports()))
def test_policy_with_other_keys_is_refused_and_the_next_lands(transport):
    policy, models, scheme = make_policy(), [make_policy(1), make_policy(2)], Scheme(transport, timeout_s=10)
    with followers(scheme, models, model=policy):
        with pytest.raises(UpdateError, match=r"worker [01] of model 'policy'.*no parameter 'module.9.weight'"):
            scheme.send({**policy.state_dict(), "module.9.weight": torch.ones(2)})
        with pytest.raises(UpdateError, match=r"worker [01] of model 'policy'.*missing.*'module.2.bias'"):
            scheme.send({name: t for name, t in policy.state_dict().items() if name != "module.2.bias"})
        assert all(same(model.state_dict(), policy.state_dict()) for model in models)
        train(policy)
        scheme.send()
        assert all(same(model.state_dict(), policy.state_dict()) for model in models)


def test_duplicate_worker_and_unknown_model_id_are_refused():
    policy, model, scheme = make_policy(), make_policy(1), Scheme("disk")
    with followers(scheme, [model], model=policy):
        second = pickle.loads(pickle.dumps(scheme))
        with pytest.raises(
            NotConnectedError, match=r"refused worker 0 of model 'policy'.*\(pid \d+\) is connected already"
        ):
            join(second, make_policy(2), 0)
        with pytest.raises(NotConnectedError, match="carries model 'policy', not 'critic'"):
            join(second, make_policy(2), 0, "critic")
        with pytest.raises(ConfigError, match=r"no worker 2 of model 'policy'.*\[0\]"):
            scheme.send(make_policy(), worker_ids=[2])
    with pytest.raises(NotConnectedError, match="'actor' has no trainer"):
        join(Scheme("disk"), make_policy(), 0, "actor")


def test_workers_that_do_not_connect_are_named(caplog):
    scheme = Scheme("disk", start_timeout_s=0.3)
    scheme.init_on_sender(model_id="actor", model=make_policy(), num_workers=3)
    with pytest.raises(DeadlineError, match=r"3 of 3 workers of model 'actor'.*0, 1, 2"):
        scheme.connect()

    class Ended:
        policy, num_workers, procs = make_policy(), 2, 2 * [SimpleNamespace(exitcode=1)]

    collector, scheme = Ended(), Scheme("disk")
    scheme.init_on_sender(model_id="policy", context=collector)
    scheme.connect()  # does not wait for them
    assert "worker 0 of model 'policy' ended before it connected" in caplog.text
    scheme.shutdown()


def test_a_second_send_beside_a_running_one_is_refused():
    class Slow(Mortal):
        def set_extra_state(self, state):
            inside.set()
            assert go_on.wait(30)

    inside, go_on = threading.Event(), threading.Event()
    go_on.set()
    scheme = Scheme("memory")
    with followers(scheme, [Slow()], model=Slow()):
        go_on.clear(), inside.clear()
        first = threading.Thread(target=scheme.send)
        first.start()
        assert inside.wait(30)
        with pytest.raises(ConcurrentUpdateError, match="'policy'"):
            scheme.send()
        go_on.set()
        first.join(30)
        assert not first.is_alive()
