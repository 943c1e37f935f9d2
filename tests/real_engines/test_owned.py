"""A job's own engine: started from YAML, behind a router of its own, colocated with the trainer."""

import httpx
import pytest

import torchrl_ext as tx
from tests.models import PROMPT, greedy, tiny_model
from torchrl_ext.cli.environments import settings_for, settings_for_router
from torchrl_ext.compat.flags.options import WeightUpdateConfig
from torchrl_ext.compat.flags.serving import make_serving

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]

YAML = """
{kind}:
  - name: actor
    server_groups:
      - {{worker_type: regular, num_gpus: 1, overrides: {{dtype: float32, max-model-len: 256}}}}
"""


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def job(request, checkpoint, tmp_path_factory):
    """In the environments of the command line."""
    kind, path = request.param, tmp_path_factory.mktemp("job") / "engines.yaml"
    path.write_text(YAML.format(kind=kind))
    config = WeightUpdateConfig(**{f"{kind}_config": str(path)})
    settings = {**settings_for(kind), "router": settings_for_router(kind)}
    with make_serving(config, hf_checkpoint=checkpoint, **settings) as made:
        yield made


def asked(job):
    """Greedy tokens, and the versions that sampled them."""
    client = job.model("actor").client(timeout_s=120.0)
    try:
        (found,) = client.generate([PROMPT], max_tokens=16, temperature=0.0, ignore_eos=True)
    finally:
        client.close()
    return list(found.token_ids), set(found.token_versions())


@pytest.mark.parametrize("job", ["sglang"], indirect=True)
def test_a_paused_sglang_is_healthy_for_its_router(job):
    """Its own check of health generates a token, for which it would wait until it is resumed."""
    (engine,) = job.engines.values()
    httpx.post(f"{engine.url}/pause_generation", json={"mode": "retract"}).raise_for_status()
    for route in ("/health", "/ping"):
        assert httpx.get(engine.url + route, timeout=5.0).status_code == 200
    assert httpx.get(f"{engine.url}/ready", timeout=5.0).status_code == 503
    httpx.post(f"{engine.url}/continue_generation", json={}).raise_for_status()
    assert asked(job)[0] == greedy(tiny_model(0), PROMPT, 16)
    assert len(job.model("actor").router.workers()) == 1


@pytest.mark.parametrize("transport", ["ipc", pytest.param("delta", marks=pytest.mark.exhaustive)])
def test_it_follows_the_trainer(job, tmp_path, transport):
    settings = {"root": str(tmp_path)} if transport == "delta" else {}
    actor = job.model("actor")
    sender = tx.WeightSender(tx.make_transport(transport, **settings), actor.fleet())
    update = actor.following(sender.update_weights)
    for seed in (1, 2):
        trained = tiny_model(seed)
        report = update(trained)
        assert report.verified
        assert asked(job) == (greedy(trained, PROMPT, 16), {report.version})
    sender.shutdown()
