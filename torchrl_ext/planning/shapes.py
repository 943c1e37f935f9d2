"""The tensors of large published decoders, from their hyperparameters alone, and where parallel layouts cut them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch

from torchrl_ext.types import ParamMeta

__all__ = ["DECODERS", "Decoder", "Latent", "Part"]


class Part(NamedTuple):
    """A tensor of a decoder, and how layouts cut it.

    Attributes:
        meta: under its name in the published checkpoint.
        axis: the dimension that tensor parallelism cuts; None where every worker has all of it.
        units: into how many parts it may be cut at most, such as heads of keys.
        layer: its layer; -1 for what comes before the first, and the number of layers for what follows the last.
        expert: its expert; None where it is none.
    """

    meta: ParamMeta
    axis: int | None
    units: int
    layer: int
    expert: int | None


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Sizes of multi-head latent attention: ranks of queries and of keys and values, and sizes of a head's parts."""

    q_rank: int = 1536
    kv_rank: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Hyperparameters of a decoder with a mixture of experts, as its ``config.json`` has them.

    Attributes:
        hidden, vocab, layers, heads: sizes.
        kv_heads, head_size: of grouped-query attention, where ``latent`` is None.
        latent: of multi-head latent attention.
        dense_layers, dense_size: layers without experts, the first ones, and their intermediate size.
        experts, expert_size: routed experts of a layer, and their intermediate size.
        shared_experts: experts that every token takes.
        bias: whether the router has a bias per expert, in float32.
    """

    hidden: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int = 0
    head_size: int = 128
    latent: Latent | None = None
    dense_layers: int = 0
    dense_size: int = 0
    experts: int
    expert_size: int
    shared_experts: int = 0
    bias: bool = False

    def parts(self) -> list[Part]:
        """Return all tensors in the order of the model, in bfloat16; what predicts further tokens is left out."""
        ends = {name: ((self.vocab, self.hidden), 0) for name in ("model.embed_tokens.weight", "lm_head.weight")}
        first, last = (_part(name, shape, axis) for name, (shape, axis) in ends.items())
        norm = _part("model.norm.weight", (self.hidden,), None)._replace(layer=self.layers)
        middle = [
            part._replace(
                meta=ParamMeta(f"model.layers.{layer}.{part.meta.name}", part.meta.dtype, part.meta.shape), layer=layer
            )
            for layer in range(self.layers)
            for part in self._layer(layer)
        ]
        return [first, *middle, norm, last._replace(layer=self.layers)]

    def _layer(self, layer: int) -> Iterator[Part]:
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield _part(f"{name}.weight", (self.hidden,), None)
        yield from self._grouped() if self.latent is None else self._latent(self.latent)
        if layer < self.dense_layers:
            yield from self._mlp("mlp", self.dense_size)
            return
        yield _part("mlp.gate.weight", (self.experts, self.hidden), None)
        if self.bias:
            yield Part(ParamMeta("mlp.gate.e_score_correction_bias", torch.float32, (self.experts,)), None, 1, 0, None)
        for expert in range(self.experts):
            yield from self._mlp(f"mlp.experts.{expert}", self.expert_size, expert)
        if self.shared_experts:
            yield from self._mlp("mlp.shared_experts", self.shared_experts * self.expert_size)

    def _mlp(self, name: str, size: int, expert: int | None = None) -> Iterator[Part]:
        for one in ("gate", "up"):
            yield _part(f"{name}.{one}_proj.weight", (size, self.hidden), 0)._replace(expert=expert)
        yield _part(f"{name}.down_proj.weight", (self.hidden, size), 1)._replace(expert=expert)

    def _grouped(self) -> Iterator[Part]:
        all_heads, few = self.heads * self.head_size, self.kv_heads * self.head_size
        yield _part("self_attn.q_proj.weight", (all_heads, self.hidden), 0, self.heads)
        for one in "kv":
            yield _part(f"self_attn.{one}_proj.weight", (few, self.hidden), 0, self.kv_heads)
        yield _part("self_attn.o_proj.weight", (self.hidden, all_heads), 1, self.heads)
        for one in "qk":
            yield _part(f"self_attn.{one}_norm.weight", (self.head_size,), None)

    def _latent(self, sizes: Latent) -> Iterator[Part]:
        heads = self.heads
        yield _part("self_attn.q_a_proj.weight", (sizes.q_rank, self.hidden), None)
        yield _part("self_attn.q_a_layernorm.weight", (sizes.q_rank,), None)
        yield _part("self_attn.q_b_proj.weight", (heads * (sizes.nope + sizes.rope), sizes.q_rank), 0, heads)
        yield _part("self_attn.kv_a_proj_with_mqa.weight", (sizes.kv_rank + sizes.rope, self.hidden), None)
        yield _part("self_attn.kv_a_layernorm.weight", (sizes.kv_rank,), None)
        yield _part("self_attn.kv_b_proj.weight", (heads * (sizes.nope + sizes.value), sizes.kv_rank), 0, heads)
        yield _part("self_attn.o_proj.weight", (self.hidden, heads * sizes.value), 1, heads)


def _part(name: str, shape: tuple[int, ...], axis: int | None, units: int | None = None) -> Part:
    most = 1 if axis is None else shape[axis]
    return Part(ParamMeta(name, torch.bfloat16, shape), axis, units or most, -1, None)


DECODERS: Mapping[str, Decoder] = MappingProxyType(
    {
        "qwen3-235b-a22b": Decoder(
            hidden=4096, vocab=151936, layers=94, heads=64, kv_heads=4, experts=128, expert_size=1536
        ),
        "deepseek-v3": Decoder(
            hidden=7168, vocab=129280, layers=61, heads=128, latent=Latent(), dense_layers=3, dense_size=18432,
            experts=256, expert_size=2048, shared_experts=1, bias=True,
        ),
        "kimi-k2": Decoder(
            hidden=7168, vocab=163840, layers=61, heads=64, latent=Latent(), dense_layers=1, dense_size=18432,
            experts=384, expert_size=2048, shared_experts=1, bias=True,
        ),
    }
)  # fmt: skip
"""Decoders by name, with the sizes of their published ``config.json``: 235 * 10^9, 671 * 10^9 and 10^12 parameters."""
