"""Boxes and strided views of full tensors: which elements they have, and whether boxes tile a tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["Block", "overlap", "tiles", "without"]


class Block(NamedTuple):
    """A box of elements of a full tensor, in checkpoint coordinates: ``start <= index < stop`` in every dimension.

    Attributes:
        start, stop: one number per dimension; none of a tensor without dimensions, which has one element.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Block:
        """Return the block of all elements of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{start}:{stop}" for start, stop in zip(*self, strict=True)) + "]"

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the block."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """The number of elements; 0 where the block is empty."""
        return math.prod(max(0, size) for size in self.shape)

    def within(self, other: Block) -> tuple[slice, ...]:
        """Return the slices that cut this block out of a tensor that holds ``other``, which contains it."""
        return tuple(
            slice(start - first, stop - first)
            for start, stop, first in zip(self.start, self.stop, other.start, strict=True)
        )

    def meet(self, other: Block) -> Block | None:
        """Return the block of elements that are in both; None where there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Block(start, stop) if all(map(int.__lt__, start, stop)) else None

    def contains(self, other: Block) -> bool:
        """Return whether every element of ``other`` is in this block."""
        return all(map(int.__le__, self.start, other.start)) and all(map(int.__ge__, self.stop, other.stop))


def tiles(blocks: Sequence[Block], shape: Sequence[int]) -> tuple[Block, ...]:
    """Return why blocks do not tile a tensor: two that share elements, or the hole where its first missing element is.

    Args:
        blocks: within the tensor.
        shape: of the tensor.

    Returns:
        Two of ``blocks`` that overlap; else one block of elements that no block has, of which the first is the first
        missing one in C order; else nothing, and each element is in exactly one block.
    """
    found = overlap(blocks)
    if found is None and sum(block.numel for block in blocks) < math.prod(shape):
        found = (min(without([Block.whole(shape)], blocks)),)
    return found or ()


def overlap(blocks: Iterable[Block]) -> tuple[Block, ...] | None:
    """Return two of the blocks, which are of one tensor, that share an element; None where no two do."""
    left = [block for block in blocks if block.numel]
    if len(left) < 2:
        return None
    dims = range(len(left[0].start))
    dim = max(dims, key=lambda dim: len({block.start[dim] for block in left}), default=None)
    if dim is None:
        return left[0], left[1]  # of a tensor with one element
    reaching: list[Block] = []  # those that reach as far as the next one begins
    for block in sorted(left, key=lambda block: block.start[dim]):
        reaching = [other for other in reaching if other.stop[dim] > block.start[dim]]
        for other in reaching:
            if other.meet(block) is not None:
                return other, block
        reaching.append(block)
    return None


def without(blocks: Iterable[Block], taken: Iterable[Block]) -> list[Block]:
    """Return disjoint blocks of the elements of ``blocks``, which are disjoint, that are in none of ``taken``."""
    left = list(blocks)
    for other in taken:
        rest: list[Block] = []
        for block in left:
            common = block.meet(other)
            if common is None:
                rest.append(block)
                continue
            start, stop = list(block.start), list(block.stop)
            for dim, (first, last) in enumerate(zip(*common, strict=True)):
                if start[dim] < first:
                    rest.append(Block(tuple(start), (*stop[:dim], first, *stop[dim + 1 :])))
                if last < stop[dim]:
                    rest.append(Block((*start[:dim], last, *start[dim + 1 :]), tuple(stop)))
                start[dim], stop[dim] = first, last
        left = rest
    return left
