"""The blocks of checkpoint tensors that are parts of a module's tensor: an expert of stacked ones, half of a pair."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from torch import Tensor

from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.shards.blocks import Block, Shard

if TYPE_CHECKING:
    from torchrl_ext.weights.groups import Part

__all__ = ["Place", "place_of"]


@dataclass(frozen=True)
class Place:
    """Where in a module's tensor a checkpoint tensor lies, dimension by dimension.

    Attributes:
        first: index of its first element there.
        axes: for each dimension of the checkpoint tensor, the one of the module's that it runs along, and the step;
            None where its size is 1.
    """

    first: tuple[int, ...]
    axes: tuple[tuple[int, int] | None, ...]

    def shard(self, meta: ParamMeta, shard: Shard) -> Shard | None:
        """Return what a shard of the module's tensor holds of the checkpoint tensor ``meta``; None where nothing."""
        along = {axis[0]: (size, axis[1]) for size, axis in zip(meta.shape, self.axes, strict=True) if axis}
        found: dict[int, tuple[int, int]] = {}  # by dimension of the module's tensor: start and stop in the other
        cut: list[int | slice] = []
        for dim, (first, start, stop) in enumerate(zip(self.first, shard.block.start, shard.block.stop, strict=True)):
            if dim not in along:
                if not start <= first < stop:
                    return None
                cut.append(first - start)
                continue
            size, step = along[dim]
            low, high = max(0, -((first - start) // step)), min(size, -((first - stop) // step))
            if low >= high:
                return None
            found[dim] = low, high
            begin = first + low * step - start
            cut.append(slice(begin, begin + (high - low - 1) * step + 1, step))
        bounds = [found[axis[0]] if axis else (0, 1) for axis in self.axes]
        there, kept = tuple(cut), sorted(found)
        order = [kept.index(axis[0]) for axis in self.axes if axis]
        ones = tuple(slice(None) if axis else None for axis in self.axes)

        def take() -> Tensor:
            return shard.take()[there].permute(order)[ones]

        block = Block(tuple(low for low, _ in bounds), tuple(high for _, high in bounds))
        return replace(shard, meta=meta, block=block, take=take)

    def shards(self, meta: ParamMeta, shards: list[Shard]) -> Iterator[Shard]:
        """Yield what shards of the module's tensor hold of the checkpoint tensor ``meta``."""
        for one in shards:
            found = self.shard(meta, one)
            if found is not None:
                yield found


@lru_cache(maxsize=16384)
def place_of(part: Part, shape: tuple[int, ...], strides: tuple[int, ...]) -> Place | None:
    """Return where a part lies, or None where that is no box: dimensions are split or merged, or elements repeated.

    Args:
        part: of a tensor of the module.
        shape, strides: of that tensor.
    """
    dims = sorted((dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: -strides[dim])
    reach = 1
    for dim in reversed(dims):
        if strides[dim] < reach:  # elements share memory, so that a position there is no index
            return None
        reach = strides[dim] * shape[dim]
    first, rest = [0] * len(shape), part.offset
    for dim in dims:
        first[dim], rest = divmod(rest, strides[dim])
    if rest or any(first[dim] >= shape[dim] for dim in dims):
        return None
    axes: list[tuple[int, int] | None] = []
    for size, stride in zip(part.shape, part.strides, strict=True):
        if size == 1:
            axes.append(None)
            continue
        dim = next((dim for dim in dims if stride and strides[dim] <= stride), -1)
        step, uneven = divmod(stride, strides[dim]) if dim >= 0 else (0, 1)
        known = {axis[0] for axis in axes if axis}
        if uneven or dim in known or first[dim] + (size - 1) * step >= shape[dim]:
            return None
        axes.append((dim, step))
    return Place(tuple(first), tuple(axes))
