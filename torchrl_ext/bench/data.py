"""Provides what benchmarks measure on: shapes of models, weights that change, and the fewest bits a change can take."""

from __future__ import annotations

import math
import re
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.codecs.units import units

__all__ = [
    "SIZES",
    "Pair",
    "Shapes",
    "bounds",
    "model_shapes",
    "real_chain",
    "shapes_bytes",
    "synthetic_pair",
    "weights_of",
]

Shapes = dict[str, tuple[int, ...]]


def model_shapes(
    layers: int, hidden: int, vocab: int, *, heads: float = 1.0, kv: float = 0.5, mlp: float = 3.0
) -> Shapes:
    """Return the shapes of an untied Qwen3-like decoder; 28, 1024 and 32,000 make 311 tensors and 418 M elements.

    Args:
        layers, hidden, vocab: its size.
        heads, kv, mlp: widths of queries, of keys and values, and of what the MLP expands to, in ``hidden``.
    """
    query, key, inner, head = int(heads * hidden), int(kv * hidden), int(mlp * hidden), 128
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (query, hidden),
            f"{at}.self_attn.k_proj.weight": (key, hidden),
            f"{at}.self_attn.v_proj.weight": (key, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, query),
            f"{at}.self_attn.q_norm.weight": (head,),
            f"{at}.self_attn.k_norm.weight": (head,),
            f"{at}.mlp.gate_proj.weight": (inner, hidden),
            f"{at}.mlp.up_proj.weight": (inner, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, inner),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


SIZES: dict[str, dict[str, Shapes]] = {
    "full": {"model": model_shapes(28, 1024, 32_000), "small": {f"small.{i:05d}": (8192,) for i in range(10_000)}},
    "small": {"model": model_shapes(4, 256, 2000), "small": {f"small.{i:05d}": (8192,) for i in range(300)}},
}


def weights_of(shapes: Shapes, fill: int, device: str = "cpu") -> dict[str, Tensor]:
    """Return bfloat16 tensors of these shapes, every element ``fill``."""
    return {name: torch.full(shape, fill, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}


def shapes_bytes(shapes: Shapes) -> int:
    """Return the bytes that `weights_of` takes."""
    return 2 * sum(math.prod(shape) for shape in shapes.values())


# weights that change

Pair = list[tuple[str, Tensor, Tensor]]
"""``(name, old, new)`` of every tensor of a model."""


def _text_tokens(vocabulary: int, limit: int) -> Tensor:
    """Return Python's standard library as tokens: text of natural statistics that every machine has."""
    root, words = Path(sysconfig.get_paths()["stdlib"]), []
    for path in sorted(root.glob("*.py")):
        words += re.findall(r"\w+|\s+|[^\w\s]", path.read_text(errors="ignore"))
        if len(words) > limit:
            break
    known = {word: rank for rank, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1), 1)}
    return torch.tensor([known.get(word, 0) for word in words[:limit]])


