"""A policy that is trained without rollouts, for demonstrations that are about the way of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

__all__ = ["MAX_TOKENS", "Policy", "greedy", "read_model"]

MAX_TOKENS = 24
"""Tokens of a continuation by which two models are compared."""

_PROMPTS = 4
_PROMPT_TOKENS = 8
_MOST_STEPS = 20


class Policy:
    """A causal LM and the prompts by which others are compared with it.

    Every change is repeated until the model continues some prompt in another way, so that an engine that missed it
    would be found out.

    Args:
        model_dir: Hugging Face checkpoint directory.
        seed: of the prompts and of every change.

    Attributes:
        model: the live model, in float32.
        prompts: token ids of each prompt.
    """

    def __init__(self, model_dir: str | Path, *, seed: int = 0) -> None:
        self.model: Any = read_model(model_dir)
        self._random = torch.Generator().manual_seed(seed)
        known = self.model.get_input_embeddings().weight.shape[0]
        drawn = torch.randint(3, known, (_PROMPTS, _PROMPT_TOKENS), generator=self._random)
        self.prompts: list[list[int]] = drawn.tolist()

    def says(self) -> list[tuple[int, ...]]:
        """Return the greedy continuation of each prompt, `MAX_TOKENS` tokens long."""
        return [greedy(self.model, prompt, MAX_TOKENS) for prompt in self.prompts]

    def train(self) -> None:
        """Change every parameter, as a step of an optimizer does."""
        self._change(1.0)

    def nudge(self, share: float = 0.01) -> None:
        """Change a share of the elements of every matrix, as a step of fine-tuning in bfloat16 does."""
        self._change(share)

    @torch.no_grad()
    def _change(self, share: float) -> None:
        before = self.says()
        for _ in range(_MOST_STEPS):
            for parameter in self.model.parameters():
                if parameter.dim() > 1 or share == 1.0:
                    moved = torch.randn(parameter.shape, generator=self._random) * parameter.std()
                    chosen = torch.rand(parameter.shape, generator=self._random) < share
                    parameter.add_(moved * chosen)
            if self.says() != before:
                return
        raise AssertionError("the model says the same whatever its weights are")


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """Continue ``prompt`` greedily by ``max_tokens`` tokens with a model that is in one piece, by `transformers`."""
    ids = torch.tensor([list(prompt)])
    settings = {"do_sample": False, "max_new_tokens": max_tokens, "eos_token_id": None, "pad_token_id": 0}
    return tuple(model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, ids.shape[1] :].tolist())


def read_model(model_dir: str | Path) -> Any:
    """Return the causal LM of a checkpoint directory, in float32 and without dropout."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
    return model.eval()  # type: ignore[no-untyped-call]  # transformers leaves it so
