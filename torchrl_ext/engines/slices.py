"""What a worker needs of each checkpoint tensor, and where in its live parameters that may be written right away."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.deltas.bits import Piece
from torchrl_ext.data.landing.placement import Landing, Placement
from torchrl_ext.data.landing.sliced import Sliced
from torchrl_ext.data.weights.view import Block, View, Walk, merged, overlap

__all__ = ["Slices", "layer_of", "sharing_no_layer", "write_pieces"]

_WASTE = 2
"""A tensor comes whole where the blocks around what is needed of it have more than so many times its elements."""


class Slices:
    """The blocks of checkpoint tensors that land on one worker.

    Args:
        placement: where the tensors land.
        pieces: the copies of those that live parameters hold with the bytes that came, as far as that was shown.

    Attributes:
        blocks: checkpoint name -> disjoint blocks, none where nothing lands here; without those that come whole.
        whole: checkpoint name -> why it has to come whole.
        direct: names that are written into live parameters past the model's loader, as their changes are. They share no
            layer with others, since a layer that an engine rebuilds takes all of its tensors from the loader.
    """

    def __init__(self, placement: Placement, pieces: Mapping[str, Sequence[Piece]]) -> None:
        self._placement = placement
        self._metas = {meta.name: meta for meta in placement.params}
        self._walks: dict[str, list[tuple[Walk, Landing]]] = {}
        self.blocks: dict[str, tuple[Block, ...]] = {}
        self.whole: dict[str, str] = {}
        for meta in placement.params:
            found = _walks(meta, placement.landings[meta.name])
            if isinstance(found, str):
                self.whole[meta.name] = found
            else:
                blocks = merged(walk.block for walk, _ in found)
                used = {landing.source[1:]: landing.numel for _, landing in found}
                if sum(block.numel for block in blocks) > _WASTE * sum(used.values()):
                    self.whole[meta.name] = "the engine's loader reads elements of it that are not adjacent"
                    continue
                self._walks[meta.name], self.blocks[meta.name] = found, blocks
        plain = {name for name, own in pieces.items() if own and self.blocks.get(name)}
        self.direct = sharing_no_layer(plain, placement.landings)

    @cached_property
    def loaded(self) -> tuple[str, ...]:
        """The names that the model's loader takes."""
        return tuple(
            meta.name for meta in self._placement.params if meta.name not in self.direct and self.landing(meta.name)
        )

    def landing(self, name: str) -> bool:
        """Return whether anything of a tensor comes to this worker."""
        return name in self.whole or bool(self.blocks[name])

    def targets(self, live: Mapping[str, Tensor]) -> dict[str, Sliced]:
        """Return the live memory of those direct names whose blocks lie in it as a tensor of the block's shape.

        Args:
            live: the parameters and buffers that the model computes with, by runtime name.
        """
        found = {}
        for name in self.direct:
            laid = [(block, _live_view(block, self._walks[name], live)) for block in self.blocks[name]]
            parts = [(block, memory) for block, memory in laid if memory is not None]
            if len(parts) == len(laid):
                found[name] = Sliced.of(self._metas[name], parts)
        return found


def sharing_no_layer(
    plain: set[str], landings: Mapping[str, Iterable[Landing]], stays: Callable[[str], bool] = lambda param: False
) -> frozenset[str]:
    """Return those of ``plain`` that share no layer with other tensors.

    Args:
        plain: names of tensors that could be written into live parameters.
        landings: all tensors that come -> where they land.
        stays: whether a live parameter of some name is left alone when the rest of its layer is built anew.
    """
    layers = {name: {layer_of(landing.param) for landing in own} for name, own in landings.items()}
    built = {
        name: {layer_of(landing.param) for landing in landings[name] if not stays(landing.param)} for name in plain
    }
    while True:
        opened = set().union(*(own for name, own in layers.items() if name not in plain))
        kept = {name for name in plain if not built[name] & opened}
        if kept == plain:
            return frozenset(plain)
        plain = kept


def layer_of(name: str) -> str:
    """Return the path of the module that has a parameter, or another module."""
    return name.rpartition(".")[0]


@torch.no_grad()
def write_pieces(tensor: Tensor, pieces: Iterable[Piece]) -> None:
    """Write a checkpoint tensor, whole or `Sliced`, where pieces of it lie."""
    for piece in pieces:
        live = piece.destination
        whole = tensor if isinstance(tensor, Sliced) else tensor.contiguous()
        live.copy_(whole.as_strided(live.shape, piece.strides, whole.storage_offset() + piece.offset))


def _walks(meta: ParamMeta, landings: Collection[Landing]) -> list[tuple[Walk, Landing]] | str:
    """Return the ways of copies through a checkpoint tensor; or why these cannot be said."""
    found = []
    for landing in landings:
        if not landing.exact:
            return f"the engine's loader computes {landing.param} from it"
        if not landing.numel:
            continue
        walk = landing.source.walk(meta.shape)
        if walk is None:
            return f"the elements that the engine's loader copies into {landing.param} are not one block"
        found.append((walk, landing))
    return found


def _live_view(block: Block, walks: Iterable[tuple[Walk, Landing]], live: Mapping[str, Tensor]) -> Tensor | None:
    """Return the live memory of a block, seen with the block's shape; None where no strides lead through it."""
    own = [(walk, landing) for walk, landing in walks if block.contains(walk.block)]
    own.sort(key=lambda one: sum(map(int.__ne__, one[0].start, block.start)))
    params, boxes = {landing.param for _, landing in own}, [walk.block for walk, _ in own]
    if len(params) != 1 or sum(box.numel for box in boxes) != block.numel or overlap(boxes):
        return None  # in several parameters, or some of it twice
    strides: dict[int, int] = {}
    for walk, landing in own:
        along = walk.along()
        if along is None:
            return None  # there are others' elements between its own
        for dim, steps in enumerate(along):
            for step in steps:
                to = landing.target.strides[step.view] * (step.stride // landing.source.strides[step.view])
                if strides.setdefault(dim, to) * step.by[dim] != to:  # the finest step comes first, and is by one
                    return None
    first = own[0][1].target.offset
    for walk, landing in own:
        steps_to = {dim: at - start for dim, (at, start) in enumerate(zip(walk.start, block.start, strict=True))}
        rest = landing.target.offset - first - sum(by * strides.get(dim, 0) for dim, by in steps_to.items())
        unknown = [dim for dim, by in steps_to.items() if by and dim not in strides]
        if len(unknown) == 1 and rest > 0 and rest % steps_to[unknown[0]] == 0:
            strides[unknown[0]] = rest // steps_to[unknown[0]]
        elif unknown or rest:
            return None
    if any(size > 1 and strides.get(dim, 0) < 1 for dim, size in enumerate(block.shape)):
        return None
    seen = View(block.shape, tuple(strides.get(dim, 1) for dim in range(len(block.shape))), first)
    return seen.of(live[params.pop()].detach())
