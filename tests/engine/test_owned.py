"""A job's own engine: started from YAML, behind a router of its own, colocated with the trainer, started again."""

import os
import signal
import threading
import time

import httpx
import pytest

import torchrl_ext as tx
from tests.models import PROMPT, greedy, tiny_checkpoint, tiny_model
from tests.processes import WAIT_S
from torchrl_ext.cli.environments import settings_for, settings_for_router
from torchrl_ext.compat.flags.options import WeightUpdateConfig
from torchrl_ext.compat.flags.serving import make_serving
from torchrl_ext.compat.skyrl import RemoteInferenceClient
from torchrl_ext.serving.launchers import LocalLauncher
from torchrl_ext.serving.served import OwnedEngines

pytestmark = pytest.mark.engine

YAML = """
{kind}:
  - name: actor
    server_groups:
      - {{worker_type: regular, num_gpus: 1, overrides: {{dtype: float32, max-model-len: 256}}}}
"""


def settings(kind, **supervisor):
    """Engines and routers in the environments of the command line, and a supervisor that looks when it is told to."""
    return {
        "launcher": LocalLauncher(**settings_for(kind)),
        "router": settings_for_router(kind),
        "supervisor": {"interval_s": 0, "timeout_s": 5.0, **supervisor},
    }


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def job(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    path = folder / "engines.yaml"
    path.write_text(YAML.format(kind=request.param))
    config = WeightUpdateConfig(**{f"{request.param}_config": str(path), "rollout_num_gpus": 1})
    with make_serving(config, hf_checkpoint=tiny_checkpoint(folder / "seed0"), **settings(request.param)) as made:
        yield made


def asked(job):
    client = RemoteInferenceClient.of(job.model("actor"), timeout_s=120)
    batch = {
        "prompt_token_ids": [PROMPT],
        "sampling_params": {"max_tokens": 16, "temperature": 0, "ignore_eos": True},
    }
    try:
        found = client.run(client.generate(batch))
    finally:
        client.close()
    return found["response_ids"][0], set(found["weight_versions"][0])


@pytest.mark.parametrize(
    ("transport", "settings"), [("ipc", {}), pytest.param("delta", {"root": "root"}, marks=pytest.mark.exhaustive)]
)
def test_it_follows_the_trainer_is_started_again_and_catches_up(job, tmp_path, transport, settings):
    settings = {name: str(tmp_path / value) for name, value in settings.items()}
    actor = job.model("actor")
    (kept,) = job.engines
    sender = tx.WeightSender(tx.make_transport(transport, **settings), actor.fleet())
    update = actor.following(sender.update_weights)
    for seed in (1, 2):
        trained = tiny_model(seed)
        report = update(trained)
        assert report.verified
        assert asked(job) == (greedy(trained, PROMPT, 16), {report.version})
    os.kill(kept.engine.pid, signal.SIGKILL)
    until = time.monotonic() + WAIT_S
    while kept.engine.alive() and time.monotonic() < until:
        threading.Event().wait(0.05)
    assert job.recover() == (kept.url,)
    assert not actor.router.workers()  # it has the weights of its checkpoint again
    trained = tiny_model(3)
    report = update(trained)  # it is another process, which has joined nothing, and joins before it
    assert asked(job) == (greedy(trained, PROMPT, 16), {report.version})
    (info,) = tx.discover(kept.url)
    assert info.kind == kept.plan.kind and info.weight_version == str(report.version)
    sender.shutdown()


def test_a_sglang_that_is_paused_for_new_weights_is_not_lost(tmp_path):
    """Its own check of health generates a token, for which it would wait until it is resumed."""
    (tmp_path / "sglang.yaml").write_text(YAML.format(kind="sglang"))
    checkpoint = tiny_checkpoint(tmp_path / "seed0")
    with OwnedEngines(tmp_path / "sglang.yaml", hf_checkpoint=checkpoint, **settings("sglang", patience=0)) as job:
        (kept,) = job.engines
        assert job.recover() == ()
        httpx.post(f"{kept.url}/pause_generation", json={"mode": "retract"}).raise_for_status()
        for route in ("/health", "/ping"):
            assert httpx.get(kept.url + route, timeout=5.0).status_code == 200
        assert httpx.get(f"{kept.url}/ready", timeout=5.0).status_code == 503
        assert job.recover() == () and kept.restarts == 0
        httpx.post(f"{kept.url}/continue_generation", json={}).raise_for_status()
        assert asked(job)[0] == greedy(tiny_model(0), PROMPT, 16)
        assert [worker.healthy for worker in job.model("actor").router.workers()] == [True]