def real_chain(
    *,
    hidden: int = 256,
    layers: int = 8,
    vocabulary: int = 8192,
    pretrain_steps: int = 60,
    warm_steps: int = 10,
    syncs: int = 1,
    steps_per_sync: int = 1,
    lr: float = 1e-6,
    seed: int = 0,
) -> list[dict[str, Tensor]]:
    """Train a causal language model as with fp32 master weights, and return consecutive bfloat16 checkpoints of it.

    The model is trained for ``pretrain_steps`` at 1e-3, then fine-tuned by AdamW at ``lr``: ``warm_steps`` first, so
    that the optimizer's state is that of a run under way, then ``steps_per_sync`` between checkpoints.

    Returns:
        ``syncs + 1`` checkpoints, name -> bfloat16 tensor.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 64),
        head_dim=32,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config).float()  # type: ignore[no-untyped-call]  # transformers leaves it so
    tokens = _text_tokens(vocabulary, 400_000)
    length, batch = 64, 8

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

    run(torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95)), pretrain_steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    run(optimizer, warm_steps)
    chain = [checkpoint()]
    for _ in range(syncs):
        run(optimizer, steps_per_sync)
        chain.append(checkpoint())
    return chain


def synthetic_pair(
    density: float, *, clustered: bool = False, hidden: int = 1024, layers: int = 28, vocabulary: int = 32_000
) -> Pair:
    """Return bfloat16 weights of std 0.02, before and after a uniform step whose size changes ``density`` of them.

    Args:
        density: share of elements that change, 0 to 1; above 0.995 as for 0.995, since some steps are always too small.
        clustered: only some runs of 1,024 elements are touched, half of whose elements change.
    """
    generator = torch.Generator().manual_seed(int(density * 1e6) + clustered)
    inner = min(0.995, max(density, 0.5) if clustered else density)
    step, pair = _step_for(inner), []
    for name, shape in model_shapes(layers, hidden, vocabulary, heads=2, kv=1, mlp=2).items():
        master = torch.empty(shape).normal_(0, 0.02, generator=generator)
        old = master.to(torch.bfloat16)
        change = torch.empty(shape).uniform_(-step, step, generator=generator)
        if clustered:
            runs = torch.rand(-(-master.numel() // 1024), generator=generator) < density / inner
            change *= runs.repeat_interleave(1024)[: master.numel()].reshape(shape)
        pair.append((name, old, (master + change).to(torch.bfloat16)))
    return pair


def _step_for(density: float) -> float:
    """Find the size of a uniform step that changes ``density`` of normal weights of std 0.02, by bisection."""
    generator = torch.Generator().manual_seed(1)
    master = torch.empty(1 << 20).normal_(0, 0.02, generator=generator)
    unit = torch.empty(1 << 20).uniform_(-1, 1, generator=generator)
    low, high = 0.0, 1.0
    for _ in range(40):
        step = (low + high) / 2
        changed = (master.to(torch.bfloat16) != (master + step * unit).to(torch.bfloat16)).float().mean()
        low, high = (step, high) if changed < density else (low, step)
    return high


def bounds(old: Tensor, new: Tensor) -> tuple[int, float, float]:
    """Count the changed elements of a bfloat16 tensor, and the fewest bits that they can take under two models.

    Plain: positions as a Bernoulli process, and ulp steps by their order-0 entropy. Conditional: the same for each
    exponent of the base apart. Tables that describe the distributions are not counted.
    """
    before, after = units(old).reshape(-1), units(new).reshape(-1)
    moved = np.flatnonzero(before != after)
    exponent = (before >> 7) & 0xFF
    seen, changed = np.bincount(exponent, minlength=256), np.bincount(exponent[moved], minlength=256)
    steps = (_ordered(after[moved]) - _ordered(before[moved])) & 0xFFFF
    kinds, counts = np.unique(exponent[moved].astype(np.int64) << 16 | steps, return_counts=True)
    plain = _places(seen.sum(keepdims=True), changed.sum(keepdims=True)) + _entropy(
        np.bincount(kinds & 0xFFFF, weights=counts)
    )
    inside = _places(seen, changed) + sum(_entropy(counts[kinds >> 16 == one]) for one in np.unique(kinds >> 16))
    return moved.size, plain, inside


def _ordered(bits: np.ndarray) -> np.ndarray:
    """Map bit patterns of bfloat16 to integers in the order of the numbers, so that differences count ulps."""
    wide = bits.astype(np.int64)
    return np.where(wide & 0x8000, 0xFFFF - wide, wide | 0x8000)


def _places(seen: np.ndarray, changed: np.ndarray) -> float:
    return sum(_entropy(np.array([n - k, k])) for n, k in zip(seen, changed, strict=True))


def _entropy(counts: np.ndarray) -> float:
    used = counts[counts > 0].astype(np.float64)
    return float(-(used * np.log2(used / used.sum())).sum()) if used.size else 0.0
