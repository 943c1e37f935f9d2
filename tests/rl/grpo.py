"""A training run of TorchRL's `GRPOTrainer` on rollouts from a running engine."""

import torch
from tensordict import set_list_to_stack
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from torchrl.trainers.algorithms import GRPOTrainer

import torchrl_ext as tx
from torchrl_ext.cli.training import Trainer

GROUP = 2


@set_list_to_stack(True)  # as TorchRL's chat environments want it
def trained(url, checkpoint, transport, *, batches=2):
    """Train, and have the engine follow by `GRPOTrainer`'s own hook.

    Returns:
        The policy at the end; the versions that sampled each batch; the rewards; and the last report.
    """
    torch.manual_seed(0)
    parts, reports, versions, rewards = Trainer(checkpoint, group=GROUP), [], [], []
    turns = parts.task.turns
    with tx.WeightSender(transport, tx.connect(url)) as sender:
        sender.register_model(parts.model)
        sender.log_to(reports.append)
        sender.update_weights()
        policy = tx.RemoteLLMPolicy(
            # one request at a time makes the engine compute alike in each run
            tx.InferenceClient.connect(url, max_concurrency=1),
            tokenizer=parts.tokenizer,
            input_mode="text",
            generate_kwargs={"max_new_tokens": 8, "ignore_eos": True},
            seed=0,
        )

        def seen(batch):
            versions.append({*batch["token_versions", "response"].flatten().tolist()})
            rewards.append(batch["next", "reward"].mean().item())
            return batch

        collector = LLMCollector(
            parts.task.env(),
            policy=policy,
            dialog_turns_per_batch=turns,
            total_dialog_turns=batches * turns,
            postproc=seen,
            track_policy_version=True,
        )
        sender.register_collector(collector)
        actor = TransformersWrapper(parts.model, tokenizer=parts.tokenizer, input_mode="tokens", generate=False)
        trainer = GRPOTrainer(
            collector=collector,
            total_frames=batches * turns,
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
        trainer.train()
        assert collector.policy_version == batches
    assert [report.version for report in reports[1:]] == [reports[0].version + i for i in range(1, batches + 1)]
    assert versions == [{report.version} for report in reports[:-1]]
    return parts.model, rewards, reports[-1]
