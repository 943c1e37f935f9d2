"""What a model chunk of Megatron-Core says of itself: its tensors by name, and the numbers of its layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.weights.source import named_tensors

__all__ = ["Chunk", "numbers_of", "require_plain_values", "tensors_of"]

Chunk = nn.Module | Mapping[str, Any]
"""Megatron's module, or its names and local tensors."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)")
_NO_WEIGHTS = ("optimizer", "opt_param_scheduler", "rng_state", "rerun_state_machine")
_OTHER_VALUES = {
    "layernorm_zero_centered_gamma": "norms that are stored minus 1",
    "moe_mlp_glu_interleave_size": "experts whose gate and up alternate",
    "moe_shared_expert_glu_interleave_size": "shared experts whose gate and up alternate",
}
"""What a ``TransformerConfig`` may say of values that lie otherwise in tensors of the same names and shapes."""


def tensors_of(chunk: Chunk, ignore: Sequence[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield a chunk's weights, under Megatron's names without wrappers.

    Args:
        chunk: what this rank has of it.
        ignore: beginnings of names that are left out, beside extra states and what optimizers keep.

    Raises:
        ManifestError: one is no plain tensor of this rank.
    """
    for name, tensor in named_tensors(chunk) if isinstance(chunk, nn.Module) else chunk.items():
        name = _bare(name)
        if "_extra_state" in name or name.startswith((*_NO_WEIGHTS, *ignore)):
            continue
        if not isinstance(tensor, Tensor) or type(tensor.detach()) is not Tensor:
            raise ManifestError(
                f"{name!r} is a {type(tensor).__name__}",
                expected="a plain tensor of this rank, neither quantised nor sharded by FSDP",
                hint="pass the model's own parameters, or just its state dict",
            )
        yield name, tensor


def _bare(name: str) -> str:
    return re.sub(r"\A(module\.)+", "", name)


def require_plain_values(chunk: Chunk) -> None:
    """Refuse modules whose own config says that values lie otherwise: no name and no shape would show it."""
    for part in chunk.modules() if isinstance(chunk, nn.Module) else ():
        config = getattr(part, "config", None)
        for key, what in _OTHER_VALUES.items():
            if getattr(config, key, None):
                raise ConfigError(
                    f"the trainer's {key} is {getattr(config, key)}: {what}",
                    expected="values as the checkpoint has them",
                )


def numbers_of(chunk: Chunk) -> list[int]:
    """Return the numbers in the model, from 0, that the layers of Megatron's own modules know; none of others."""
    if not isinstance(chunk, nn.Module):
        return []
    layers = [part for path, part in chunk.named_modules() if _LAYER.fullmatch(_bare(path))]
    numbers = [getattr(layer, "layer_number", None) for layer in layers]
    return [number - 1 for number in numbers if isinstance(number, int)]
