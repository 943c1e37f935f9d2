"""Trains the demo's policy: TorchRL's GRPO on a task with a reward that anyone can check."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch.utils.data import DataLoader, Dataset
from torchrl.data import Composite, LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement, Unbounded
from torchrl.envs import EnvBase, InitTracker, Transform
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

__all__ = ["DigitsReward", "DigitsTask", "Trainer", "greedy", "quiet", "rounded"]

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
_GROUP, _LEARNING_RATE, _EPOCHS = 16, 1e-2, 2
_AS_IT_IS = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class DigitsReward(Transform):  # type: ignore[misc]  # torchrl has no types
    """Rewards a response with the share of its tokens that are made of digits, 0 to 1, and ends the dialog.

    Args:
        tokenizer: of `transformers`.
        vocabulary: number of token ids that the model knows, which may exceed the tokenizer's.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        super().__init__()
        texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
        self._is_digit = torch.zeros(vocabulary, dtype=torch.bool)
        self._is_digit[[token for token, text in enumerate(texts) if text.strip().isdecimal()]] = True

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        responses = [row["tokens", "response"] for row in tensordict.unbind(0)]
        shares = torch.tensor([self._is_digit[tokens].float().mean().item() for tokens in responses])
        done = torch.ones(len(responses), 1, dtype=torch.bool)
        next_tensordict.set("reward", shares.view(-1, 1, 1))  # batch, tokens (one reward for all of them), value
        return next_tensordict.set("done", done).set("terminated", done.clone())

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1, 1))
        return reward_spec


class DigitsTask:
    """The task of continuing a prompt with digits only.

    Args:
        tokenizer: of `transformers`.
        vocabulary: number of token ids that the model knows.
        group: continuations per prompt, whose rewards are compared with each other.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, *, group: int) -> None:
        self._tokenizer, self._vocabulary, self._group = tokenizer, vocabulary, group
        self.prompts: list[list[int]] = [tokenizer(prompt)["input_ids"] for prompt in _PROMPTS]
        self.turns = len(_PROMPTS) * group

    def env(self) -> EnvBase:
        """Make a chat environment of batch size ``(turns,)``: one dialog turn of every prompt, ``group`` times."""
        prompts = cast("Dataset[str]", _PROMPTS)  # torch takes any sequence, and does not say so
        loader = DataLoader(prompts, batch_size=1, collate_fn=lambda rows: TensorDict(query=rows, batch_size=[1]))
        env = ChatEnv.from_dataloader(
            loader,
            repeats=self._group,
            batch_size=(self.turns,),
            input_mode="text",
            tokenizer=self._tokenizer,
            template_kwargs={"chat_template": _AS_IT_IS},
        )
        return env.append_transform(DigitsReward(self._tokenizer, self._vocabulary)).append_transform(InitTracker())


class Trainer:
    """Trains a causal LM, in float32, on rollouts by GRPO, with Adam.

    Args:
        model_dir: Hugging Face checkpoint directory where training starts.
        group: generations per prompt; rewards are compared within a group.
        seed: of the order of minibatches.
    """

    def __init__(self, model_dir: str | Path, *, group: int = _GROUP, seed: int = 0) -> None:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
        self.model: Any = model.eval()  # type: ignore[no-untyped-call]  # transformers leaves it so; no dropout
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        self.task = DigitsTask(self.tokenizer, self.model.get_input_embeddings().weight.shape[0], group=group)
        actor = TransformersWrapper(self.model, tokenizer=self.tokenizer, input_mode="tokens", generate=False)
        self._loss = GRPOLoss(actor, clip_epsilon=0.2, entropy_coeff=0.001, masking_strategy="sft")
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=_LEARNING_RATE)
        self._group, self._seed, self._steps = group, seed, 0

    def step(self, batch: TensorDictBase) -> tuple[float, float]:
        """Take policy-gradient steps on rollouts.

        Args:
            batch: rollouts of an `LLMCollector`.

        Returns:
            Mean reward of the rollouts, mean loss.
        """
        self._steps += 1
        rollouts = batch.reshape(-1)
        buffer = ReplayBuffer(
            storage=LazyStackStorage(len(rollouts)),
            sampler=SamplerWithoutReplacement(),
            transform=MCAdvantage(grpo_size=self._group),
            batch_size=len(rollouts) // 2,
        )
        buffer.extend(rollouts)
        losses = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed * 1_000_003 + self._steps)
            for _ in range(_EPOCHS):
                for minibatch in buffer:
                    out = self._loss(minibatch)
                    loss = out.loss_objective + out.loss_entropy
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                    self._optimizer.step()
                    self._optimizer.zero_grad()
                    losses.append(loss.item())
        return rollouts["next", "reward"].mean().item(), sum(losses) / len(losses)


def rounded(model: Any, dtype: torch.dtype) -> Any:
    """Return a copy of a model with parameters of ``dtype``, as `transformers` loads them: buffers keep theirs."""
    found = copy.deepcopy(model)
    for parameter in found.parameters():
        parameter.data = parameter.data.to(dtype)
    return found


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """Continue ``prompt`` greedily by ``max_tokens`` tokens by `transformers`."""
    ids = torch.tensor([list(prompt)])
    settings = {"do_sample": False, "max_new_tokens": max_tokens, "eos_token_id": None, "pad_token_id": 0}
    return tuple(model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, ids.shape[1] :].tolist())


def quiet() -> None:
    """Keep progress bars and log lines of `transformers` and TorchRL off standard output."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it so
    for handler in logging.getLogger("torchrl").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
