"""`TransportWeightSyncScheme` in collectors of one and of several processes, and alone: bits, versions, failures."""

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

import torchrl_ext as tx
from tests.processes import python
from tests.rl.collectors.collecting import (
    BETWEEN_PROCESSES,
    WAIT_S,
    Mortal,
    Walk,
    followers,
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


@pytest.mark.parametrize(
    "transport",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if name in ("disk", "ipc", "sharded") else [])
        for name in BETWEEN_PROCESSES
    ],
)
def test_collector_workers_hold_the_trainers_bits_after_updates(transport):
    policy = make_policy()
    schemes = {"policy": Scheme(transport), "policy.module[2]": Scheme(transport)}
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
        first = next(batches)
        assert first["policy_version"].unique().tolist() == [0]
        assert all(same(held, policy.state_dict()) for held in worker_weights(collector))
        for seed in (1, 2):
            train(policy, seed)
            collector.update_policy_weights_()
            assert all(same(held, policy.state_dict()) for held in worker_weights(collector))
        assert next(batches)["policy_version"].max() == 2  # one bump per update
        other = make_policy(7)
        collector.update_policy_weights_(other, worker_ids=1)
        zero, one = worker_weights(collector)
        assert same(zero, policy.state_dict()) and same(one, other.state_dict())
        collector.update_policy_weights_(weights_dict={"policy": policy, "policy.module[2]": other.module[2]})
        mixed = {**policy.state_dict(), **{k: v for k, v in other.state_dict().items() if k.startswith("module.2.")}}
        assert all(same(held, mixed) for held in worker_weights(collector))
    finally:
        collector.shutdown()
        for scheme in schemes.values():
            scheme.shutdown()


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


def test_each_worker_can_have_weights_of_its_own():
    sent = [TensorDict.from_module(make_policy(seed)).data for seed in (3, 4)]
    models, scheme = [make_policy(), make_policy()], Scheme("disk")
    with followers(scheme, models, params_map=dict(enumerate(sent))):
        assert all(
            same(model.state_dict(), make_policy(seed).state_dict()) for model, seed in zip(models, (3, 4), strict=True)
        )
        scheme.send({1: make_policy(5)})
        assert same(models[0].state_dict(), make_policy(3).state_dict())
        assert same(models[1].state_dict(), make_policy(5).state_dict())
        with pytest.raises(ConfigError, match=r"no worker 2 of model 'policy'.*\[0, 1\]"):
            scheme.send(make_policy(), worker_ids=[2])


def policy_of_this_process():
    return make_policy(os.getpid())


@pytest.mark.parametrize("shared", [False, True])
def test_workers_start_with_the_policy_of_their_factory(shared):
    """Workers keep the policies of their own factories, and start equal if they share one factory."""
    factories = policy_of_this_process if shared else [partial(make_policy, seed) for seed in (3, 4)]
    scheme = Scheme("disk")
    collector = MultiSyncCollector(
        [Walk, Walk],
        policy_factory=factories,
        frames_per_batch=20,
        total_frames=200,
        weight_sync_schemes={"policy": scheme},
    )
    try:
        next(iter(collector))
        zero, one = worker_weights(collector)
        assert same(zero, (policy_of_this_process() if shared else make_policy(3)).state_dict())
        assert same(one, zero) if shared else same(one, make_policy(4).state_dict())
        collector.update_policy_weights_({1: TensorDict.from_module(make_policy(5)).data})
        changed = worker_weights(collector)
        assert same(changed[0], zero) and same(changed[1], make_policy(5).state_dict())
    finally:
        collector.shutdown()
        scheme.shutdown()


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
    readers, retain = [], ChainReader.retain
    monkeypatch.setattr(ChainReader, "retain", lambda self, which: readers.append(self) or retain(self, which))
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
    trained, bare, scheme = Tied(), Tied().to("meta"), Scheme("disk", strategy="state_dict", start_timeout_s=5)
    with (
        pytest.raises(UpdateError, match="'scratch' of the policy has no storage"),
        followers(scheme, [bare], model=trained),
    ):
        pass


