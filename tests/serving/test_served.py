"""Engines that a job owns, and engines that it does not: real processes behind real routers."""

from __future__ import annotations

import os
import signal
import threading
import time

import httpx
import psutil
import pytest

import torchrl_ext as tx
from tests.models import PROMPT, greedy, tiny_checkpoint, tiny_model
from tests.processes import WAIT_S
from torchrl_ext.cli.environments import settings_for_router
from torchrl_ext.errors import ConfigError
from torchrl_ext.serving.launchers import LocalLauncher
from torchrl_ext.serving.served import OwnedEngines

pytestmark = pytest.mark.engine

YAML = """
embedded:
  - name: actor
    server_groups:
      - {worker_type: regular, num_gpus: 2, overrides: {dtype: float32, threads: 1}}
  - name: reference
    update_weights: false
    server_groups:
      - {worker_type: regular, num_gpus: 1, overrides: {dtype: float32, threads: 1}}
  - name: spare
    server_groups: []
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "seed0")


@pytest.fixture(scope="module")
def job(checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("job") / "engines.yaml"
    path.write_text(YAML)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrl_ext.serving.processes._GRACE_S", 2.0)  # for an engine that hangs, and heeds no SIGTERM
        with OwnedEngines(
            path,
            hf_checkpoint=checkpoint,
            router=settings_for_router("vllm"),
            supervisor={"interval_s": 0, "timeout_s": 1.0},
        ) as made:
            yield made


def listed(model):
    return {worker.url for worker in model.router.workers()}


def urls(job, name):
    return [kept.url for kept in job.engines if kept.plan.model == name]


def version(url):
    return httpx.get(f"{url}/weight_info").json()["weight_version"]


def generated(model):
    client = model.client(timeout_s=60)
    try:
        (found,) = client.generate([PROMPT], max_tokens=8, temperature=0, ignore_eos=True)
        return found
    finally:
        client.close()


def kill(job, url):
    (kept,) = (kept for kept in job.engines if kept.url == url)
    os.kill(kept.engine.pid, signal.SIGKILL)
    until = time.monotonic() + WAIT_S
    while kept.engine.alive() and time.monotonic() < until:
        threading.Event().wait(0.02)


def test_each_model_has_its_engines_and_a_router_of_its_own(job):
    assert {name: len(urls(job, name)) for name in job.models} == {"actor": 2, "reference": 1, "spare": 0}
    assert len({model.url for model in job.models.values()}) == 3
    for name in ("actor", "reference"):
        assert listed(job.model(name)) == set(urls(job, name))
        assert generated(job.model(name)).token_ids == tuple(greedy(tiny_model(0), PROMPT, 8))
    assert httpx.get(f"{job.model('spare').url}/list_workers").json() == {"urls": []}


def test_only_models_that_follow_the_trainer_ever_get_a_weight_call(job, tmp_path):
    assert list(job.updatable()) == ["actor"]
    with pytest.raises(ConfigError, match="'reference' does not follow the trainer"):
        job.model("reference").fleet()
    with pytest.raises(ConfigError, match=r"no model called 'critic'.*actor, reference, spare"):
        job.model("critic")
    actor = job.model("actor")
    sender = tx.WeightSender(tx.make_transport("disk", root=str(tmp_path)), actor.fleet())
    trained = tiny_model(5)
    sender.register_model(trained)
    update = actor.following(sender.update_weights)
    report = update()
    sender.shutdown()
    assert [version(url) for url in urls(job, "actor")] == [str(report.version)] * 2
    assert version(urls(job, "reference")[0]) == "default"
    found = generated(actor)
    assert found.token_ids == tuple(greedy(trained, PROMPT, 8))
    assert found.token_versions() == [report.version] * 8
    assert generated(job.model("reference")).token_ids == tuple(greedy(tiny_model(0), PROMPT, 8))


@pytest.mark.exhaustive
def test_a_lost_engine_is_started_again_and_gets_requests_once_it_caught_up(job, tmp_path):
    actor = job.model("actor")
    lost, other = urls(job, "actor")
    kill(job, lost)
    assert job.recover() == (lost,)
    assert listed(actor) == {other}  # it has the weights of its checkpoint
    sender = tx.WeightSender(tx.make_transport("disk", root=str(tmp_path)), actor.fleet())
    trained = tiny_model(6)
    sender.register_model(trained)
    actor.following(sender.update_weights)()
    sender.shutdown()
    assert listed(actor) == {lost, other}
    assert generated(actor).token_ids == tuple(greedy(trained, PROMPT, 8))
    assert job.recover() == ()


@pytest.mark.exhaustive
def test_an_engine_that_hangs_is_lost_too_and_one_of_a_frozen_model_gets_requests_as_soon_as_it_is_up(job):
    (kept,) = (kept for kept in job.engines if kept.plan.model == "reference")
    frozen = psutil.Process(kept.engine.pid)
    frozen.suspend()
    try:
        until = time.monotonic() + WAIT_S
        while not kept.restarts and time.monotonic() < until:
            job.recover()  # patience counts looks
    finally:
        if frozen.is_running():
            frozen.resume()
    assert kept.restarts == 1 and httpx.get(f"{kept.url}/health").status_code == 200
    assert listed(job.model("reference")) == {kept.url}


@pytest.mark.exhaustive
def test_the_supervisor_looks_by_itself_and_the_end_of_the_job_is_the_end_of_its_processes(checkpoint, tmp_path):
    path = tmp_path / "engines.yaml"
    path.write_text("embedded: [{name: a, server_groups: [{worker_type: regular, num_gpus: 1}]}]")
    launcher = LocalLauncher(dtype="float32", threads=1, log_folder=tmp_path / "logs")
    more = {"supervisor": {"first_wait_s": 0.1, "interval_s": 0.1}, "router": settings_for_router("vllm")}
    with OwnedEngines(path, hf_checkpoint=checkpoint, launcher=launcher, **more) as job:
        (kept,) = job.engines
        os.kill(kept.engine.pid, signal.SIGKILL)
        until = time.monotonic() + WAIT_S
        while not kept.restarts and time.monotonic() < until:
            threading.Event().wait(0.05)
        assert kept.restarts == 1
        process = psutil.Process(kept.engine.pid)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert [log.name for log in (tmp_path / "logs").iterdir()] == ["a-regular-0.log"]
