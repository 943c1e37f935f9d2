"""TorchRL's `LLMCollector` with engines of other processes, from the first rollout to the end of a training run."""

import pytest
import torch
from tensordict import set_list_to_stack
from torchrl.collectors.llm import LLMCollector

import torchrl_ext as tx
from tests.embedded import EmbeddedServer
from torchrl_ext.cli.demo.training import Trainer
from torchrl_ext.rpc.http import HTTPSession
from torchrl_ext.testing.tiny import make_tiny_lm

GROUP = 2
SETTINGS = {"max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture(autouse=True)
def lists_are_stacks():
    with set_list_to_stack(True):
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_lm(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def servers(checkpoint):
    with EmbeddedServer(checkpoint, threads=1) as first, EmbeddedServer(checkpoint, threads=1) as second:
        yield [first, second]


@pytest.fixture
def trainer(checkpoint):
    return Trainer(checkpoint, group=GROUP)


def collector(trainer, policy, **settings):
    turns = trainer.task.turns
    return LLMCollector(trainer.task.env(), policy=policy, dialog_turns_per_batch=turns, **settings)


def remote(trainer, servers, **settings):
    client = tx.InferenceClient.connect(*(server.url for server in servers))
    settings = {"tokenizer": trainer.tokenizer, "input_mode": "text", "generate_kwargs": SETTINGS, **settings}
    return tx.RemoteLLMPolicy(client, **settings)


def sender_for(trainer, servers, transport="collective", **settings):
    sender = tx.WeightSender(tx.make_transport(transport, **settings), tx.connect(*(server.url for server in servers)))
    sender.register_model(trainer.model)
    return sender


def test_rollouts_follow_the_trainer_on_several_engines(servers, trainer):
    found = collector(trainer, remote(trainer, servers), total_dialog_turns=-1, track_policy_version=True)
    sender = sender_for(trainer, servers)
    sender.register_collector(found)
    rollouts = iter(found)
    for updates in range(1, 4):
        trained = sender.update_weights().version
        batch = next(rollouts)
        assert batch["token_versions", "response"].unique().tolist() == [trained]
        assert found.policy_version == updates
        assert batch["next", "policy_version"].unique().tolist() == [updates]
        trainer.step(batch)
    sender.shutdown()
    found.shutdown()


def test_swapping_the_transport_changes_nothing_else(servers, checkpoint, tmp_path):
    """One request at a time makes the engine compute alike in each run: rewards and weights agree bit by bit."""
    runs = {}
    for transport, settings in (
        ("collective", {}),
        ("disk", {"root": tmp_path / "disk"}),
        ("delta", {"root": tmp_path / "delta"}),
    ):
        torch.manual_seed(0)
        trainer = Trainer(checkpoint, group=4)
        sender = sender_for(trainer, servers[:1], transport, **settings)
        client = tx.InferenceClient(servers[0].url, max_concurrency=1)
        policy = tx.RemoteLLMPolicy(
            client, tokenizer=trainer.tokenizer, input_mode="text", generate_kwargs=SETTINGS, seed=0
        )
        sender.update_weights()
        rewards = []
        for rollouts in collector(trainer, policy, total_dialog_turns=2 * trainer.task.turns):
            rewards.append(trainer.step(rollouts)[0])
            sender.update_weights()
        sender.shutdown()
        runs[transport] = (rewards, HTTPSession(servers[0].url).get("/weights_digest")["digests"])
    assert runs["collective"] == runs["disk"] == runs["delta"]
    assert max(runs["disk"][0]) > 0
