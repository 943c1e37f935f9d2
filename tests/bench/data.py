"""What benchmarks share: progress, weights that change, a training run, the fewest bits that a change can take."""

from __future__ import annotations

import math
import re
import sys
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from torchrl_ext.data.deltas.codec_loops import steps_between
from torchrl_ext.data.deltas.table import unit_of, units

RATE, LENGTH, SAMPLED = 1e-6, 64, 8
"""Learning rate of the fine-tuning; tokens of a row; of this many elements one tells how many change."""


def say(step: str) -> None:
    """Print a step to standard error."""
    print(step, file=sys.stderr, flush=True)


def _text_tokens(vocabulary: int, limit: int) -> Tensor:
    """Return Python's standard library as tokens: text of natural statistics that every machine has."""
    root, words = Path(sysconfig.get_paths()["stdlib"]), []
    for path in sorted(root.glob("*.py")):
        words += re.findall(r"\w+|\s+|[^\w\s]", path.read_text(errors="ignore"))
        if len(words) > limit:
            break
    known = {word: rank for rank, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1), 1)}
    return torch.tensor([known.get(word, 0) for word in words[:limit]])


def chain_shape(hidden: int, layers: int, vocabulary: int) -> dict[str, Any]:
    """Return what the configuration of a model of `real_chain` has of its own."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": max(1, hidden // 64),
        "head_dim": 32,
        "tie_word_embeddings": False,
    }


class Training:
    """A causal language model that is trained as with fp32 master weights.

    It is trained for ``pretrain_steps`` at 1e-3, then fine-tuned by AdamW at `RATE`: ``warm_steps`` first, so that the
    optimizer's state is that of a run under way.
    """

    def __init__(
        self, hidden: int, layers: int, vocabulary: int, *, pretrain_steps: int, warm_steps: int, batch: int
    ) -> None:
        torch.manual_seed(0)
        self._model = Qwen3ForCausalLM(Qwen3Config(**chain_shape(hidden, layers, vocabulary))).float()
        self._tokens, self._batch = _text_tokens(vocabulary, 400_000), batch
        self._optimizer = self._adamw(1e-3)
        self.run(pretrain_steps)
        self._optimizer = self._adamw(RATE)
        self.run(warm_steps)

    def _adamw(self, rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self._model.parameters(), lr=rate, betas=(0.9, 0.95), fused=True)

    def run(self, steps: int) -> None:
        """Make steps of the optimizer."""
        for _ in range(steps):
            starts = torch.randint(0, self._tokens.numel() - LENGTH, (self._batch,))
            rows = torch.stack([self._tokens[s : s + LENGTH] for s in starts])
            self._optimizer.zero_grad()
            self._model(input_ids=rows, labels=rows).loss.backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()

    def masters(self) -> dict[str, Tensor]:
        """Return a copy of the float32 weights."""
        return {name: value.detach().clone() for name, value in self._model.state_dict().items()}

    def checkpoint(self) -> dict[str, Tensor]:
        """Return the weights in bfloat16."""
        return {name: value.detach().to(torch.bfloat16) for name, value in self._model.state_dict().items()}


class Step:
    """One step of AdamW at `RATE`, from which the same step at any other rate follows: AdamW is linear in its rate."""

    def __init__(self, before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
        self._before = before
        self._moves = {name: (after[name] - tensor) / RATE for name, tensor in before.items()}

    def at(self, rate: float) -> list[tuple[str, Tensor, Tensor]]:
        """Return name, bfloat16 before and bfloat16 after of every tensor."""
        return [
            (name, tensor.to(torch.bfloat16), torch.add(tensor, self._moves[name], alpha=rate).to(torch.bfloat16))
            for name, tensor in self._before.items()
        ]

    def rate_for(self, density: float) -> float:
        """Return the learning rate at which a share of the elements changes, 0 to 1, by a sample of them."""
        own, moves = (
            torch.cat([tensor.flatten()[::SAMPLED] for tensor in each.values()]) for each in (self._before, self._moves)
        )
        start, low, high = own.to(torch.bfloat16), 0.0, 1.0
        for _ in range(40):
            rate = math.sqrt(low * high) if low else high / 10
            changed = (torch.add(own, moves, alpha=rate).to(torch.bfloat16) != start).float().mean()
            low, high = (rate, high) if changed < density else (low, rate)
        return high


def bounds(old: Tensor, new: Tensor) -> tuple[int, float, float]:
    """Count the changed elements of a float tensor, and the fewest bits that they can take under two models.

    Plain: positions as a Bernoulli process, and ulp steps by their order-0 entropy. Conditional: the same for each
    exponent of the base apart. Tables that describe the distributions are not counted.
    """
    unit, before, after = unit_of(old.dtype), units(old).reshape(-1), units(new).reshape(-1)
    moved = np.flatnonzero(before != after)
    steps = np.empty_like(before[moved])
    steps_between(before[moved], after[moved], unit.top, unit.mask, unit.ordered, steps)
    exponents = before >> unit.dtype.type(unit.shift) & unit.dtype.type(unit.select)
    limits = []
    for contexts in (np.zeros_like(exponents), exponents):
        seen, changed = np.bincount(contexts, minlength=256), np.bincount(contexts[moved], minlength=256)
        bits = sum(_entropy(np.array(each)) for each in zip(changed, seen - changed, strict=True))
        for context in np.flatnonzero(changed):
            bits += _entropy(np.unique(steps[contexts[moved] == context], return_counts=True)[1])
        limits.append(bits)
    return moved.size, limits[0], limits[1]


def _entropy(counts: np.ndarray) -> float:
    used = counts[counts > 0].astype(np.float64)
    return float(-(used * np.log2(used / used.sum())).sum()) if used.size else 0.0
