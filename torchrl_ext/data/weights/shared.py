"""Tensors of an update that land in one memory of an engine, as a tied output head and its embedding do.

A worker knows which names those are, and the trainer knows their values: the worker names them in its answer to
`torchrl_ext.base.messages.Rehearse`, and the trainer compares its tensors before it sends any.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.base.errors import ManifestError
from torchrl_ext.base.types import Info, decoded
from torchrl_ext.data.weights.digests import byte_view
from torchrl_ext.data.weights.view import View

if TYPE_CHECKING:
    from torchrl_ext.data.weights.source import WeightSource

__all__ = [
    "UNCHANGED", "Place", "differing", "refuse_digests", "shared", "shared_in", "tied_by_config", "two_values",
]  # fmt: skip


UNCHANGED = "nothing was changed; the engine still serves its previous weights"


class Place(NamedTuple):
    """A copy of an update's tensor into a memory.

    Attributes:
        name: the tensor's name in the update.
        target: the elements of the memory that are written.
        source: the elements of the tensor, which is contiguous, that are written there.
    """

    name: str
    target: View
    source: View


def shared(places: Iterable[tuple[Hashable, Place]]) -> tuple[tuple[Place, ...], ...]:
    """Return the copies that share elements of a memory with another tensor's, those of one memory together.

    Args:
        places: each with a key of its memory.
    """
    memories: dict[Hashable, list[Place]] = {}
    for memory, place in places:
        memories.setdefault(memory, []).append(place)
    found = []
    for own in memories.values():
        meeting, reaching = set[Place](), list[Place]()  # those that reach as far as the next one begins
        for place in sorted(own, key=lambda place: place.target.offset):
            reaching = [other for other in reaching if _end(other.target) > place.target.offset]
            for other in reaching:
                if other.name != place.name and _meet(other.target, place.target):
                    meeting |= {other, place}
            reaching.append(place)
        if meeting:
            found.append(tuple(place for place in own if place in meeting))
    return tuple(found)


def shared_in(report: Info) -> list[list[Place]]:
    """Return the copies that a worker names in its answer; raises ConfigError if they are malformed."""
    return decoded(report.get("shared", []), list[list[Place]], "shared memory of an engine's worker")


def tied_by_config(source: WeightSource) -> list[list[Place]]:
    """Return an output head and its embedding if a source has both, and its ``config.json`` says that they are tied."""
    params = source.params()
    heads = [meta for meta in params if meta.name.endswith("lm_head.weight")]
    config: Any = None
    with suppress(ValueError):  # whoever uses the file reports that
        config = json.loads(source.files().get("config.json", b"{}")) if heads else {}
    config = config.get("text_config", config) if isinstance(config, dict) else {}
    if not isinstance(config, dict) or config.get("tie_word_embeddings") is not True:
        return []
    found = []
    for head in heads:
        like = (meta for meta in params if meta.shape == head.shape and ("embed" in meta.name or "wte" in meta.name))
        whole = View.whole(head.shape)
        found += [[Place(one.name, whole, whole), Place(head.name, whole, whole)] for one in like]
    return found


def differing(places: Sequence[Place], tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Return the names of two tensors that a memory could not both hold; None if it would hold all.

    Args:
        places: of one memory, as `shared` returns them.
        tensors: the update's, whole.
    """
    firsts: dict[tuple[View, View], Place] = {}
    for place in places:
        first = firsts.setdefault(place[1:], place)
        if not _equal(tensors[first.name], tensors[place.name]):
            return first.name, place.name
    for one, other in combinations(firsts.values(), 2):
        if one.name != other.name and _meet(one.target, other.target):
            parts = [place.source.of(tensors[place.name].detach().contiguous()) for place in (one, other)]
            memory = parts[0].new_empty(max(_end(one.target), _end(other.target)))
            held, over = one.target.of(memory), other.target.of(memory)
            held.copy_(parts[0])
            over.copy_(parts[1])
            if not _equal(held, parts[0]):
                return one.name, other.name
    return None


def refuse_digests(places: Iterable[Sequence[Place]], digests: Mapping[str, str]) -> None:
    """Refuse different digests of tensors that would be written to the same elements.

    Args:
        places: as `shared` returns them.
        digests: of an update's tensors; empty ones, and those that are missing, say nothing.

    Raises:
        ManifestError: see `two_values`.
    """
    for group in places:
        firsts: dict[tuple[View, View], str] = {}
        for place in group:
            if digests.get(place.name):
                first = firsts.setdefault(place[1:], place.name)
                if digests[first] != digests[place.name]:
                    raise two_values(first, place.name)


def two_values(first: str, second: str, state: str = UNCHANGED) -> ManifestError:
    """Return the refusal of an update that has different values for one memory."""
    return ManifestError(
        f"the engine has one memory for {first!r} and {second!r}, and the update has different values for them",
        expected="equal values, as a model has whose output head is tied to its embedding",
        state=state,
        hint="tie them in the trainer (PEFT: LoraConfig(ensure_weight_tying=True)), or start the engine from a "
        "checkpoint whose config.json has tie_word_embeddings: false",
    )


def _end(view: View) -> int:
    return 1 + view.offset + sum((size - 1) * stride for size, stride in zip(view.sizes, view.strides, strict=True))


def _meet(one: View, other: View) -> bool:
    """Return whether two views of one memory have an element in common."""
    return np.shares_memory(_as_bytes(one), _as_bytes(other))


def _as_bytes(view: View) -> np.ndarray:
    """Return an array of bytes that lies at addresses as a view's elements do; nothing may be read of it."""
    where = {"data": ((1 << 40) + view.offset, False), "shape": view.sizes, "strides": view.strides}
    return np.asarray(SimpleNamespace(__array_interface__=where | {"typestr": "|u1", "version": 3}))


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bytes in the dtype that holds the values of both."""
    dtype = torch.promote_types(one.dtype, other.dtype)
    return torch.equal(byte_view(one.to(dtype)), byte_view(other.to(one.device, dtype)))
