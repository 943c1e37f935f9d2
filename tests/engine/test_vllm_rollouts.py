"""Rollouts from stock vLLM servers: the policy, the collector, and a training run that learns."""

import json

import pytest
import torch
from tensordict import set_list_to_stack
from torchrl.collectors.llm import LLMCollector
from torchrl.modules.llm import TransformersWrapper

import torchrl_ext as tx
from tests.models import tiny_model, tiny_tokenizer
from tests.processes import COMMAND, finished
from tests.rollout.inputs import TEMPLATE, leaves, prompts
from torchrl_ext.cli.demo.training import Trainer
from torchrl_ext.rollout.torchrl.lag import MaxLag

pytestmark = pytest.mark.engine

GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(autouse=True)
def lists_are_stacks():
    with set_list_to_stack(True):
        yield


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_entries_agree_with_torchrls_wrapper_on_the_same_model(vllm, tmp_path, mode):
    own, tokenizer = tiny_model(17), tiny_tokenizer()
    sender = tx.WeightSender(tx.make_transport("disk", root=tmp_path / "updates"), tx.make_engine("vllm", url=vllm.url))
    version = sender.update_weights(own).version
    sender.shutdown()
    settings = {"tokenizer": tokenizer, "input_mode": mode, "generate_kwargs": GREEDY, **TEMPLATE[mode]}
    expected = leaves(TransformersWrapper(own, **settings)(prompts(mode, tokenizer)))
    found = leaves(tx.RemoteLLMPolicy(vllm.url, **settings)(prompts(mode, tokenizer)))
    for key, rows in expected.items():
        for mine, wanted in zip(found[key], rows, strict=True):
            if key == ("log_probs", "response"):  # TransformersWrapper says 0 for the first token
                torch.testing.assert_close(mine[1:], wanted[1:], atol=1e-3, rtol=0)
            else:
                assert torch.equal(mine, wanted), key
    assert {number for rows in found["token_versions", "response"] for number in rows.tolist()} == {version}


def test_a_collector_follows_two_servers(vllm, second_vllm, checkpoint, tmp_path):
    trainer = Trainer(checkpoint, group=2)
    urls = [vllm.url, second_vllm.url]
    policy = tx.RemoteLLMPolicy(
        urls, tokenizer=trainer.tokenizer, input_mode="text", generate_kwargs={"max_new_tokens": 8, "ignore_eos": True}
    )
    turns = trainer.task.turns
    collector = LLMCollector(
        trainer.task.env(),
        policy=policy,
        dialog_turns_per_batch=turns,
        total_dialog_turns=-1,
        track_policy_version=True,
        postproc=MaxLag(0, lambda: sender.version),
    )
    sender = tx.WeightSender(tx.make_transport("delta", root=tmp_path / "updates"), tx.connect(*urls))
    sender.register_model(trainer.model)
    sender.register_collector(collector)
    rollouts = iter(collector)
    for bumps in range(1, 4):
        report = sender.update_weights()
        batch = next(rollouts)
        assert batch["token_versions", "response"].unique().tolist() == [report.version]
        assert collector.policy_version == bumps
        trainer.step(batch)
    sender.shutdown()
    collector.shutdown()


@pytest.mark.exhaustive
def test_training_learns_with_two_external_servers_that_follow_by_delta(vllm, second_vllm, tmp_path):
    arguments = ["--json", "--transport", "delta", "--steps", "5", "--root", tmp_path / "updates"]
    done = finished(COMMAND, "demo", *arguments, "--engines", vllm.url, second_vllm.url, timeout_s=600)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["verified"] and told["on_policy"] and told["transport"] == "delta" and told["engine"] == "vllm"
    assert told["engines"] == [vllm.url, second_vllm.url]
    rewards = told["rewards"]
    assert rewards[-1] > 2 * rewards[0], rewards
    for server in (vllm, second_vllm):
        assert server.version() == str(told["syncs"][-1]["version"]) and not server.paused()
