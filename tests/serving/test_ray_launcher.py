"""Engines that a job owns, on the nodes of a Ray cluster: started, followed, lost, started again, ended."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import httpx
import psutil
import pytest

pytest.importorskip("ray")

import torchrl_ext as tx
from tests.models import tiny_checkpoint, tiny_model
from tests.processes import WAIT_S
from tests.rpc.ray_cluster import two_nodes
from torchrl_ext.cli.environments import settings_for_router
from torchrl_ext.errors import ConfigError, DeadlineError, EngineError
from torchrl_ext.serving import ray
from torchrl_ext.serving.ray import RayLauncher
from torchrl_ext.serving.served import OwnedEngines
from torchrl_ext.serving.topology import EnginePlan
from torchrl_ext.types import API_KEY_VARIABLE

YAML = "embedded: [{name: a, server_groups: [{worker_type: regular, num_gpus: 2, num_gpus_per_engine: 1}]}]"


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as running:
        yield running


@pytest.fixture
def job_of(tmp_path):
    checkpoint = tiny_checkpoint(tmp_path / "model")

    def made(text=YAML, router=None, **launcher):
        path = tmp_path / "engines.yaml"
        path.write_text(text)
        launcher = RayLauncher(
            **{"dtype": "float32", "threads": 1, "remote": {"resources": {"rollout": 1}}, **launcher}
        )
        return OwnedEngines(
            path,
            hf_checkpoint=checkpoint,
            launcher=launcher,
            supervisor={"interval_s": 0},
            router=router,
        )

    return made


def plan(path, gpus=(0,)):
    return EnginePlan(
        name="a/regular/0", model="a", kind="embedded", worker_type="regular", model_path=str(path), gpus=gpus
    )


def listeners(url):
    port = int(url.rpartition(":")[2])
    return [c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port]


@pytest.mark.engine  # a router is in front of them
@pytest.mark.exhaustive
def test_engines_follow_one_is_lost_and_started_again_at_its_address(cluster, job_of, tmp_path):
    with job_of(router=settings_for_router("vllm")) as job:
        urls = [kept.url for kept in job.engines]
        sender = tx.WeightSender(tx.make_transport("delta", root=tmp_path / "root"), job.model("a").fleet())
        policy = tiny_model(1)
        assert [row.state for row in sender.update_weights(policy).engines] == ["serving"] * 2
        psutil.Process(listeners(urls[0])[0]).kill()
        until, found = time.monotonic() + WAIT_S, ()
        while not found and time.monotonic() < until:  # its guard has to notice
            found = job.recover()
        assert found == (urls[0],)
        assert [kept.url for kept in job.engines] == urls
        for _ in range(2):
            try:
                report = sender.update_weights(policy)
            except tx.WeightSyncError:  # the one that was lost is told of once
                continue
        assert [row.state for row in report.engines] == ["serving"] * 2
        key = {"authorization": f"Bearer {job.model('a').api_key}"}
        versions = {httpx.get(f"{url}/weight_info", headers=key).json()["weight_version"] for url in urls}
        assert versions == {str(report.version)}
        sender.shutdown()
    assert not any(listeners(url) for url in urls)


def test_what_an_engine_refuses_reaches_the_job_in_its_own_words(cluster, job_of):
    with pytest.raises(ConfigError, match="'embedded' has no setting swap_space"):
        job_of(YAML.replace("num_gpus: 2", "num_gpus: 2, overrides: {swap-space: 4}"))


def test_a_cluster_without_room_is_a_deadline_and_says_what_is_asked_for(cluster, job_of):
    with pytest.raises(DeadlineError, match=r"a/regular/[01](.|\n)*ray status"):
        job_of(remote={"resources": {"nowhere": 1}}, start_timeout_s=3)


def test_an_engine_gets_what_ray_gave_its_actor_and_is_started_again_on_its_node(cluster, tmp_path):
    """One node alone has a device; Ray only counts it. Where the plan is started again, both would do."""
    options = iter([{"num_gpus": 1}, {"num_cpus": 1}])
    launcher = RayLauncher(dtype="float32", threads=1, remote=lambda _: next(options))
    asked, found = plan(tiny_checkpoint(tmp_path / "model"), gpus=(3,)), []
    for devices in ("0", None):
        engine = launcher.launch(asked)
        (environ,) = (psutil.Process(pid).environ() for pid in listeners(engine.url))
        assert environ.get("CUDA_VISIBLE_DEVICES") == devices
        found.append((engine.url, environ["RAY_RAYLET_PID"]))  # each node has one
        assert environ[API_KEY_VARIABLE] == launcher.api_key and len(launcher.api_key) > 30  # it made one
        engine.stop()
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_engine_is_opened_to_other_nodes_by_an_argument_alone(kind, monkeypatch):
    context = SimpleNamespace(get_accelerator_ids=dict, get_node_id=lambda: "node")
    util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.2")
    monkeypatch.setattr(ray, "_ray", lambda: SimpleNamespace(get_runtime_context=lambda: context, util=util))
    given = []
    monkeypatch.setattr(ray, "LocalLauncher", lambda **settings: given.append(settings.get("host")) or Silent())
    asked = replace(plan("/m"), kind=kind)
    for home in (None, "10.0.0.2"):
        ray._Node({}, home).launch(asked, ())
    assert given == ["10.0.0.2", None]
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1 of node 10\.0\.0\.2.*expose=True"):
        ray._Node({}, "10.0.0.1").launch(asked, ())
    assert len(given) == 2


class Silent:
    def launch(self, plan, encoders):
        return SimpleNamespace(url="http://there:1")


def test_a_start_that_is_given_up_ends_its_actor(cluster, tmp_path):
    cancel = threading.Event()
    cancel.set()
    launcher = RayLauncher(remote={"resources": {"nowhere": 1}})
    with pytest.raises(EngineError, match="a/regular/0 was abandoned"):
        launcher.launch(plan(tmp_path), cancel=cancel)
