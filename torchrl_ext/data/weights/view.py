"""Boxes and strided views of full tensors: which elements they have, and which of them boxes share or lack."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import mul
from typing import NamedTuple

from torch import Tensor

__all__ = ["Block", "Step", "View", "Walk", "has_each_once", "merged", "overlap", "without"]


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


class View(NamedTuple):
    """A strided view of a full tensor. Numbers count elements.

    Attributes:
        sizes: of the view.
        strides, offset: of the view in the memory of the full tensor, from its first element.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def whole(cls, shape: Sequence[int]) -> View:
        """Return the view of all elements of a contiguous tensor of this shape."""
        strides = [1]
        for size in reversed(shape[1:]):
            strides.append(strides[-1] * size)
        return cls(tuple(shape), tuple(reversed(strides))[: len(shape)])

    @classmethod
    def seen(cls, tensor: Tensor) -> View:
        """Return the view that ``tensor`` is of its own storage."""
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the view of this tensor, in its memory; ``tensor`` has the strides of the full tensor."""
        return tensor.as_strided(self.sizes, self.strides, tensor.storage_offset() + self.offset)

    def positions(self, index: Tensor) -> Tensor:
        """Return where in the memory of the full tensor elements lie whose places in the view are ``index`` in C order.

        Args:
            index: int64, of any shape, which the result has too.
        """
        found = index * 0 + self.offset
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            found, index = found + index % size * stride, index // size
        return found

    def walk(self, shape: Sequence[int], strides: Sequence[int] | None = None) -> Walk | None:
        """Return this view as steps in the coordinates of the full tensor.

        Args:
            shape, strides: of the full tensor, which is contiguous by default.

        Returns:
            None where the view has no elements, no steps of fixed direction lead through it (it wraps around at places
            that differ from row to row), or elements of the full tensor share memory.
        """
        strides = View.whole(shape).strides if strides is None else strides
        dims = sorted((dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: -strides[dim])
        reach = [*(strides[dim] * shape[dim] for dim in dims), 1]
        if not self.numel or any(strides[dim] < inner for dim, inner in zip(dims, reach[1:], strict=True)):
            return None

        def coordinates(distance: int) -> tuple[int, ...] | None:
            found = [0] * len(shape)
            for dim in dims:
                found[dim], distance = divmod(distance, strides[dim])
            return None if distance else tuple(found)

        start, steps = coordinates(self.offset), list[Step]()
        if start is None or any(at >= size for at, size in zip(start, shape, strict=True)):
            return None
        for view, (size, stride) in enumerate(zip(self.sizes, self.strides, strict=True)):
            coarse = list[Step]()
            while size > 1:
                by = coordinates(stride)
                if by is None:
                    return None
                moved = [dim for dim in dims if by[dim]]
                fits = min([size, *((shape[dim] - 1 - start[dim]) // by[dim] + 1 for dim in moved)])
                if fits < size:  # a flattened dimension: whole rounds of the finer one, then steps of the coarser one
                    carried = moved[0]
                    fits = shape[carried] // by[carried]
                    if start[carried] or fits < 2 or size % fits or shape[carried] % by[carried]:
                        return None
                coarse.insert(0, Step(fits, view, stride, by))
                size, stride = size // fits, stride * fits
            steps += coarse
        found = Walk(start, tuple(steps), self.sizes)
        return found if Block.whole(shape).contains(found.block) else None


class Step(NamedTuple):
    """One dimension of a walk.

    Attributes:
        size: how many elements it goes along.
        view: which dimension of the view it is, or is a part of.
        stride: in elements of the full tensor's memory.
        by: how far each step goes in every dimension of the full tensor.
    """

    size: int
    view: int
    stride: int
    by: tuple[int, ...]

    @property
    def moves(self) -> list[int]:
        """The dimensions of the full tensor in which it goes anywhere."""
        return [dim for dim, by in enumerate(self.by) if by]


class Walk(NamedTuple):
    """A strided view of a full tensor, as steps in the coordinates of the full tensor.

    Attributes:
        start: coordinates of the first element.
        steps: the dimensions of the view in their order, each as one or several; those of one element are left out.
        sizes: of the view.
    """

    start: tuple[int, ...]
    steps: tuple[Step, ...]
    sizes: tuple[int, ...]

    @property
    def block(self) -> Block:
        """The smallest block that has every element."""
        last = self.start
        for step in self.steps:
            last = tuple(at + (step.size - 1) * by for at, by in zip(last, step.by, strict=True))
        return Block(self.start, tuple(at + 1 for at in last))

    def along(self) -> list[list[Step]] | None:
        """Return for each dimension of the full tensor the steps along it, the finest first; None where it is no box.

        A box is walked through by steps that go along one dimension each, and that meet each element once.
        """
        found: list[list[Step]] = [[] for _ in self.start]
        for step in self.steps:
            if len(step.moves) != 1:
                return None
            found[step.moves[0]].append(step)
        for dim, steps in enumerate(found):
            steps.sort(key=lambda step: step.by[dim])
            reached = 1
            for step in steps:
                if step.by[dim] != reached:
                    return None
                reached *= step.size
        return found

    @property
    def straight(self) -> bool:
        """Whether each dimension of the view goes along one dimension of the full tensor, and no two along the same."""
        moves = [dim for step in self.steps for dim in step.moves]
        views = [step.view for step in self.steps]
        return len({*moves}) == len({*views}) == len(moves) == len(views)

    def restrict(self, block: Block) -> tuple[Block, Walk] | None:
        """Return the elements that lie in a block of the full tensor; None where there are none.

        The walk has to be `straight`.

        Returns:
            The block of the view that they are, and the walk through them, in coordinates of the full tensor.
        """
        start, steps, bounds = list(self.start), list[Step](), [(0, 1)] * len(self.sizes)
        for step in self.steps:
            (dim,) = step.moves
            first, by = self.start[dim], step.by[dim]
            low, high = max(0, -((first - block.start[dim]) // by)), min(step.size, -((first - block.stop[dim]) // by))
            if low >= high:
                return None
            start[dim] += low * by
            steps.append(step._replace(size=high - low))
            bounds[step.view] = low, high
        own = Block(tuple(low for low, _ in bounds), tuple(high for _, high in bounds))
        walk = Walk(tuple(start), tuple(steps), own.shape)
        return (own, walk) if block.contains(walk.block) else None

    def of(self, tensor: Tensor, block: Block) -> Tensor:
        """Return the elements of the view, of its sizes, in memory that holds a block of the full tensor.

        Args:
            tensor: of the block's shape, with any strides.
            block: has every element of the view.

        Returns:
            A view of ``tensor``; a copy where it has no strides that lead through it.
        """
        begun = tensor[self.block.within(block)]
        strides = [sum(map(mul, step.by, begun.stride())) for step in self.steps]
        found = begun.as_strided([step.size for step in self.steps], strides, begun.storage_offset())
        return found.reshape(self.sizes)


def has_each_once(tensor: Tensor) -> bool:
    """Return whether no two elements of a tensor share memory, as in an expanded one, or where windows overlap."""
    reach = 1
    if tensor.is_contiguous() or not tensor.numel():
        return True
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < reach:
            return False
        reach += (size - 1) * stride
    return True


def overlap(blocks: Iterable[Block]) -> tuple[Block, ...] | None:
    """Return two of the blocks, which are of one tensor, that share an element; None where no two do."""
    left = [block for block in blocks if block.numel]
    dims = range(len(left[0].start) if left else 0)
    dim = max(dims, key=lambda dim: len({block.start[dim] for block in left}), default=None)
    if dim is None:  # of a tensor with one element
        return (left[0], left[1]) if len(left) > 1 else None
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


def merged(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Return disjoint blocks, in order, that have every element of these; two that overlap or make up a block join."""
    found: list[Block] = []
    for block in sorted(set(blocks)):
        while (other := next((one for one in reversed(found) if _joins(one, block)), None)) is not None:
            found.remove(other)
            block = _around(other, block)
        found.append(block)
    return tuple(sorted(found))


def _joins(one: Block, other: Block) -> bool:
    if not (all(map(int.__ge__, one.stop, other.start)) and all(map(int.__ge__, other.stop, one.start))):
        return False  # quick, as most of many blocks lie far apart
    return one.meet(other) is not None or _around(one, other).numel == one.numel + other.numel


def _around(one: Block, other: Block) -> Block:
    return Block(tuple(map(min, one.start, other.start)), tuple(map(max, one.stop, other.stop)))
