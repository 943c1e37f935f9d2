"""The inference client and the demonstration against a stock vLLM server."""

import json
import subprocess
import sys

import pytest

import torchrl_ext as tx
from tests.models import PROMPT, greedy, tiny_model
from tests.processes import ROOT
from torchrl_ext.rollout.client import InferenceClient

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
    command = [sys.executable, "-m", "torchrl_ext.cli.main", "demo", "--engines", vllm.url, "--steps", "2", "--json"]
    done = subprocess.run([*command, "--transport", transport], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["verified"] and told["engine"] == "vllm" and not vllm.paused()
    assert len(told["syncs"]) == 3
