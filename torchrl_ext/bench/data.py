"""Provides what benchmarks measure on: shapes of models, and weights that change."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["SIZES", "Pair", "Shapes", "model_shapes", "shapes_bytes", "synthetic_pair", "weights_of"]

Shapes = dict[str, tuple[int, ...]]


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


SIZES: dict[str, dict[str, Shapes]] = {
    "full": {"model": model_shapes(28, 1024, 32_000), "small": {f"small.{i:05d}": (8192,) for i in range(10_000)}},
    "small": {"model": model_shapes(4, 256, 2000), "small": {f"small.{i:05d}": (8192,) for i in range(300)}},
    "tiny": {"model": model_shapes(1, 64, 512), "small": {f"small.{i:05d}": (64,) for i in range(20)}},
}
"""Size -> a model and many small tensors; tiny: to try a command."""


def weights_of(shapes: Shapes, fill: int, device: str = "cpu") -> dict[str, Tensor]:
    """Return bfloat16 tensors of these shapes, every element ``fill``."""
    return {name: torch.full(shape, fill, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}


def shapes_bytes(shapes: Shapes) -> int:
    """Return the bytes that `weights_of` takes."""
    return 2 * sum(math.prod(shape) for shape in shapes.values())


Pair = list[tuple[str, Tensor, Tensor]]
"""``(name, old, new)`` of every tensor of a model."""


def synthetic_pair(shapes: Shapes, density: float, *, clustered: bool = False) -> Pair:
    """Return bfloat16 weights of std 0.02, before and after a uniform step whose size changes ``density`` of them.

    Args:
        shapes: of the tensors.
        density: share of elements that change, 0 to 1; above 0.995 as for 0.995, since some steps are always too small.
        clustered: only some runs of 1,024 elements are touched, half of whose elements change.
    """
    generator = torch.Generator().manual_seed(int(density * 1e6) + clustered)
    inner = min(0.995, max(density, 0.5) if clustered else density)
    step, pair = _step_for(inner), []
    for name, shape in shapes.items():
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
