"""Geometry of boxes of elements: intersections, differences, and cuts.

An array of boxes is int64 of shape (boxes, 2, dimensions): the start and the stop of each. Boxes of tensors with fewer
dimensions reach from 0 to 1 in the last ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from torchrl_ext.errors import ManifestError
from torchrl_ext.weights.shards.blocks import Block

__all__ = ["as_array", "cells", "chunks", "cut", "meets", "missing", "volumes"]

_MOST_CELLS = 1 << 14
_AT_ONCE = 1 << 20  # pairs of boxes that are compared at once, so that memory is bounded
_EVEN = 16  # rows per part from which parts are equal to within a sixteenth


def as_array(blocks: Sequence[Block], dimensions: int) -> np.ndarray:
    """Return blocks of one tensor, which has at most ``dimensions`` dimensions, as an array of boxes."""
    ndim = len(blocks[0].start) if blocks else 0
    found = np.zeros((len(blocks), 2, dimensions), dtype=np.int64)
    found[:, 1] = 1
    found[:, :, :ndim] = np.array(blocks, dtype=np.int64).reshape(len(blocks), 2, ndim)
    return found


def volumes(boxes: np.ndarray) -> np.ndarray:
    """Return the number of elements of each box, none of which is empty: int64 of shape (boxes,)."""
    return np.asarray((boxes[:, 1] - boxes[:, 0]).prod(axis=-1, dtype=np.int64))


def meets(boxes: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the indices of intersecting boxes, as two arrays, and their intersections."""
    found = []
    step = max(1, _AT_ONCE // max(1, len(others)))
    for low in range(0, max(1, len(boxes)), step):
        slab = boxes[low : low + step, None]
        start, stop = np.maximum(slab[:, :, 0], others[None, :, 0]), np.minimum(slab[:, :, 1], others[None, :, 1])
        first, second = np.nonzero((start < stop).all(axis=-1))
        found.append((first + low, second, np.stack([start[first, second], stop[first, second]], axis=1)))
    first, second, shared = map(np.concatenate, zip(*found, strict=True))
    return first, second, shared


def cells(owned: Mapping[Block, Sequence[int]], dimensions: int) -> list[tuple[Block, tuple[int, ...]]]:
    """Cut blocks that may overlap into disjoint ones, each with all of its owners.

    Args:
        owned: blocks that are not empty, each with its owners.
        dimensions: as for `as_array`.

    Raises:
        ManifestError: the blocks overlap in too many ways.
    """
    boxes = as_array(list(owned), dimensions)
    if len(meets(boxes, boxes)[0]) == len(boxes):  # each one only meets itself
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
    """Cut a block of two elements or more into that many parts along one dimension, or into fewer where it is short.

    The first dimension is taken that gives parts of nearly equal size, for the elements of a part then lie together;
    else the longest.
    """
    sizes = block.shape
    longest = max(range(len(sizes)), key=sizes.__getitem__)
    axis = next((axis for axis, size in enumerate(sizes) if size >= _EVEN * parts), longest)
    parts = min(parts, sizes[axis])
    edges = [block.start[axis] + sizes[axis] * part // parts for part in range(parts + 1)]
    return [_put(block, axis, *pair) for pair in itertools.pairwise(edges)]


def chunks(block: Block, most: int) -> list[Block]:
    """Cut a block into boxes of at most ``most`` (>= 1) elements."""
    if block.numel <= most:
        return [block]
    return [chunk for part in cut(block, -(-block.numel // most)) for chunk in chunks(part, most)]


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
