"""The trainer of the demonstration: GRPO from TorchRL on a task whose reward anyone can check."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_ext.rollout.client import Generation

__all__ = ["DigitsTask", "Trainer"]

_PROMPTS = (
    "Count to ten: ",
    "The version is ",
    "Pause and load ",
    "Next weights: ",
    "one two three ",
    "Engine follows ",
    "0 1 2 3 4 5 6 ",
    "The policy is ",
)


class DigitsTask:
    """Continue a prompt with digits only; the reward is the share of new tokens that are made of digits.

    Args:
        tokenizer: of `transformers`.
        vocabulary: number of token ids that the model knows, which may exceed the tokenizer's.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
        self._is_digit = torch.zeros(vocabulary, dtype=torch.bool)
        self._is_digit[[token for token, text in enumerate(texts) if text.strip().isdecimal()]] = True
        ids = [tokenizer(prompt)["input_ids"] for prompt in _PROMPTS]
        shortest = min(len(prompt) for prompt in ids)
        self.prompts: list[list[int]] = [prompt[-shortest:] for prompt in ids]  # of one length: batches need no padding

    def reward(self, token_ids: Sequence[int]) -> float:
        """Share of ``token_ids`` that are digits: 0 to 1."""
        return self._is_digit[torch.tensor(token_ids)].float().mean().item()


class Trainer:
    """Trains a causal LM on generations that an engine made.

    Args:
        model_dir: Hugging Face checkpoint directory, where training starts.
        group: generations per prompt; rewards are compared within a group.
        learning_rate: of Adam.
        epochs: passes over each batch.
    """

    def __init__(self, model_dir: str | Path, *, group: int, learning_rate: float = 1e-2, epochs: int = 3) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True).eval()
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        self.task = DigitsTask(tokenizer, self.model.get_input_embeddings().weight.shape[0])
        actor = TransformersWrapper(
            self.model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=True
        )
        self._loss = GRPOLoss(actor, clip_epsilon=0.2, entropy_coeff=0.001, masking_strategy="sft")
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=learning_rate)
        self._group, self._epochs = group, epochs

    def step(self, prompts: Sequence[Sequence[int]], generations: Sequence[Generation]) -> tuple[float, float]:
        """One policy-gradient step on fresh generations.

        Args:
            prompts: token ids, all of one length.
            generations: those of each prompt together, all of one length, with log-probabilities.

        Returns:
            Mean reward of the generations, mean loss.
        """
        batch, rewards = self._batch(prompts, generations)
        buffer = ReplayBuffer(
            storage=LazyStackStorage(len(batch)),
            sampler=SamplerWithoutReplacement(),
            transform=MCAdvantage(grpo_size=self._group, prompt_key="group"),
            batch_size=len(batch) // 2,
        )
        buffer.extend(batch)
        losses = []
        for _ in range(self._epochs):
            for minibatch in buffer:
                out = self._loss(minibatch.reshape(-1))
                loss = out.loss_objective + out.loss_entropy
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self._optimizer.step()
                self._optimizer.zero_grad()
                losses.append(loss.item())
        return rewards.mean().item(), sum(losses) / len(losses)

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """The trainer's own greedy continuation of ``prompt``, by `transformers`."""
        ids = torch.tensor([list(prompt)])
        settings = {"do_sample": False, "max_new_tokens": max_tokens, "attention_mask": torch.ones_like(ids)}
        return tuple(self.model.generate(ids, **settings)[0, ids.shape[1] :].tolist())

    def _batch(self, prompts: Sequence[Sequence[int]], generations: Sequence[Generation]) -> tuple[TensorDict, Tensor]:
        """Generations as TorchRL's LLM objectives read them: one trajectory of one decision each."""
        repeated = [list(prompt) for prompt in prompts for _ in range(self._group)]
        prompt = torch.tensor(repeated)
        response = torch.tensor([generation.token_ids for generation in generations])
        full = torch.cat([prompt, response], dim=1)
        sampled = torch.tensor([generation.logprobs for generation in generations])
        rewards = torch.tensor([self.task.reward(generation.token_ids) for generation in generations])
        mine = torch.cat([torch.zeros_like(prompt), torch.ones_like(response)], dim=1).bool()
        count = len(generations)
        batch = TensorDict(
            {
                "group": torch.arange(len(prompts)).repeat_interleave(self._group),
                "tokens": {"prompt": prompt, "full": full},
                "masks": {"all_attention_mask": torch.ones_like(mine), "all_assistant_mask": mine},
                "log_probs": {"full": torch.cat([torch.zeros(prompt.shape), sampled], dim=1)},
                "next": {"reward": rewards.view(count, 1, 1), "done": torch.ones(count, 1, dtype=torch.bool)},
            },
            batch_size=[count],
        )
        return batch.unsqueeze(1), rewards
