"""TorchRL's collectors in Ray actors: workers follow a scheme of ours, engines follow an updater of ours."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("ray")

from torchrl.collectors.distributed import RayCollector
from torchrl.collectors.llm import RayLLMCollector
from torchrl.envs.llm.transforms.policy_version import PolicyVersion

import torchrl_ext as tx
from tests.control.ray_cluster import two_nodes
from tests.models import tiny_checkpoint, tiny_model
from tests.rl.chat import make_env, make_remote_policy
from tests.rl.collecting import Walk, make_policy, same, train
from torchrl_ext.control.serving.embedded import EmbeddedServer

WAIT_S = 120


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as running:
        yield running


@pytest.mark.parametrize("transport", ["delta", pytest.param("collective", marks=pytest.mark.exhaustive)])
def test_an_engine_follows_the_updater_of_a_ray_collector(cluster, transport, tmp_path):
    settings = {"root": str(tmp_path / "updates")} if transport == "delta" else {}
    model = tiny_model(seed=2)
    with EmbeddedServer(tiny_checkpoint(tmp_path / "model"), dtype="float32", threads=1) as server:
        collector = RayLLMCollector(
            make_env,
            policy_factory=functools.partial(make_remote_policy, server.url),
            dialog_turns_per_batch=1,
            total_dialog_turns=100,
            weight_updater=functools.partial(tx.TransportWeightUpdater, transport, server.url, **settings),
            track_policy_version=PolicyVersion("int"),
            remote_config={"resources": {"rollout": 1}, "runtime_env": {"env_vars": {"LIST_TO_STACK": "1"}}},
        )
        try:
            for expected in (1, 2):
                train(model, expected)
                collector.update_policy_weights_(dict(model.state_dict()))
                assert collector.policy_version == expected
                assert tx.discover(server.url)[0].weight_version == str(expected)
            assert next(iter(collector))["next", "policy_version"].max() == 2
        finally:
            cluster.kill(collector._collector)


@pytest.mark.parametrize("transport", ["collective", pytest.param("delta", marks=pytest.mark.exhaustive)])
def test_the_workers_of_a_ray_collector_follow_a_scheme(cluster, transport, tmp_path):
    settings = {"root": str(tmp_path / "updates")} if transport == "delta" else {}
    policy = make_policy(seed=1)
    collector = RayCollector(
        [Walk, Walk],
        policy,
        frames_per_batch=16,
        total_frames=10_000,
        weight_sync_schemes={"policy": tx.TransportWeightSyncScheme(transport, **settings)},
        remote_configs={"num_cpus": 1, "num_gpus": 0, "resources": {"rollout": 1}},
        sync=True,
    )
    try:
        batches = iter(collector)
        for seed in (1, 2):
            next(batches)
            train(policy, seed)
            collector.update_policy_weights_()
            for worker in collector.remote_collectors:
                held = cluster.get(worker.state_dict.remote(), timeout=WAIT_S)["policy_state_dict"]
                assert same(held, policy.state_dict())
    finally:
        collector.shutdown(shutdown_ray=False)
