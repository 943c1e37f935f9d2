"""A pool that prefills and one that decodes, real servers behind a real router, follow the trainer together."""

import ctypes
import json
import subprocess
import sys

import httpx
import pytest

import torchrl_ext as tx
from tests.models import greedy, tiny_model
from tests.real_engines.served import LONG, kept_keys
from torchrl_ext.cli.environments import settings_for, settings_for_router
from torchrl_ext.compat.skyrl import RemoteInferenceClient
from torchrl_ext.control.serving.topology import OwnedEngines

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]

MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"

WITHOUT_CUDA = """
import sys
if "sglang" in " ".join(sys.orig_argv) or "spawn_main" in " ".join(sys.orig_argv):
    import torch

    class Event:
        def record(self, stream=None): pass
        def synchronize(self): pass
        def query(self): return True

    torch.cuda.Event, torch.cuda.current_stream = Event, lambda device=None: None
"""
"""For SGLang's prefilling side, which asks CUDA when keys are computed: on a CPU they are when it asks."""


class VLLM:
    """Its pools hand on keys and values through files."""

    def __init__(self, folder, root):
        self._keys = folder / "keys"
        self._keys.mkdir()
        self.variables = {"PYTHONPATH": str(root)}  # where the servers find the connector

    def overrides(self, worker_type):
        role = {"prefill": "kv_producer", "decode": "kv_consumer"}[worker_type]
        return {"kv-transfer-config": kept_keys(role, self._keys)}

    def handed_on(self, prefill, decode):
        """Tokens whose keys and values the decoding server took from the other pool."""
        return counted(decode, "vllm:external_prefix_cache_hits_total") if any(self._keys.iterdir()) else 0.0


class SGLang:
    """Its pools hand on keys and values through Mooncake, here over TCP. Its decoding server never prefills."""

    def __init__(self, folder, root):
        try:
            ctypes.CDLL("libibverbs.so.1")
        except OSError:
            pytest.skip("Mooncake needs libibverbs.so.1 (Debian's libibverbs1)")
        (folder / "sitecustomize.py").write_text(WITHOUT_CUDA)
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, MOONCAKE]
        subprocess.run(install, check=True, timeout=300)
        self.variables = {"PYTHONPATH": str(folder), "MOONCAKE_PROTOCOL": "tcp"}

    def overrides(self, worker_type):
        backup = {"disaggregation-decode-retraction-backup": "cpu_tensor"} if worker_type == "decode" else {}
        return {"disaggregation-transfer-backend": "mooncake", "enable-metrics": True, **backup}

    def handed_on(self, prefill, decode):
        """Tokens of prompts that the prefilling server has seen."""
        return counted(prefill, "sglang:prompt_tokens_total")


@pytest.fixture(scope="module", params=[VLLM, SGLang])
def make(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("make"), request.config.rootpath)


@pytest.fixture(scope="module")
def job(make, checkpoint, tmp_path_factory):
    def group(worker_type):
        overrides = {"dtype": "float32", "max-model-len": 256, **make.overrides(worker_type)}
        return {"worker_type": worker_type, "num_gpus": 1, "overrides": overrides}

    kind, folder = type(make).__name__.lower(), tmp_path_factory.mktemp("job")
    model = {"name": "actor", "server_groups": [group("prefill"), group("decode")]}
    (folder / "job.yaml").write_text(json.dumps({kind: [model]}))
    patch = pytest.MonkeyPatch()
    for name, value in make.variables.items():
        patch.setenv(name, value)
    settings = {**settings_for(kind), "router": settings_for_router(kind)}
    with OwnedEngines(folder / "job.yaml", hf_checkpoint=checkpoint, **settings) as made:
        patch.undo()
        yield made


@pytest.fixture
def client(job):
    return RemoteInferenceClient.of(job.model("actor"), timeout_s=120)


def generate(client, prompt, count=24):
    sampling = {"max_tokens": count, "temperature": 0, "ignore_eos": True}
    return client.run(client.generate({"prompt_token_ids": [prompt], "sampling_params": sampling}))["response_ids"][0]


def counted(url, name):
    """The sum of one of a server's counters."""
    lines = httpx.get(f"{url}/metrics", follow_redirects=True).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("transport", ["disk", "collective"])
def test_prefill_and_decode_pools_serve_each_version(make, job, client, tmp_path, transport):
    actor = job.model("actor")
    (prefill,) = [info.url for info in actor.engines if info.worker_type == "prefill"]
    (decode,) = [info.url for info in actor.engines if info.worker_type == "decode"]
    settings = {"root": tmp_path / "updates"} if transport == "disk" else {}
    sender = tx.WeightSender(tx.make_transport(transport, **settings), actor.fleet())
    update = actor.following(sender.update_weights)
    for seed in (91, 92, 93):
        model, before = tiny_model(seed), make.handed_on(prefill, decode)
        report = update(model)
        assert {row.engine for row in report.engines} == {prefill, decode} and report.verified
        assert generate(client, LONG) == greedy(model, LONG, 24)
        assert make.handed_on(prefill, decode) > before  # else the pools worked each for itself
    sender.shutdown()
