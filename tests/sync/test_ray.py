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
from tests.sync.ends import change, same
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
from torchrl_ext.control.fleet import Fleet
from torchrl_ext.sync.local.inprocess import InProcessEngine
from torchrl_ext.sync.local.ray import ray_engine

ray = pytest.importorskip("ray")
WAIT_S = 120
BETWEEN_PROCESSES = ["collective", "ipc"]


@pytest.fixture(scope="module")
def cluster():
    with two_nodes(num_gpus=2) as running:
        yield running


def get(reference):
    return ray.get(reference, timeout=WAIT_S)


def make_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def pid(_):
    return os.getpid()


class EngineActor:
    """Holds an engine."""

    def __init__(self, make):
        self.engine = make()

    def apply(self, function):
        return function(self.engine)


@pytest.fixture(scope="module")
def actors(cluster):
    """Starts actors on another node, and ends them."""
    started = []

    def start(cls, *args):
        options = {"num_cpus": 0, "resources": {"rollout": 1}, "max_concurrency": 2 if cls is EngineActor else 1}
        started.append(ray.remote(**options)(cls).remote(*args))
        return started[-1]

    yield start
    for actor in started:
        ray.kill(actor)


@pytest.fixture(scope="module")
def handle(actors):
    return actors(EngineActor, make_net)


def test_dead_actor_is_reported_and_the_other_serves_the_version(actors, tmp_path):
    handle, policy, held = actors(EngineActor, make_net), make_net(seed=1), make_net()
    sender = tx.WeightSender(tx.DiskTransport(tmp_path), Fleet([InProcessEngine(held), ray_engine(handle)]))
    sender.update_weights(policy)
    os.kill(get(handle.apply.remote(pid)), signal.SIGKILL)
    change(policy)
    with pytest.raises(UpdateError, match=r"ray:EngineActor.* is dead") as failure:
        sender.update_weights(policy)
    assert [row.state for row in failure.value.report.engines] == ["serving", "unreachable"] and same(held, policy)


def test_an_actor_that_hangs_is_named_at_the_deadline(handle):
    engine = ray_engine(handle, timeout_s=1.0)
    assert engine.info().kind == "ray"
    stopped = get(handle.apply.remote(pid))
    os.kill(stopped, signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineError, match=r"no answer to 'describe' within 1 s from ray:.*EngineActor"):
            engine.info()
    finally:
        os.kill(stopped, signal.SIGCONT)


def fail_to_start():
    raise OSError("no room in the actor")


def test_what_an_actor_refuses_keeps_its_class_and_words(actors, handle):
    engine = ray_engine(handle)
    params = [[name, "float32", list(tensor.shape)] for name, tensor in make_net().state_dict().items()]
    with pytest.raises(ConfigError, match="no transport called 'pigeon'"):
        engine.join({"transport": "pigeon", "params": params, "offer": {}})
    with pytest.raises(ManifestError, match=r"0\.weight"):
        engine.join({"transport": "disk", "params": [["0.weight", "float32", [16, 9]]], "offer": {}})
    with pytest.raises((EngineRefusedError, EngineUnreachableError), match="no room in the actor"):
        ray_engine(actors(EngineActor, fail_to_start)).info()


def test_outputs_of_an_engine_in_an_actor_are_compared(actors):
    engine = tx.make_engine("ray", engine=actors(EngineActor, tiny_model))
    with tx.WeightSender(tx.make_transport("ipc"), engine, verify="outputs") as sender:
        (row,) = sender.update_weights(tiny_model(1)).engines
    assert row.state == "serving" and 0 <= row.max_gap < 1e-4


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
    engine = tx.make_engine("ray", engine=service, timeout_s=WAIT_S)
    with tx.WeightSender(tx.make_transport(transport), engine) as sender:
        for version in (1, 2):
            policy = talker(version)
            running = [said(actor, version=str(version)) for actor in service.actors]
            for actor in service.actors:
                begun = operator.attrgetter("engine.begun")
                Deadline(WAIT_S).poll(lambda: ray.get(actor.__ray_call__.remote(begun)))  # noqa: B023
            report = sender.update_weights(policy)
            assert [(row.state, row.version) for row in report.engines] == [("serving", version)] * 2
            assert report.verified
            for words in (out.token_ids for out in get(running)):
                assert len(words) > 8 and words[-8:] == says(policy, words[-9], 8)
            for out in get([said(actor) for actor in service.actors]):
                assert out.token_ids == says(policy, 3, 8)
        modes = [actor.__ray_call__.remote(operator.attrgetter("engine.mode")) for actor in service.actors]
        assert get(modes) == ["keep"] * 2


def test_llm_in_a_torchrl_ray_worker_follows_the_trainer(cluster, tmp_path):
    worker = RayLLMWorker(ray.remote(num_cpus=0)(Alone).remote(), 1, "net")
    with tx.WeightSender(tx.DeltaTransport(tmp_path), as_engine(worker)) as sender:
        for version in (1, 2):
            assert sender.update_weights(talker(version)).verified
            assert get(worker.ray_actor.says.remote()) == says(talker(version), 3, 8)
    ray.kill(worker.ray_actor)


def test_an_actor_that_lacks_this_package_says_so(actors):
    class Stranger:
        def __init__(self):
            import sys

            sys.modules["torchrl_ext"] = None  # as where it is not installed

    with pytest.raises(EngineRefusedError, match="install this package in the environment of the actor"):
        ray_engine(actors(Stranger)).info()
