"""Geometry of boxes of elements: intersections and cuts.

An array of boxes is int64 of shape (boxes, 2, dimensions): the start and the stop of each. Boxes of tensors with fewer
dimensions reach from 0 to 1 in the last ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from torchrl_ext.errors import ManifestError
from torchrl_ext.weights.shards.blocks import Block

__all__ = ["as_array", "cells", "chunks", "cut", "meets", "volumes"]

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


def cells(owned: Mapping[Block, Sequence[int]], shape: Sequence[int]) -> list[tuple[Block, tuple[int, ...]]]:
    """Cut a tensor of this shape into boxes, each with all of its owners; nobody owns a hole.

    Args:
        owned: blocks of it that are not empty, and may overlap, each with its owners.
        shape: of the tensor, one number per dimension.

    Raises:
        ManifestError: the blocks overlap, or leave holes, in too many ways.
    """
    blocks, boxes = list(owned), as_array(list(owned), len(shape))
    if volumes(boxes).sum() == math.prod(shape) and len(meets(boxes, boxes)[0]) == len(boxes):  # each only meets itself
        return [(block, tuple(sorted(owners))) for block, owners in owned.items()]
    edges = [np.unique([0, size, *boxes[:, :, axis].flat]).tolist() for axis, size in enumerate(shape)]
    if math.prod(len(along) - 1 for along in edges) > _MOST_CELLS:
        raise ManifestError(
            f"{len(owned)} blocks of one tensor overlap, or leave holes, in more than {_MOST_CELLS} ways",
            expected="blocks that are equal, or disjoint, or overlap in few places",
        )
    sides = itertools.product(*map(itertools.pairwise, edges))
    grid = [Block(tuple(start for start, _ in pairs), tuple(stop for _, stop in pairs)) for pairs in sides]
    owners: list[set[int]] = [set() for _ in grid]
    for box, cell in zip(*meets(boxes, as_array(grid, len(shape)))[:2], strict=True):
        owners[cell].update(owned[blocks[box]])
    return [(cell, tuple(sorted(own))) for cell, own in zip(grid, owners, strict=True)]


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
