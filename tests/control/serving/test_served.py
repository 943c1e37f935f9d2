"""Engines that a job owns, and engines that it does not: real processes behind real routers."""

from __future__ import annotations

import httpx
import pytest

import torchrl_ext as tx
from tests.models import PROMPT, greedy, tiny_checkpoint, tiny_model
from torchrl_ext.base.errors import ConfigError
from torchrl_ext.cli.environments import settings_for_router
from torchrl_ext.control.serving.topology import OwnedEngines

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
    with OwnedEngines(path, hf_checkpoint=checkpoint, router=settings_for_router("vllm")) as made:
        yield made


def listed(model):
    return {worker.url for worker in model.router.workers()}


def urls(job, name):
    return [engine.url for plan, engine in job.engines.items() if plan.startswith(f"{name}/")]


def version(url):
    return httpx.get(f"{url}/weight_info").json()["weight_version"]


def generated(model):
    client = model.client(timeout_s=60)
    try:
        (found,) = client.generate([PROMPT], max_tokens=8, temperature=0, ignore_eos=True)
        return found
    finally:
        client.close()


def test_each_model_has_its_engines_and_a_router_of_its_own(job):
    assert {name: len(urls(job, name)) for name in job.models} == {"actor": 2, "reference": 1, "spare": 0}
    assert len({model.url for model in job.models.values()}) == 3
    for name in ("actor", "reference"):
        assert listed(job.model(name)) == set(urls(job, name))
        assert generated(job.model(name)).token_ids == tuple(greedy(tiny_model(0), PROMPT, 8))
    assert listed(job.model("spare")) == set()


def test_only_models_that_follow_the_trainer_get_weight_calls(job, tmp_path):
    assert [name for name, model in job.models.items() if model.update_weights] == ["actor"]
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
