"""What a Hugging Face checkpoint of a decoder has: names and full shapes, of a model without data, by its config."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchrl_ext.errors import ConfigError
from torchrl_ext.weights.source import as_source

__all__ = ["Architecture", "Shape", "config_of"]

_EXPERT = re.compile(r"model\.layers\.(\d+)\.(\w+)\.experts\.(\d+)\.(gate_proj|w1)\.weight")
_WRONG_VALUES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip

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
    """A decoder, as `transformers` builds it from a config.

    Attributes:
        family: its ``model_type``.
        shapes: name -> full shape of every parameter of the checkpoint, in the order of the modules.
        layers: the number of its layers.
        heads, groups: heads of queries, and heads of keys and values.
        tied: the output layer is the embedding, and is not in the checkpoint.
        experts: the number of routed experts in a layer that has some.
        routed: the numbers of these layers.
        block: the module of a layer that has its experts.
        mlp: the names of gate, up and down in an expert.
    """

    family: str
    shapes: Mapping[str, Shape]
    layers: int
    heads: int
    groups: int
    tied: bool
    experts: int
    routed: frozenset[int]
    block: str
    mlp: tuple[str, str, str]

    @classmethod
    def of(cls, config: Mapping[str, Any], tied: bool | None = None) -> Architecture:
        """Build the model of a config on the meta device, and read it.

        Args:
            config: the keys of a Hugging Face config.
            tied: whether the output layer is the embedding; default: what the config says.

        Raises:
            ConfigError: transformers is not installed or cannot build the model, or the heads do not divide.
        """
        try:
            from huggingface_hub import errors
            from transformers import AutoConfig, AutoModelForCausalLM
        except ImportError as error:
            raise ConfigError(
                f"transformers cannot be imported: {error}",
                expected="transformers in the trainer, which knows the names and shapes of a checkpoint",
                hint="pip install transformers",
            ) from error
        strict = getattr(errors, "StrictDataclassError", ValueError)  # newer configs are strict dataclasses
        family = str(config.get("model_type"))
        try:
            keys = {key: value for key, value in config.items() if key != "model_type"}
            built = AutoConfig.for_model(family, **keys)
            if tied is not None:
                built.tie_word_embeddings = tied
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(built)  # type: ignore[no-untyped-call]
        except (*_WRONG_VALUES, strict) as error:  # a wrong value fails wherever the model uses it first
            raise ConfigError(
                f"transformers cannot build the causal LM of a {family!r} config: {error}",
                expected="the config.json of the model that is trained",
                hint="for other models derive a WeightSource, with `params`, `shards` and iteration",
            ) from error
        shapes = {meta.name: meta.shape for meta in as_source(model).params()}
        heads = getattr(built, "num_attention_heads", None) or 0
        groups = getattr(built, "num_key_value_heads", None) or heads
        if not heads or heads % groups:
            raise ConfigError(f"{heads} heads cannot share {groups} heads of keys and values", expected="a multiple")
        found = [match.groups() for match in map(_EXPERT.fullmatch, shapes) if match]
        block, gate = (found[0][1], found[0][3]) if found else ("mlp", "gate_proj")
        return cls(
            family=family,
            shapes=shapes,
            layers=built.num_hidden_layers,
            heads=heads,
            groups=groups,
            tied="lm_head.weight" not in shapes,
            experts=max((int(expert) + 1 for _, _, expert, _ in found), default=0),
            routed=frozenset(int(layer) for layer, _, _, _ in found),
            block=block,
            mlp=("w1", "w3", "w2") if gate == "w1" else ("gate_proj", "up_proj", "down_proj"),
        )

    def expert(self, index: int) -> tuple[str, str, str]:
        """Return the names of gate, up and down of a routed expert, below the layer and without ``.weight``."""
        gate, up, down = (f"{self.block}.experts.{index}.{name}" for name in self.mlp)
        return gate, up, down
