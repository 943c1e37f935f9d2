"""Rollouts from a stock SGLang server: the same policy, the same demonstration, another kind of engine."""

import json
import subprocess
import sys

import pytest
import torch
from tensordict import set_list_to_stack
from torchrl.modules.llm import TransformersWrapper

import torchrl_ext as tx
from tests.models import tiny_model, tiny_tokenizer
from tests.processes import ROOT
from tests.rollout.inputs import TEMPLATE, leaves, prompts

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_entries_agree_with_torchrls_wrapper_on_the_same_model(sglang, tmp_path, mode):
    own, tokenizer = tiny_model(19), tiny_tokenizer()
    sender = tx.WeightSender(tx.make_transport("disk", root=tmp_path / "updates"), tx.connect(sglang.url))
    version = sender.update_weights(own).version
    sender.shutdown()
    settings = {"tokenizer": tokenizer, "input_mode": mode, **TEMPLATE[mode]}
    settings["generate_kwargs"] = {"max_new_tokens": 12, "do_sample": False}
    with set_list_to_stack(True):
        expected = leaves(TransformersWrapper(own, **settings)(prompts(mode, tokenizer)))
        found = leaves(tx.RemoteLLMPolicy(sglang.url, **settings)(prompts(mode, tokenizer)))
    for key, rows in expected.items():
        for mine, wanted in zip(found[key], rows, strict=True):
            if key == ("log_probs", "response"):  # TransformersWrapper says 0 for the first token
                torch.testing.assert_close(mine[1:], wanted[1:], atol=1e-3, rtol=0)
            else:
                assert torch.equal(mine, wanted), key
    assert {number for rows in found["token_versions", "response"] for number in rows.tolist()} == {version}


def test_several_samples_of_a_prompt_differ(sglang):
    client = tx.InferenceClient.connect(sglang.url)
    found = client.generate([[3, 17, 42], [3, 17]], n=3, max_tokens=8, ignore_eos=True)
    assert len(found) == 6 and all(len(one.token_ids) == len(one.logprobs) == 8 for one in found)
    assert len({one.token_ids for one in found}) > 3


def test_the_demo_proves_itself_on_sglang(sglang, checkpoint):
    command = [sys.executable, "-m", "torchrl_ext.cli.main", "demo", "--json", "--steps", "2", "--transport", "disk"]
    done = subprocess.run(
        [*command, "--engines", sglang.url, "--model", str(checkpoint)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["verified"] and told["engine"] == "sglang" and len(told["syncs"]) == 3
