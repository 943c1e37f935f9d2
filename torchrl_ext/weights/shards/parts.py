"""The blocks of checkpoint tensors that are parts of a module's tensor: an expert of stacked ones, half of a pair."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
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
        axes: for each dimension of the module's tensor, the size of the checkpoint tensor's that runs along it, and the
            step; None where none does.
        order: of the dimensions that have one, as the checkpoint tensor has them.
        ones: what puts dimensions of size 1 between those, as an index.
    """

    first: tuple[int, ...]
    axes: tuple[tuple[int, int] | None, ...]
    order: tuple[int, ...]
    ones: tuple[slice | None, ...]

    def shard(self, meta: ParamMeta, shard: Shard) -> Shard | None:
        """Return what a shard of the module's tensor holds of the checkpoint tensor ``meta``; None where nothing."""
        cut: list[int | slice] = []
        found: list[tuple[int, int]] = []  # start and stop in the checkpoint tensor
        for first, axis, start, stop in zip(self.first, self.axes, *shard.block, strict=True):
            if axis is None:
                if not start <= first < stop:
                    return None
                cut.append(first - start)
                continue
            size, step = axis
            low, high = max(0, -((first - start) // step)), min(size, -((first - stop) // step))
            if low >= high:
                return None
            found.append((low, high))
            begin = first + low * step - start
            cut.append(slice(begin, begin + (high - low - 1) * step + 1, step))
        bounds = iter([found[index] for index in self.order])
        whole = [(0, 1) if one is None else next(bounds) for one in self.ones]
        block = Block(tuple([low for low, _ in whole]), tuple([high for _, high in whole]))
        return Shard(meta, block, partial(self._view, shard.take, tuple(cut)), shard.gathers, shard.why)

    def _view(self, take: Callable[[], Tensor], cut: tuple[int | slice, ...]) -> Tensor:
        return take()[cut].permute(self.order)[self.ones]

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
    axes: dict[int, tuple[int, int]] = {}  # by dimension of the module's tensor, in the order of the part's
    for size, stride in zip(part.shape, part.strides, strict=True):
        if size == 1:
            continue
        dim = next((dim for dim in dims if stride and strides[dim] <= stride), -1)
        step, uneven = divmod(stride, strides[dim]) if dim >= 0 else (0, 1)
        if uneven or dim in axes or first[dim] + (size - 1) * step >= shape[dim]:
            return None
        axes[dim] = size, step
    kept = sorted(axes)
    return Place(
        first=tuple(first),
        axes=tuple(axes.get(dim) for dim in range(len(shape))),
        order=tuple(map(kept.index, axes)),
        ones=tuple(None if size == 1 else slice(None) for size in part.shape),
    )
