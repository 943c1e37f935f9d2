"""Geometry of boxes of elements: intersections and cuts.

An array of boxes is int64 of shape (boxes, 2, dimensions): the start and the stop of each. Boxes of tensors with fewer
dimensions reach from 0 to 1 in the last ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from torchrl_ext.weights.shards.blocks import Block

__all__ = ["as_array", "chunks", "cut", "meets", "volumes"]

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
    start, stop = ((edge[:axis], edge[axis + 1 :]) for edge in block)
    return [Block((*start[0], low, *start[1]), (*stop[0], high, *stop[1])) for low, high in itertools.pairwise(edges)]


def chunks(block: Block, most: int) -> list[Block]:
    """Cut a block into boxes of at most ``most`` (>= 1) elements."""
    if block.numel <= most:
        return [block]
    return [chunk for part in cut(block, -(-block.numel // most)) for chunk in chunks(part, most)]
