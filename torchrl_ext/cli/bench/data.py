"""Provides what benchmarks measure on: shapes of models, and weights that change."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["SIZES", "Pair", "Shapes", "model_shapes", "shapes_bytes", "synthetic_pair"]

Shapes = dict[str, tuple[int, ...]]
Pair = list[tuple[str, Tensor, Tensor]]
"""``(name, old, new)`` of every tensor of a model."""


def model_shapes(layers: int, hidden: int, vocab: int) -> Shapes:
    """Return the shapes of an untied Qwen3-like decoder; 28, 1024 and 32,000 make 311 tensors and 418 M elements."""
    key, inner, head = hidden // 2, 3 * hidden, 128
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (hidden, hidden),
            f"{at}.self_attn.k_proj.weight": (key, hidden),
            f"{at}.self_attn.v_proj.weight": (key, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, hidden),
            f"{at}.self_attn.q_norm.weight": (head,),
            f"{at}.self_attn.k_norm.weight": (head,),
            f"{at}.mlp.gate_proj.weight": (inner, hidden),
            f"{at}.mlp.up_proj.weight": (inner, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, inner),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


SIZES = {
    "full": model_shapes(28, 1024, 32_000),
    "small": model_shapes(4, 256, 2000),
    "tiny": model_shapes(1, 64, 512),
}


def shapes_bytes(shapes: Shapes) -> int:
    """Return the bytes of bfloat16 tensors of these shapes."""
    return 2 * sum(map(math.prod, shapes.values()))


def synthetic_pair(shapes: Shapes, density: float) -> Pair:
    """Return bfloat16 weights of std 0.02, before and after a uniform step whose size changes ``density`` of them.

    Args:
        shapes: of the tensors.
        density: share of elements that change, 0 to 1; above 0.995 as for 0.995, since some steps are always too small.
    """
    generator = torch.Generator().manual_seed(int(density * 1e6))
    step, pair = _step_for(min(0.995, density)), []
    for name, shape in shapes.items():
        master = torch.empty(shape).normal_(0, 0.02, generator=generator)
        change = torch.empty(shape).uniform_(-step, step, generator=generator)
        pair.append((name, master.to(torch.bfloat16), (master + change).to(torch.bfloat16)))
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
