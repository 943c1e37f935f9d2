"""Models made of nothing but shapes, for measurements."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["SIZES", "Shapes", "model_shapes", "shapes_bytes", "weights_of"]

Shapes = dict[str, tuple[int, ...]]


def model_shapes(layers: int, hidden: int, vocab: int) -> Shapes:
    """A Qwen3-like decoder, untied: with 28, 1024 and 32,000 it has 311 tensors and 418 M elements."""
    heads, kv, mlp, head = hidden, hidden // 2, 3 * hidden, 128
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (heads, hidden),
            f"{at}.self_attn.k_proj.weight": (kv, hidden),
            f"{at}.self_attn.v_proj.weight": (kv, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, heads),
            f"{at}.self_attn.q_norm.weight": (head,),
            f"{at}.self_attn.k_norm.weight": (head,),
            f"{at}.mlp.gate_proj.weight": (mlp, hidden),
            f"{at}.mlp.up_proj.weight": (mlp, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, mlp),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


SIZES: dict[str, dict[str, Shapes]] = {
    "full": {"model": model_shapes(28, 1024, 32_000), "small": {f"small.{i:05d}": (8192,) for i in range(10_000)}},
    "small": {"model": model_shapes(4, 256, 2000), "small": {f"small.{i:05d}": (8192,) for i in range(300)}},
}


def weights_of(shapes: Shapes, fill: int, device: str = "cpu") -> dict[str, Tensor]:
    """bfloat16 tensors of these shapes."""
    return {name: torch.full(shape, fill, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}


def shapes_bytes(shapes: Shapes) -> int:
    """Bytes of `weights_of`."""
    return 2 * sum(math.prod(shape) for shape in shapes.values())
