"""TorchRL's own `GRPOTrainer` with a sender of ours: engines follow after each batch, by whatever transport."""

from __future__ import annotations

import pytest
import torch
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from torchrl.trainers.algorithms import GRPOTrainer

import torchrl_ext as tx
from tests.engines.embedded import EmbeddedServer
from tests.models import greedy
from torchrl_ext.cli.training import Trainer
from torchrl_ext.testing.tiny import make_tiny_lm

GROUP, BATCHES = 2, 3
PROMPT = [5, 9, 12, 4]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_lm(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(checkpoint):
    with EmbeddedServer(checkpoint, threads=1) as running:
        yield running


@pytest.mark.parametrize("name", ["collective", "delta", "disk", "ipc"])
def test_engines_hold_the_policy_that_it_ends_with(name, server, checkpoint, tmp_path):
    parts, settings = Trainer(checkpoint, group=GROUP), {"root": tmp_path} if name in ("delta", "disk") else {}
    turns = parts.task.turns
    sender = tx.WeightSender(tx.make_transport(name, **settings), tx.connect(server.url))
    sender.register_model(parts.model)
    before = sender.update_weights().version
    actor = TransformersWrapper(parts.model, tokenizer=parts.tokenizer, input_mode="tokens", generate=False)
    collector = LLMCollector(
        parts.task.env(),
        policy=tx.RemoteLLMPolicy(
            server.url,
            tokenizer=parts.tokenizer,
            input_mode="text",
            generate_kwargs={"max_new_tokens": 8, "ignore_eos": True},
        ),
        dialog_turns_per_batch=turns,
        total_dialog_turns=BATCHES * turns,
        track_policy_version=True,
    )
    sender.register_collector(collector)
    start = collector.policy_version
    with pytest.warns(UserWarning, match="experimental"):
        trainer = GRPOTrainer(
            collector=collector,
            total_frames=BATCHES * turns,
            loss_module=GRPOLoss(actor, clip_epsilon=0.2, entropy_coeff=0.001, masking_strategy="sft"),
            optimizer=torch.optim.Adam(parts.model.parameters(), lr=1e-2),
            replay_buffer=ReplayBuffer(
                storage=LazyStackStorage(turns),
                sampler=SamplerWithoutReplacement(),
                transform=MCAdvantage(grpo_size=GROUP),
                batch_size=turns // 2,
            ),
            weight_sync_sender=sender,
            empty_replay_buffer_on_weight_update=True,
            progress_bar=False,
            log_kl=False,
            log_rewards=False,
        )
    first = {key: tensor.clone() for key, tensor in parts.model.state_dict().items()}
    trainer.train()
    assert sender.version == before + BATCHES and collector.policy_version == start + BATCHES
    assert any(not torch.equal(first[key], tensor) for key, tensor in parts.model.state_dict().items())
    (said,) = tx.InferenceClient(server.url).generate([PROMPT], max_tokens=12, temperature=0, ignore_eos=True)
    assert list(said.token_ids) == greedy(parts.model, PROMPT, 12)
    assert set(said.token_versions()) == {sender.version}
    sender.shutdown()
