"""Tensors of an update that land in one memory of an engine, as a tied output head and its embedding do.

A worker knows which names those are, and the trainer knows their values: the worker names them in its answer to
`torchrl_ext.base.messages.Rehearse`, and the trainer compares its tensors before it sends any.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

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
    for every in memories.values():
        meeting: set[int] = set()
        reaching: list[tuple[int, Place]] = []  # those that reach as far as the next one begins
        for index, place in sorted(enumerate(every), key=lambda one: one[1].target.offset) if len(every) > 1 else ():
            reaching = [(at, other) for at, other in reaching if _end(other.target) > place.target.offset]
            for at, other in reaching:
                if other.name != place.name and _meet(other.target, place.target):
                    meeting |= {at, index}
            reaching.append((index, place))
        if meeting:
            found.append(tuple(every[index] for index in sorted(meeting)))
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
    if not one.numel or not other.numel:
        return False
    spans: dict[int, list[int]] = {}  # stride -> least and most steps of it from an element of other to one of one
    for view, bound, sign in ((one, 1, 1), (other, 0, -1)):
        for size, stride in zip(view.sizes, view.strides, strict=True):
            spans.setdefault(stride, [0, 0])[bound] += sign * (size - 1)
    steps = [(stride, low, high) for stride, (low, high) in sorted(spans.items(), reverse=True) if stride]

    def leads(rest: int, level: int) -> bool:
        if level == len(steps):
            return rest == 0
        stride, low, high = steps[level]
        below, above = (sum(step[0] * step[bound] for step in steps[level + 1 :]) for bound in (1, 2))
        counts = range(max(low, -((above - rest) // stride)), min(high, (rest - below) // stride) + 1)
        return any(leads(rest - count * stride, level + 1) for count in counts)

    return leads(other.offset - one.offset, 0)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bytes in the dtype that holds the values of both."""
    dtype = torch.promote_types(one.dtype, other.dtype)
    return torch.equal(byte_view(one.to(dtype)), byte_view(other.to(one.device, dtype)))
