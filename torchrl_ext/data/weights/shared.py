"""Tensors of an update that land in one memory of an engine, as a tied output head and its embedding do.

A worker knows which names those are, and the trainer knows their values: the worker names them in its answer to
`torchrl_ext.base.messages.Rehearse`, and the trainer compares its tensors before it sends any.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchrl_ext.base.errors import ManifestError
from torchrl_ext.base.types import Info, decoded
from torchrl_ext.data.weights.digests import byte_view

if TYPE_CHECKING:
    from torchrl_ext.data.weights.source import WeightSource

__all__ = ["UNCHANGED", "differing", "refuse_digests", "shared", "shared_in", "tied_by_config", "two_values"]


UNCHANGED = "nothing was changed; the engine still serves its previous weights"


def shared(places: Iterable[tuple[Hashable, str]]) -> tuple[tuple[str, ...], ...]:
    """Return the names of tensors that have one place.

    Args:
        places: each with the name of a tensor that is copied there: a memory, and which of its elements are written
            with which of the tensor's.
    """
    found: dict[Hashable, dict[str, None]] = {}
    for place, name in places:
        found.setdefault(place, {})[name] = None
    return tuple({tuple(names): None for names in found.values() if len(names) > 1})


def shared_in(report: Info) -> list[list[str]]:
    """Return what a worker names in its answer, as `shared` does; raises ConfigError if it is malformed."""
    return decoded(report.get("shared", []), list[list[str]], "shared memory of an engine's worker")


def tied_by_config(source: WeightSource) -> list[list[str]]:
    """Return an output head and its embedding if a source has both, and its ``config.json`` says that they are tied."""
    params = source.params()
    heads = [meta for meta in params if meta.name.endswith("lm_head.weight")]
    config: Any = None
    with suppress(ValueError):  # whoever uses the file reports that
        config = json.loads(source.files().get("config.json", b"{}")) if heads else {}
    config = config.get("text_config", config) if isinstance(config, dict) else {}
    if not isinstance(config, dict) or config.get("tie_word_embeddings") is not True:
        return []
    embeddings = [meta for meta in params if "embed" in meta.name or "wte" in meta.name]
    return [[like.name, head.name] for head in heads for like in embeddings if like.shape == head.shape]


def differing(names: Sequence[str], tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Return the names of two tensors that a memory could not both hold; None if it would hold all.

    Args:
        names: of one memory, as `shared` returns them.
        tensors: the update's, whole.
    """
    first = names[0]
    return next(((first, name) for name in names[1:] if not _equal(tensors[first], tensors[name])), None)


def refuse_digests(shared: Iterable[Sequence[str]], digests: Mapping[str, str]) -> None:
    """Refuse different digests of tensors that would be written to the same elements.

    Args:
        shared: names, as the function `shared` returns them.
        digests: of an update's tensors; empty ones, and those that are missing, say nothing.

    Raises:
        ManifestError: see `two_values`.
    """
    for names in shared:
        first, *others = [name for name in names if digests.get(name)] or [""]
        for name in others:
            if digests[first] != digests[name]:
                raise two_values(first, name)


def two_values(first: str, second: str, state: str = UNCHANGED) -> ManifestError:
    """Return the refusal of an update that has different values for one memory."""
    return ManifestError(
        f"the engine has one memory for {first!r} and {second!r}, and the update has different values for them",
        expected="equal values, as a model has whose output head is tied to its embedding",
        state=state,
        hint="tie them in the trainer (PEFT: LoraConfig(ensure_weight_tying=True)), or start the engine from a "
        "checkpoint whose config.json has tie_word_embeddings: false",
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bytes in the dtype that holds the values of both."""
    dtype = torch.promote_types(one.dtype, other.dtype)
    return torch.equal(byte_view(one.to(dtype)), byte_view(other.to(one.device, dtype)))
