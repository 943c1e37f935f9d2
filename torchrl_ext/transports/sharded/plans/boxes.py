"""Geometry of boxes of elements: intersections, differences, and cuts.

An array of boxes is int64 of shape (boxes, 2, dimensions): the start and the stop of each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from torchrl_ext.errors import ManifestError
from torchrl_ext.weights.shards.blocks import Block

__all__ = ["as_array", "cells", "chunks", "cut", "first_overlap", "meets", "missing", "volumes"]

_MOST_CELLS = 1 << 14
_AT_ONCE = 1 << 20  # pairs of boxes that are compared at once, so that memory is bounded
_EVEN = 16  # rows per part from which parts are equal to within a sixteenth


def as_array(blocks: Iterable[Block], ndim: int) -> np.ndarray:
    """Return blocks of ``ndim`` dimensions as one array, int64 of shape (blocks, 2, ndim)."""
    listed = list(blocks)
    return np.array(listed, dtype=np.int64).reshape(len(listed), 2, ndim)


def volumes(boxes: np.ndarray) -> np.ndarray:
    """Return the number of elements of each box, int64; the last two dimensions of ``boxes`` are a box's."""
    sizes = np.maximum(boxes[..., 1, :] - boxes[..., 0, :], 0)
    return np.asarray(sizes.prod(axis=-1, dtype=np.int64))


def meets(boxes: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the indices of intersecting boxes, as two arrays, and their intersections."""
    found = list(_meets(boxes, others)) or [(np.zeros(0, dtype=np.int64),) * 2 + (others[:0],)]
    first, second, shared = (np.concatenate(column) for column in zip(*found, strict=True))
    return first, second, shared


def first_overlap(boxes: np.ndarray) -> tuple[int, int] | None:
    """Return the first two boxes that have an element in common; None where all are disjoint."""
    for first, second, _ in _meets(boxes, boxes):
        clash = np.flatnonzero(first < second)
        if len(clash):
            return int(first[clash[0]]), int(second[clash[0]])
    return None


def _meets(boxes: np.ndarray, others: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    step = max(1, _AT_ONCE // max(1, len(others)))
    for low in range(0, len(boxes), step):
        slab = boxes[low : low + step, None]
        start, stop = np.maximum(slab[:, :, 0], others[None, :, 0]), np.minimum(slab[:, :, 1], others[None, :, 1])
        first, second = np.nonzero((start < stop).all(axis=-1))
        yield first + low, second, np.stack([start[first, second], stop[first, second]], axis=1)


def cells(owned: Mapping[Block, Sequence[int]], ndim: int) -> list[tuple[Block, tuple[int, ...]]]:
    """Cut blocks that may overlap into disjoint ones, each with all of its owners.

    Args:
        owned: blocks that are not empty, each with its owners.
        ndim: their number of dimensions.

    Raises:
        ManifestError: the blocks overlap in too many ways.
    """
    if first_overlap(as_array(owned, ndim)) is None:
        return [(block, tuple(sorted(owners))) for block, owners in owned.items()]
    found: dict[Block, set[int]] = {}
    for block, owners in owned.items():
        left, cut_up = [block], {}
        for cell in [cell for cell in found if cell.meet(block)]:
            had, both = found.pop(cell), cell.meet(block)
            assert both is not None
            cut_up[both] = had | set(owners)
            cut_up |= dict.fromkeys(_without(cell, both), had)
            left = [rest for piece in left for rest in _without(piece, both)]
        found |= cut_up | {rest: set(owners) for rest in left}
        if len(found) > _MOST_CELLS:
            raise ManifestError(
                f"{len(owned)} blocks of one tensor overlap in more than {_MOST_CELLS} ways",
                expected="blocks that are equal, or disjoint, or overlap in few places",
            )
    return [(cell, tuple(sorted(owners))) for cell, owners in found.items()]


def missing(blocks: Iterable[Block], shape: Sequence[int]) -> Block | None:
    """Return the first box of a tensor of this shape that no block covers; None where the blocks cover all of it."""
    left = [Block.whole(shape)] if math.prod(shape) else []
    for block in blocks:
        left = [rest for piece in left for rest in _without(piece, block)]
    return min(left, default=None)


def cut(block: Block, parts: int) -> list[Block]:
    """Cut a block into that many parts along one dimension, or into fewer where it is not long enough.

    The first dimension is taken that gives parts of nearly equal size, for the elements of a part then lie together;
    else the longest.
    """
    sizes = block.shape
    enough = (axis for axis, size in enumerate(sizes) if size >= _EVEN * parts)
    longest = max(range(len(sizes)), key=sizes.__getitem__, default=None)
    axis = next(enough, longest)
    return [block] if axis is None else _split(block, axis, parts)


def chunks(block: Block, most: int) -> list[Block]:
    """Cut a block into boxes of at most ``most`` (>= 1) elements: along the first dimension that can be cut, and rows
    that are too large along the next ones.
    """
    if block.numel <= most:
        return [block]
    axis = next(axis for axis, size in enumerate(block.shape) if size > 1)
    rows = most // math.prod(block.shape[axis + 1 :])
    parts = _split(block, axis, -(-block.shape[axis] // rows) if rows else block.shape[axis])
    return parts if rows else [chunk for row in parts for chunk in chunks(row, most)]


def _split(block: Block, axis: int, parts: int) -> list[Block]:
    first, size = block.start[axis], block.shape[axis]
    parts = min(parts, size)
    edges = [first + size * part // parts for part in range(parts + 1)]
    return [_put(block, axis, *pair) for pair in itertools.pairwise(edges)]


def _put(block: Block, axis: int, start: int, stop: int) -> Block:
    return Block(
        (*block.start[:axis], start, *block.start[axis + 1 :]), (*block.stop[:axis], stop, *block.stop[axis + 1 :])
    )


def _without(block: Block, other: Block) -> list[Block]:
    """Return disjoint boxes that cover ``block`` without ``other``."""
    both = block.meet(other)
    if both is None:
        return [block]
    found = []
    for axis in range(len(block.start)):
        for start, stop in ((block.start[axis], both.start[axis]), (both.stop[axis], block.stop[axis])):
            if start < stop:
                found.append(_put(block, axis, start, stop))
        block = _put(block, axis, both.start[axis], both.stop[axis])
    return found