def test_register_adds_a_torchrl_scheme_class_per_transport():
    """`backends.register` gives TorchRL a class per transport, and replaces no backend of another package."""
    python(
        "import pickle, torchrl.weight_update as w, torchrl_ext as tx\n"
        "class Theirs(w.WeightSyncScheme):\n"
        "    def create_transport(self): ...\n"
        "w.weight_sync_schemes.register_weight_sync_backend('disk')(Theirs)\n"
        "assert tx.TransportWeightSyncScheme('memory') and 'delta' not in w.weight_sync_schemes._WEIGHT_SYNC_SCHEMES\n"
        "from torchrl_ext.rl.collectors import backends\n"
        "backends.register()\n"
        "for name in tx.transports():\n"
        "    scheme = w.WeightSyncScheme.from_backend(name)\n"
        "    if name == 'disk':\n"
        "        assert type(scheme) is Theirs\n"
        "        continue\n"
        "    cls = w.weight_sync_schemes._WEIGHT_SYNC_SCHEMES[name]\n"
        "    assert issubclass(cls, tx.TransportWeightSyncScheme)\n"
        "    assert type(scheme) is cls and scheme.transport == name\n"
        "    assert type(pickle.loads(pickle.dumps(scheme))) is cls and repr(name) in cls.__doc__\n"
        "assert isinstance(w.WeightSyncScheme.from_backend('process'), w.MultiProcessWeightSyncScheme)",
        fresh=True,
    )


def test_a_folder_of_its_own_lasts_until_the_scheme_is_shut_down():
    scheme = Scheme("disk")
    transport = scheme.create_transport()
    transport.send_weights({"w": torch.ones(2)})
    assert os.listdir(transport.root)
    transport.shutdown()
    scheme.shutdown()
    assert not os.path.exists(transport.root)


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
        ({"params_map": {0: {}}, "model": make_policy()}, "more than one thing to send for model 'critic'"),
    ):
        with pytest.raises(ConfigError, match=said):
            Scheme("disk").init_on_sender(model_id="critic", **given)


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_both_torchrl_strategies_deliver_initial_worker_weights(strategy, recwarn):
    """Workers start with the policy by either strategy, and with mapped weights by that of TensorDicts."""
    policy, models, scheme = make_policy(), [make_policy(1), make_policy(2)], Scheme("disk", strategy=strategy)
    by = {"device_map_fn": lambda idx, weights: weights * idx} if strategy == "tensordict" else {}
    with followers(scheme, models, model=policy, **by):
        assert not by or not any(tensor.any() for tensor in models[0].state_dict().values())
        assert same(models[1].state_dict(), policy.state_dict())


# bad input


@pytest.mark.parametrize("transport", sorted(tx.transports()))
def test_policy_with_other_keys_is_refused_and_the_next_lands(transport):
    policy, models, scheme = (
        make_policy(),
        [make_policy(1), make_policy(2)],
        Scheme(transport, timeout_s=10, verify=True),
    )
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
    """A scheme refuses a second worker of one id, a model of another id, and a worker without a trainer."""
    policy, model, scheme = make_policy(), make_policy(1), Scheme("disk")
    with followers(scheme, [model], model=policy):
        second = pickle.loads(pickle.dumps(scheme))
        with pytest.raises(
            NotConnectedError, match=r"refused worker 0 of model 'policy'.*\(pid \d+\) is connected already"
        ):
            join(second, make_policy(2), 0)
        with pytest.raises(NotConnectedError, match="carries model 'policy', not 'critic'"):
            join(second, make_policy(2), 0, "critic")
    with pytest.raises(NotConnectedError, match="'actor' has no trainer"):
        join(Scheme("disk"), make_policy(), 0, "actor")


def test_workers_that_do_not_connect_are_named(caplog):
    """The sender names workers that do not connect in time, and does not wait for those that ended."""
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


@pytest.mark.parametrize("transport", BETWEEN_PROCESSES)
def test_worker_that_dies_during_a_send_is_named_and_replaceable(transport):
    """The error names a worker that dies during a send, the other worker is updated, a new one may join."""
    trained, scheme = Mortal(), Scheme(transport, timeout_s=20)
    scheme.init_on_sender(model=trained, num_workers=2)
    with processes(scheme, Mortal, 2) as (pids, pipes):
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
