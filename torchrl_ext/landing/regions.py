"""Strided views of a full contiguous tensor in its own coordinates: which block they cover, and how they walk it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torchrl_ext.weights.shards.blocks import Block

__all__ = ["Step", "Walk", "region_of", "walk_of", "widths_of"]


class Step(NamedTuple):
    """One dimension of a walk.

    Attributes:
        size: how many elements it goes along.
        view: which dimension of the view it is, or is a part of.
        stride: of the view, in elements of the full tensor.
        by: how far each step goes in every dimension of the full tensor.
    """

    size: int
    view: int
    stride: int
    by: tuple[int, ...]


class Walk(NamedTuple):
    """A strided view of a full contiguous tensor, as steps in the coordinates of the full tensor.

    Attributes:
        start: coordinates of the first element.
        stop: one past the greatest coordinate, in every dimension.
        steps: the dimensions of the view in their order, each as one or several; those of one element are left out.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def block(self) -> Block:
        """The smallest block that has every element."""
        return Block(self.start, self.stop)

    def along(self) -> list[list[Step]] | None:
        """Return for each dimension of the full tensor the steps along it, the finest first; None where it is no box.

        A box is walked through by steps that go along one dimension each, and that meet each element once.
        """
        found: list[list[Step]] = [[] for _ in self.start]
        for step in self.steps:
            moves = [dim for dim, by in enumerate(step.by) if by]
            if len(moves) != 1:
                return None
            found[moves[0]].append(step)
        for dim, steps in enumerate(found):
            steps.sort(key=lambda step: step.by[dim])
            reached = 1
            for step in steps:
                if step.by[dim] != reached:
                    return None
                reached *= step.size
        return found


def walk_of(shape: Sequence[int], offset: int, sizes: Sequence[int], strides: Sequence[int]) -> Walk | None:
    """Return a strided view of a full contiguous tensor as steps in its coordinates.

    Args:
        shape: of the full tensor.
        offset: of the view's first element, in elements.
        sizes, strides: of the view; it has elements.

    Returns:
        None where no steps of fixed direction lead through it (it wraps around at places that differ from row to row).
    """
    widths = widths_of(shape)
    if not 0 <= offset < math.prod(shape):
        return None
    start = _digits(offset, widths)
    last, steps = list(start), list[Step]()
    for view, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        coarse = list[Step]()
        while size > 1:
            by = _digits(stride, widths)
            room = [(shape[dim] - 1 - start[dim]) // one for dim, one in enumerate(by) if one]
            fits = min([size, *(one + 1 for one in room)])
            if fits < size:  # a flattened dimension: whole rounds of the finer one, then steps of the coarser one
                carried = next((dim for dim, one in enumerate(by) if one), 0)
                fits = shape[carried] // by[carried] if by[carried] else 0
                if start[carried] or fits < 2 or size % fits or shape[carried] % by[carried]:
                    return None
            coarse.insert(0, Step(fits, view, stride, by))
            size, stride = size // fits, stride * fits
        steps += coarse
    for step in steps:
        last = [at + (step.size - 1) * one for at, one in zip(last, step.by, strict=True)]
    if any(at >= size for at, size in zip(last, shape, strict=True)):
        return None
    return Walk(start, tuple(at + 1 for at in last), tuple(steps))


def region_of(shape: Sequence[int], offset: int, sizes: Sequence[int], strides: Sequence[int]) -> Block | None:
    """Return the block of a full contiguous tensor that a strided view covers, each element once; None if it is none.

    Args:
        shape: of the full tensor.
        offset: of the view's first element, in elements.
        sizes, strides: of the view.
    """
    walk = walk_of(shape, offset, sizes, strides) if math.prod(sizes) else None
    return None if walk is None or walk.along() is None else walk.block


def widths_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    found = [1]
    for size in reversed(shape[1:]):
        found.append(found[-1] * size)
    return tuple(reversed(found)) if shape else ()


def _digits(offset: int, widths: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinates of an element, or how far a stride goes in each dimension."""
    found = []
    for width in widths:
        digit, offset = divmod(offset, width)
        found.append(digit)
    return tuple(found)
