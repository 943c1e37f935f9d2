"""Engines, senders and receivers in the actors of a real Ray cluster of two nodes."""

from __future__ import annotations

import operator
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchrl.modules.llm.backends.vllm import AsyncVLLM, RayLLMWorker, vllm_async

import torchrl_ext as tx
from tests.control.ray_cluster import two_nodes
from tests.models import tiny_model
from tests.sync.vllm_objects import Alone, Replica, said, says
from tests.sync.vllm_objects import net as talker
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import (
    ConfigError,
    DeadlineError,
    EngineRefusedError,
    EngineUnreachableError,
    ManifestError,
    UpdateError,
)
from torchrl_ext.control.discovery import as_engine
from torchrl_ext.sync.local.ray import ray_engine

ray = pytest.importorskip("ray")
WAIT_S = 120
BETWEEN_PROCESSES = ["collective", "ipc"]


@pytest.fixture(scope="module")
def cluster():
    with two_nodes(num_gpus=2) as running:
        yield running


def make_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def weights_of(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def step(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    return weights_of(model)


def node_id(_=None):
    return ray.get_runtime_context().get_node_id()


def pid(_):
    return os.getpid()


class EngineActor:
    """Holds an engine."""

    def __init__(self, make):
        self.engine = make()

    def apply(self, function):
        return function(self.engine)


class Trainer:
    """A sender in an actor, made there with its model."""

    def __init__(self, transport, engine, **settings):
        self.model = make_net()
        self.sender = tx.WeightSender(tx.make_transport(transport, **settings), engine)
        self.sender.register_model(self.model)

    def update_weights(self):
        sent = step(self.model)
        return sent, self.sender.update_weights()


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture
def actors(cluster):
    """Starts actors on the rollout node, and ends them."""
    started = []

    def start(cls, *args, on="rollout", **kwargs):
        options = {"num_cpus": 1, "resources": {on: 1}}
        if cls is EngineActor:
            options["max_concurrency"] = 2
        started.append(ray.remote(**options)(cls).remote(*args, **kwargs))
        return started[-1]

    yield start
    for actor in started:
        ray.kill(actor)


@pytest.mark.parametrize("transport", BETWEEN_PROCESSES)
def test_engines_in_actors_of_another_node_follow_the_trainer(actors, transport):
    handles = [actors(EngineActor, make_net) for _ in range(2)]
    assert ray.get(handles[0].apply.remote(node_id), timeout=WAIT_S) != node_id()
    policy = make_net(seed=1)
    sender = tx.WeightSender(tx.make_transport(transport), tx.make_engine("ray", engine=handles))
    sender.register_model(policy)
    try:
        for version in (1, 2):
            report = sender.update_weights()
            assert (report.version, report.verified) == (version, True)
            assert [(row.kind, row.state, row.version) for row in report.engines] == [("ray", "serving", version)] * 2
            for handle in handles:
                held = ray.get(handle.apply.remote(weights_of), timeout=WAIT_S)
                assert same(held, weights_of(policy))
            step(policy)
    finally:
        sender.shutdown()


def test_dead_actor_is_reported_and_the_other_serves_the_version(actors, tmp_path):
    handles = [actors(EngineActor, make_net) for _ in range(2)]
    policy = make_net(seed=1)
    engine = tx.make_engine("ray", engine=handles)
    sender = tx.WeightSender(tx.make_transport("disk", root=tmp_path), engine)
    sender.register_model(policy)
    sender.update_weights()
    os.kill(ray.get(handles[1].apply.remote(pid), timeout=WAIT_S), signal.SIGKILL)
    step(policy)
    with pytest.raises(UpdateError, match=r"ray:EngineActor.* is dead") as failure:
        sender.update_weights()
    states = [row.state for row in failure.value.report.engines]
    assert states == ["serving", "unreachable"]
    assert same(ray.get(handles[0].apply.remote(weights_of), timeout=WAIT_S), weights_of(policy))


def test_an_actor_that_hangs_is_named_at_the_deadline(actors):
    handle = actors(EngineActor, make_net)
    engine = ray_engine(handle, timeout_s=1.0)
    assert engine.info().kind == "ray"
    stopped = ray.get(handle.apply.remote(pid), timeout=WAIT_S)
    os.kill(stopped, signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineError, match=r"no answer to 'describe' within 1 s from ray:.*EngineActor"):
            engine.info()
    finally:
        os.kill(stopped, signal.SIGCONT)


def fail_to_start():
    raise OSError("no room in the actor")


def test_what_an_actor_refuses_keeps_its_class_and_words(actors):
    engine = ray_engine(actors(EngineActor, make_net))
    params = [[name, "float32", list(tensor.shape)] for name, tensor in make_net().state_dict().items()]
    with pytest.raises(ConfigError, match="no transport called 'pigeon'"):
        engine.connect({"transport": "pigeon", "params": params, "offer": {}})
    with pytest.raises(ManifestError, match=r"0\.weight"):
        engine.connect({"transport": "disk", "params": [["0.weight", "float32", [16, 9]]], "offer": {}})
    with pytest.raises((EngineRefusedError, EngineUnreachableError), match="no room in the actor"):
        ray_engine(actors(EngineActor, fail_to_start)).info()


def test_a_sender_in_an_actor_drives_engines_in_actors(actors, tmp_path):
    handle = actors(EngineActor, make_net)
    sender = actors(Trainer, "delta", ray_engine(handle), on="trainer", root=tmp_path)
    for version in (1, 2):
        sent, report = ray.get(sender.update_weights.remote(), timeout=WAIT_S)
        assert (report.version, report.verified) == (version, True)
        assert same(ray.get(handle.apply.remote(weights_of), timeout=WAIT_S), sent)


def test_outputs_of_an_engine_in_an_actor_are_compared(actors):
    engine = tx.make_engine("ray", engine=actors(EngineActor, tiny_model))
    sender = tx.WeightSender(tx.make_transport("ipc"), engine, verify="outputs")
    try:
        (row,) = sender.update_weights(tiny_model(1)).engines
        assert row.state == "serving" and 0 <= row.max_gap < 1e-4
    finally:
        sender.shutdown()


@pytest.fixture(scope="module")
def service(cluster):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_async, "_has_vllm", True)
        made = AsyncVLLM(SimpleNamespace(tensor_parallel_size=1), 2, ray.remote(num_cpus=0)(Replica))
    with pytest.raises(ConfigError, match="no replicas"):
        tx.make_engine("ray", engine=made)
    made._launch()
    yield made
    for actor in made.actors:
        ray.kill(actor)


@pytest.mark.parametrize("transport", BETWEEN_PROCESSES)
def test_asyncvllm_replicas_follow_and_running_requests_go_on(service, transport):
    """Replicas of `AsyncVLLM` generate the trainer's tokens after an update, and running requests go on."""
    policy, engine = talker(1), tx.make_engine("ray", engine=service, timeout_s=WAIT_S)
    sender = tx.WeightSender(tx.make_transport(transport), engine)
    sender.register_model(policy)
    try:
        for version in (1, 2):
            policy.load_state_dict(talker(version).state_dict())
            running = [said(actor, version=str(version)) for actor in service.actors]
            for actor in service.actors:
                begun = operator.attrgetter("engine.begun")
                Deadline(WAIT_S).poll(lambda: ray.get(actor.__ray_call__.remote(begun)))  # noqa: B023
            report = sender.update_weights()
            assert [(row.state, row.version) for row in report.engines] == [("serving", version)] * 2
            assert report.verified
            for words in (out.token_ids for out in ray.get(running, timeout=WAIT_S)):
                assert len(words) > 8 and words[-8:] == says(policy, words[-9], 8)
            for out in ray.get([said(actor) for actor in service.actors], timeout=WAIT_S):
                assert out.token_ids == says(policy, 3, 8)
        modes = [actor.__ray_call__.remote(operator.attrgetter("engine.mode")) for actor in service.actors]
        assert ray.get(modes, timeout=WAIT_S) == ["keep"] * 2
    finally:
        sender.shutdown()


def test_llm_in_a_torchrl_ray_worker_follows_the_trainer(cluster, tmp_path):
    """An LLM in a `RayLLMWorker` generates the trainer's tokens after each update."""
    worker, policy = RayLLMWorker(ray.remote(num_cpus=0)(Alone).remote(), 1, "net"), talker(1)
    sender = tx.WeightSender(tx.make_transport("delta", root=tmp_path), as_engine(worker))
    try:
        for version in (1, 2):
            policy.load_state_dict(talker(version).state_dict())
            assert sender.update_weights(policy).verified
            assert ray.get(worker.ray_actor.says.remote(), timeout=WAIT_S) == says(policy, 3, 8)
    finally:
        sender.shutdown()
        ray.kill(worker.ray_actor)


def test_an_actor_that_lacks_this_package_says_so(cluster):
    class Stranger:
        def __init__(self):
            import sys

            sys.modules["torchrl_ext"] = None  # as where it is not installed

    stranger = ray.remote(num_cpus=0)(Stranger).remote()
    with pytest.raises(EngineRefusedError, match="install this package in the environment of the actor"):
        ray_engine(stranger).info()
    ray.kill(stranger)
