"""A pool that prefills and one that decodes, real vLLM servers behind a real router, follow the trainer together."""

import json
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import httpx
import pytest

import torchrl_ext as tx
from tests.models import VOCAB, greedy, tiny_checkpoint, tiny_model
from torchrl_ext.rollout.serving import OwnedEngines

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]

LONG = [(7 * i + 3) % (VOCAB - 3) + 3 for i in range(180)]
"""Longer than a block: what is shorter is not handed on."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """The folder through which keys and values go from one pool to the other."""
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def job(request, keys, tmp_path_factory):
    def group(worker_type, role):
        connector = {
            "kv_connector": "KeptKeys",
            "kv_connector_module_path": "tests.engine.kept_keys",
            "kv_role": role,
            "kv_connector_extra_config": {"shared_storage_path": str(keys)},
        }
        overrides = {"dtype": "float32", "max-model-len": 256, "kv-transfer-config": connector}
        return {"worker_type": worker_type, "num_gpus": 1, "overrides": overrides}

    groups = [group("prefill", "kv_producer"), group("decode", "kv_consumer")]
    folder = tmp_path_factory.mktemp("job")
    (folder / "vllm.yaml").write_text(json.dumps({"vllm": [{"name": "actor", "server_groups": groups}]}))
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", str(request.config.rootpath))  # where the servers find the connector
    with OwnedEngines(folder / "vllm.yaml", hf_checkpoint=tiny_checkpoint(folder / "seed0")) as made:
        patch.undo()
        yield made


@pytest.fixture
def client(job):
    made = job.model("actor").client(timeout_s=120)
    yield made
    made.close()


def generate(client, prompt, count=24):
    batch = {
        "prompt_token_ids": [prompt],
        "sampling_params": {"max_tokens": count, "temperature": 0, "ignore_eos": True},
    }
    return client.run(client.generate(batch))["response_ids"][0]


def hits(url):
    """Tokens whose keys and values a server took from the other pool."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:external_prefix_cache_hits_total"))


@pytest.mark.parametrize("transport", ["disk", "collective"])
def test_both_pools_serve_each_version_and_no_key_of_the_one_before(job, client, keys, tmp_path, transport):
    actor = job.model("actor")
    (prefill,) = [info.url for info in actor.engines if info.worker_type == "prefill"]
    (decode,) = [info.url for info in actor.engines if info.worker_type == "decode"]
    settings = {"root": tmp_path / "updates"} if transport == "disk" else {}
    sender = tx.WeightSender(tx.make_transport(transport, **settings), actor.fleet())
    update = actor.following(sender.update_weights)
    for seed in (91, 92, 93):
        model, before = tiny_model(seed), hits(decode)
        report = update(model)
        assert {row.engine for row in report.engines} == {prefill, decode} and report.verified
        assert generate(client, LONG) == greedy(model, LONG, 24)
        assert list(keys.iterdir()) and hits(decode) > before  # else the pools worked each for itself
    sender.shutdown()


def test_requests_are_answered_while_both_pools_change(job, client, tmp_path):
    actor, over = job.model("actor"), Event()
    sender = tx.WeightSender(tx.make_transport("disk", root=tmp_path / "updates"), actor.fleet())
    update = actor.following(sender.update_weights)
    update(tiny_model(94))

    def asking(first):
        found = []
        while not over.is_set():
            found.append(generate(client, [first, *LONG[1:]], 32))
        return found

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(asking, 5 + i) for i in range(3)]
        try:
            for seed in (95, 96):
                update(tiny_model(seed))
        finally:
            over.set()
        answers = [tokens for future in running for tokens in future.result()]
    assert answers and all(len(tokens) == 32 for tokens in answers)
    assert generate(client, LONG) == greedy(tiny_model(96), LONG, 24)
    sender.shutdown()
