"""The log-probabilities that a causal LM gives to the tokens of prompts, by which two sets of weights compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torchrl_ext.base.errors import ConfigError

__all__ = ["score"]


def score(model: Any, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the natural-log probability of each token after the first, given those before it.

    One forward pass per prompt, without gradients and in evaluation mode; every submodule gets its own mode back. The
    logarithm is taken in float32, of logits in the dtype that the model computes in.

    Args:
        model: a causal LM of `transformers`, or a module that is called like one: ``input_ids`` of shape
            ``(1, tokens)`` go in, and ``logits`` of shape ``(1, tokens, vocabulary)`` come out.
        prompts: token ids, each prompt of its own length.

    Returns:
        Per prompt one number less than it has tokens; NaN and -inf are kept.

    Raises:
        ConfigError: the model cannot be called so.
    """
    return [_score_one(model, prompt) for prompt in prompts]


@torch.no_grad()
def _score_one(model: Any, prompt: Sequence[int]) -> list[float]:
    with _evaluating(model):
        try:
            device = next(model.parameters()).device
            logits = model(input_ids=torch.tensor([list(prompt)], device=device), use_cache=False).logits
        except (AttributeError, TypeError) as error:
            raise ConfigError(
                f"a {type(model).__name__} computes no log-probabilities of tokens: {error}",
                expected="a causal LM of transformers",
                hint="for your own kind of model, give WeightSender(probe=...) a function that computes them",
            ) from error
    following = torch.tensor(list(prompt[1:]), device=logits.device)
    found = logits[0, :-1].float().log_softmax(-1).gather(1, following[:, None])
    return found[:, 0].tolist()


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Put a module into evaluation mode for the block; anything else has no mode."""
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    modes = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
