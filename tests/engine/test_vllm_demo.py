"""The inference client and the demonstration against a stock vLLM server."""

import json

import pytest

import torchrl_ext as tx
from tests.models import PROMPT, greedy, tiny_model
from tests.processes import COMMAND, finished
from torchrl_ext.rollout.client import InferenceClient
from torchrl_ext.testing.tiny import make_tiny_lm
from torchrl_ext.weights.checkpoint import CheckpointSource

pytestmark = pytest.mark.engine


def test_the_client_reads_tokens_log_probabilities_and_versions(vllm, tmp_path):
    own = tiny_model(41)
    sender = tx.WeightSender(tx.make_transport("disk", root=tmp_path / "updates"), tx.make_engine("vllm", url=vllm.url))
    version = sender.update_weights(own).version
    sender.shutdown()
    prompts = [PROMPT, PROMPT[:3]]
    found = InferenceClient(vllm.url).generate(prompts, n=2, max_tokens=12, temperature=0.0, ignore_eos=True)
    assert [list(one.token_ids) for one in found] == [greedy(own, prompt, 12) for prompt in prompts for _ in range(2)]
    for one in found:
        assert len(one.logprobs) == 12 and max(one.logprobs) <= 0 and one.finish_reason == "length"
        assert [(span.version, span.start, span.end) for span in one.weight_versions] == [(str(version), 0, 12)]


@pytest.mark.parametrize("transport", ["disk", "collective"])
def test_the_demo_proves_itself_on_vllm(vllm, transport):
    arguments = ["--engines", vllm.url, "--steps", "2", "--json", "--transport", transport]
    done = finished(COMMAND, "demo", *arguments, timeout_s=300)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["verified"] and told["engine"] == "vllm" and not vllm.paused()
    assert len(told["syncs"]) == 3


def held_by_worker(model_dir, workers):
    """Bytes of a Qwen3 that one of ``workers`` tensor-parallel workers holds: all of a norm, its part of the rest."""
    whole, parts = 0, 0
    for name, tensor in CheckpointSource(model_dir):
        if name.endswith("norm.weight"):
            whole += tensor.nbytes
        else:
            parts += tensor.nbytes
    return whole + parts // workers


def test_two_trainer_ranks_send_two_workers_their_slices_and_nothing_else(tmp_path):
    sharded = ["--transport", "sharded", "--trainer-ranks", "2", "--engine", "vllm", "--tp", "2"]
    done = finished(COMMAND, "demo", *sharded, "--steps", "2", "--json", timeout_s=600)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["verified"] and told["weights_equal"] and told["greedy_equal"]
    assert (told["engine"], told["trainer_ranks"], told["tp"]) == ("vllm", 2, 2)
    checkpoint = make_tiny_lm(tmp_path)
    held = held_by_worker(checkpoint, 2)
    model_bytes = sum(tensor.nbytes for _, tensor in CheckpointSource(checkpoint))
    assert model_bytes / 2 < held < 0.6 * model_bytes
    assert len(told["syncs"]) == 3
    for report in told["syncs"]:
        assert report["verified"] and report["model_bytes"] == model_bytes and not report["whole"]
        assert len(report["worker_bytes"]) == 2 and max(report["worker_bytes"]) <= 1.02 * held
        assert len(report["rank_bytes"]) == 2 and max(report["rank_bytes"]) <= 1.1 * sum(report["rank_bytes"]) / 2
