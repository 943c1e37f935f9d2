"""`TransportWeightUpdater` in collectors: an engine follows, and versions agree."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict, set_list_to_stack
from torchrl.collectors import Collector
from torchrl.collectors.llm import LLMCollector
from torchrl.envs.llm.transforms.policy_version import PolicyVersion
from torchrl.modules.llm import TransformersWrapper

import torchrl_ext as tx
from tests.engines.embedded import EmbeddedServer
from tests.fakes import FakeEngine
from tests.models import tiny_checkpoint, tiny_model, tiny_tokenizer
from tests.rl.chat import make_env, make_remote_policy
from tests.rl.collecting import BETWEEN_PROCESSES, Walk, make_policy, same, train
from torchrl_ext.base.errors import ConfigError, EngineUnreachableError, NotConnectedError, UpdateError
from torchrl_ext.control.fleet import Fleet
from torchrl_ext.sync.local.inprocess import InProcessEngine


@pytest.fixture(scope="module", autouse=True)
def lists_are_stacks():
    with set_list_to_stack(True):
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with EmbeddedServer(tiny_checkpoint(tmp_path_factory.mktemp("model")), dtype="float32", threads=1) as running:
        yield running


@pytest.fixture
def settings(tmp_path):
    """Of a transport by name: a root where it takes one."""

    def made(name):
        return {"root": tmp_path / "updates"} if name in ("disk", "delta") else {}

    return made


def test_an_updater_says_how_its_versions_are_taken(tmp_path):
    for wanted in ("paused", "auto"):
        with FakeEngine("vllm", {"w": torch.ones(64)}) as fake:
            updater = tx.TransportWeightUpdater(
                "delta", fake.url, root=tmp_path / wanted, keyframe_every=0, sender={"commit": wanted, "policy": "all"}
            )
            for value in (2.0, 3.0):
                updater.push_weights({"w": torch.cat([torch.ones(63), torch.tensor([value])])})
            (row,) = updater.report.engines
            assert row.commit == {"paused": "paused: commit='paused'", "auto": "live"}[wanted]
            assert fake.tensors["w"][-1] == 3 and fake.serving
            updater.shutdown()
    with pytest.raises(ConfigError, match="there is no policy='some'"):
        _ = tx.TransportWeightUpdater("delta", root=tmp_path / "other", sender={"policy": "some"}).sender


@pytest.mark.parametrize(
    ("transport", "version_type"),
    [
        pytest.param(name, "uuid" if name == "delta" else "int", marks=() if name == "disk" else pytest.mark.exhaustive)
        for name in BETWEEN_PROCESSES
    ],
)
def test_an_engine_follows_the_updater_of_an_llm_collector(server, settings, transport, version_type):
    model = tiny_model(seed=len(transport))
    wrapped = TransformersWrapper(model, tokenizer=tiny_tokenizer(), input_mode="text", generate=False)
    updater = tx.TransportWeightUpdater(transport, server.url, **settings(transport))
    updater.register_model(wrapped)
    collector = LLMCollector(
        make_env(),
        policy=make_remote_policy(server.url),
        dialog_turns_per_batch=1,
        total_dialog_turns=100,
        weight_updater=updater,
        track_policy_version=PolicyVersion(version_type),
    )
    versions = [collector.policy_version]

    def update(weights, **which):
        train(model, len(versions))
        collector.update_policy_weights_(weights, **which)
        assert updater.report.verified  # the engine's own bytes, against the trainer's
        versions.append(collector.policy_version)

    try:
        batches = iter(collector)
        next(batches)
        collector.init_updater()  # ahead of the weights, as in TorchRL's own order of an update
        assert updater.sender.check_connection() and updater.report is None
        update(wrapped)
        update(dict(model.state_dict()), worker_ids=[0])
        batch = next(batches)
        updater.push_weights(model, worker_ids=0)
        assert collector.policy_version == versions[-1]  # TorchRL's updaters bump none
        updater.increment_version()
        versions.append(collector.policy_version)
        with pytest.raises(UpdateError, match=r"lm_head\.weight"):
            collector.update_policy_weights_({"lm_head.weight": torch.zeros(3)})
        assert collector.policy_version == versions[-1]
        update(model)
        assert len({*versions}) == 5
        if version_type == "int":
            assert versions == [0, 1, 2, 3, 4] and batch["next", "policy_version"].max() == 2
    finally:
        collector.shutdown()
        updater.shutdown()


@pytest.mark.parametrize("transport", ["delta", "memory", "collective"])
def test_a_module_of_this_process_can_be_the_engine(settings, transport):
    served, policy = make_policy(1), make_policy()
    if transport == "collective":  # made with its engine
        updater = tx.TransportWeightUpdater(tx.VLLMCollectiveTransport(vllm_engine=served))
    else:
        updater = tx.TransportWeightUpdater(transport, served, **settings(transport))
    collector = Collector(Walk(), policy, frames_per_batch=5, total_frames=50, weight_updater=updater)
    collector.update_policy_weights_(TensorDict.from_module(policy))
    assert same(served.state_dict(), policy.state_dict()) and updater.report.verified
    collector.shutdown()
    updater.shutdown()


def test_hooks_are_called_after_an_accepted_update_and_raise():
    def broken():
        raise RuntimeError("this hook is gone")

    updater, calls = tx.TransportWeightUpdater("memory", make_policy(1)), []
    updater.register_post_hook(lambda: calls.append(updater.report.version))
    updater.push_weights(make_policy())
    with pytest.raises(UpdateError):
        updater(make_policy(hidden=8))
    updater.register_post_hook(broken)
    with pytest.raises(RuntimeError, match="this hook is gone"):
        updater(make_policy())
    assert calls == [1, updater.report.version] and updater.report.version > 1


def test_pickled_updater_drops_its_collectors_and_hooks():
    updater = tx.TransportWeightUpdater("memory", "127.0.0.1:1", channel="here")
    updater.register_collector(make_policy())
    copy = pickle.loads(pickle.dumps(updater))
    assert copy.collectors is None and not copy.post_hooks
    with pytest.raises(EngineUnreachableError, match=r"127\.0\.0\.1:1"):
        copy.push_weights(make_policy())


def test_what_cannot_work_is_said():
    with pytest.raises(ConfigError, match="already exists"):
        tx.TransportWeightUpdater(tx.MemoryTransport(), channel="x")
    updater = tx.TransportWeightUpdater("memory", make_policy())
    with pytest.raises(NotConnectedError, match="register_model"):
        updater.push_weights()
    with pytest.raises(ConfigError, match="worker 1 cannot be updated by itself"):
        updater.push_weights(make_policy(), worker_ids=1)
    with pytest.raises(ConfigError, match="worker 0 cannot be updated by itself"):
        tx.TransportWeightUpdater("memory")(make_policy(), worker_ids=[0])
    pair = Fleet([InProcessEngine(make_policy(), url=name) for name in ("a", "b")])
    with pytest.raises(ConfigError, match="worker 0 cannot be updated by itself"):
        tx.TransportWeightUpdater("memory", pair).push_weights(make_policy(), worker_ids=[0])
    reports = []
    updater.log_to(reports.append)
    updater.register_model(make_policy(2))
    updater.push_weights()
    assert updater.report.version == 1 and reports == [updater.report]
