"""What benchmarks share: progress, weights that change, a training run, the fewest bits that a change can take."""

from __future__ import annotations

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


def real_chain(
    *,
    hidden: int = 256,
    layers: int = 8,
    vocabulary: int = 8192,
    pretrain_steps: int = 60,
    warm_steps: int = 10,
    syncs: int = 1,
    batch: int = 8,
) -> list[dict[str, Tensor]]:
    """Train a causal language model as with fp32 master weights, and return consecutive bfloat16 checkpoints of it.

    The model is trained for ``pretrain_steps`` at 1e-3, then fine-tuned by AdamW at 1e-6: ``warm_steps`` first, so that
    the optimizer's state is that of a run under way, then a step between checkpoints.

    Returns:
        ``syncs + 1`` checkpoints, name -> bfloat16 tensor.
    """
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**chain_shape(hidden, layers, vocabulary))).float()
    tokens = _text_tokens(vocabulary, 400_000)
    length = 64

    def run(optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            starts = torch.randint(0, tokens.numel() - length, (batch,))
            rows = torch.stack([tokens[s : s + length] for s in starts])
            optimizer.zero_grad()
            model(input_ids=rows, labels=rows).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    def checkpoint() -> dict[str, Tensor]:
        return {name: value.detach().to(torch.bfloat16) for name, value in model.state_dict().items()}

    run(torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True), pretrain_steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), fused=True)
    run(optimizer, warm_steps)
    chain = [checkpoint()]
    for _ in range(syncs):
        run(optimizer, 1)
        chain.append(checkpoint())
    return chain


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
