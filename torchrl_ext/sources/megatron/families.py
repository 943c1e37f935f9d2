"""What a Hugging Face checkpoint of a decoder has, by its config alone: names and full shapes, in its order."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torchrl_ext.errors import ConfigError

__all__ = ["FAMILIES", "Architecture", "config_of"]

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Values of ``model_type`` that are known."""

_QWEN_MLP = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL_MLP = ("w1", "w3", "w2")

Shape = tuple[int, ...]


def config_of(config: Any) -> Mapping[str, Any]:
    """Return the keys of a config: a mapping, an object with attributes, a ``config.json``, or the folder of one.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    if isinstance(config, Mapping):
        return config
    if isinstance(config, (str, os.PathLike)):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} cannot be read: {error}", expected="a model's config.json") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{path} holds a {type(found).__name__}", expected="a JSON object")
        return found
    to_dict = getattr(config, "to_dict", None)
    return to_dict() if callable(to_dict) else vars(config)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The sizes of a decoder, in the words of its config.

    Attributes:
        family: its ``model_type``.
        hidden, vocabulary, layers: sizes.
        heads, groups, head_dim: heads of queries, heads of keys and values, and the size of each.
        ffn: inner size of the MLP of a layer without experts.
        experts, expert_ffn: number and inner size of the routed experts.
        shared_ffn: inner size of the shared expert; 0 where there is none.
        routed: of each layer, whether it has experts.
        qkv_bias, proj_bias, mlp_bias: whether there are biases: of q, k and v; of o; of the MLP.
        qk_norm: whether queries and keys are normalised per head.
        tied: the output layer is the embedding, and is not in the checkpoint.
    """

    family: str
    hidden: int
    vocabulary: int
    layers: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    experts: int
    expert_ffn: int
    shared_ffn: int
    routed: tuple[bool, ...]
    qkv_bias: bool
    proj_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], tied: bool | None = None) -> Architecture:
        """Read the config.

        Args:
            config: its keys.
            tied: whether the output layer is the embedding; default: what the config says.

        Raises:
            ConfigError: a family that is not known, a key that is missing, or sizes that do not fit each other.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ConfigError(
                f"the names of a {family!r} model are not known",
                expected=f"a config whose model_type is one of {', '.join(FAMILIES)}",
                hint="derive a WeightSource of your own, with `params`, `shards` and iteration",
            )

        def number(key: str, *others: str) -> int:
            found = next((config[name] for name in (key, *others) if config.get(name) is not None), None)
            if not isinstance(found, int) or isinstance(found, bool) or found < 0:
                raise ConfigError(f"{key} is {found!r} in the config of a {family} model", expected="a whole number")
            return found

        hidden, heads, layers = number("hidden_size"), number("num_attention_heads"), number("num_hidden_layers")
        groups = heads if config.get("num_key_value_heads") is None else number("num_key_value_heads")
        if not heads or not groups or heads % groups:
            raise ConfigError(f"{heads} heads cannot share {groups} heads of keys and values", expected="a multiple")
        experts, routed = 0, (False,) * layers
        if family == "mixtral":
            experts, routed = number("num_local_experts", "num_experts"), (True,) * layers
        elif family.endswith("_moe"):
            experts, every = number("num_experts", "num_local_experts"), config.get("decoder_sparse_step") or 1
            dense = set(config.get("mlp_only_layers") or ())
            routed = tuple(experts > 0 and i not in dense and (i + 1) % every == 0 for i in range(layers))
        attention_bias = bool(config.get("attention_bias", False)) and family in ("llama", "qwen3", "qwen3_moe")
        return cls(
            family=family,
            hidden=hidden,
            vocabulary=number("vocab_size"),
            layers=layers,
            heads=heads,
            groups=groups,
            head_dim=hidden // heads if config.get("head_dim") is None else number("head_dim"),
            ffn=number("intermediate_size"),
            experts=experts,
            expert_ffn=number("moe_intermediate_size" if family.endswith("_moe") else "intermediate_size"),
            shared_ffn=number("shared_expert_intermediate_size") if family == "qwen2_moe" else 0,
            routed=routed,
            qkv_bias={"qwen2": True, "qwen2_moe": config.get("qkv_bias", True)}.get(family, attention_bias),
            proj_bias=attention_bias,
            mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
            qk_norm=family.startswith("qwen3"),
            tied=bool(config.get("tie_word_embeddings", False)) if tied is None else tied,
        )

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        """Name -> full shape of every parameter, in the order of the modules."""
        table = (self.vocabulary, self.hidden)
        found: dict[str, Shape] = {"model.embed_tokens.weight": table}
        for index in range(self.layers):
            found |= {f"model.layers.{index}.{name}": shape for name, shape in self._layer(index)}
        found["model.norm.weight"] = (self.hidden,)
        return found if self.tied else found | {"lm_head.weight": table}

    def router(self) -> str:
        """Return the name of a layer's router, below the layer."""
        return "block_sparse_moe.gate.weight" if self.family == "mixtral" else "mlp.gate.weight"

    def expert(self, index: int) -> tuple[str, str, str]:
        """Return the names of gate, up and down of a routed expert, below the layer and without ``.weight``."""
        block, parts = ("block_sparse_moe", _MIXTRAL_MLP) if self.family == "mixtral" else ("mlp", _QWEN_MLP)
        gate, up, down = (f"{block}.experts.{index}.{part}" for part in parts)
        return gate, up, down

    def _layer(self, index: int) -> Iterator[tuple[str, Shape]]:
        queries, keys = self.heads * self.head_dim, self.groups * self.head_dim
        yield from _linear("self_attn.q_proj", (queries, self.hidden), self.qkv_bias)
        yield from _linear("self_attn.k_proj", (keys, self.hidden), self.qkv_bias)
        yield from _linear("self_attn.v_proj", (keys, self.hidden), self.qkv_bias)
        yield from _linear("self_attn.o_proj", (self.hidden, queries), self.proj_bias)
        if self.qk_norm:
            yield "self_attn.q_norm.weight", (self.head_dim,)
            yield "self_attn.k_norm.weight", (self.head_dim,)
        if self.routed[index]:
            yield self.router(), (self.experts, self.hidden)
            for expert in range(self.experts):
                yield from self._mlp(self.expert(expert), self.expert_ffn)
            if self.shared_ffn:
                gate, up, down = (f"mlp.shared_expert.{part}" for part in _QWEN_MLP)
                yield from self._mlp((gate, up, down), self.shared_ffn)
                yield "mlp.shared_expert_gate.weight", (1, self.hidden)
        else:
            yield from self._mlp(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), self.ffn)
        yield "input_layernorm.weight", (self.hidden,)
        yield "post_attention_layernorm.weight", (self.hidden,)

    def _mlp(self, names: tuple[str, str, str], ffn: int) -> Iterator[tuple[str, Shape]]:
        gate, up, down = names
        yield from _linear(gate, (ffn, self.hidden), self.mlp_bias)
        yield from _linear(up, (ffn, self.hidden), self.mlp_bias)
        yield from _linear(down, (self.hidden, ffn), self.mlp_bias)


def _linear(name: str, shape: Shape, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", shape
    if bias:
        yield f"{name}.bias", shape[:1]
