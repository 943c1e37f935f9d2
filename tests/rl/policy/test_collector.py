"""TorchRL's `LLMCollector` with an engine of another process, from the first rollout to the end of a training run."""

import torch
from torchrl.collectors.llm import LLMCollector

import torchrl_ext as tx
from tests.engines.embedded import EmbeddedServer
from torchrl_ext.cli.training import Trainer
from torchrl_ext.control.http import HTTPSession
from torchrl_ext.testing.tiny import make_tiny_lm

SETTINGS = {"input_mode": "text", "generate_kwargs": {"max_new_tokens": 8, "ignore_eos": True}, "seed": 0}


def trained(server, checkpoint, transport):
    """Train for two batches; returns the rewards and the digests of the engine's weights at the end."""
    torch.manual_seed(0)
    trainer = Trainer(checkpoint, group=4)
    turns, rewards = trainer.task.turns, []
    with tx.WeightSender(transport, tx.connect(server.url)) as sender:
        sender.register_model(trainer.model)
        # one request at a time makes the engine compute alike in each run
        client = tx.InferenceClient(server.url, max_concurrency=1)
        policy = tx.RemoteLLMPolicy(client, tokenizer=trainer.tokenizer, **SETTINGS)
        collector = LLMCollector(
            trainer.task.env(),
            policy=policy,
            dialog_turns_per_batch=turns,
            total_dialog_turns=2 * turns,
            track_policy_version=True,
        )
        sender.register_collector(collector)
        sender.update_weights()
        for batch in collector:
            assert batch["token_versions", "response"].unique().tolist() == [sender.version]
            assert batch["next", "policy_version"].unique().tolist() == [1 + len(rewards)]
            rewards.append(trainer.step(batch)[0])
            sender.update_weights()
    return rewards, HTTPSession(server.url).get("/weights_digest")["digests"]


def test_swapping_the_transport_changes_nothing_else(tmp_path):
    checkpoint = make_tiny_lm(tmp_path / "model")
    with EmbeddedServer(checkpoint, threads=1) as server:
        runs = [
            trained(server, checkpoint, tx.make_transport(name, **({} if name == "collective" else {"root": root})))
            for name, root in (("collective", None), ("disk", tmp_path / "disk"), ("delta", tmp_path / "delta"))
        ]
    assert runs[0] == runs[1] == runs[2]
    assert max(runs[0][0]) > 0
