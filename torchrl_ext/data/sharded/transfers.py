"""The transfers of one class: parameters of one shape that trainer ranks hold alike, and workers need alike.

An array of boxes is int64 of shape (boxes, 2, dimensions): the start and the stop of each. Boxes of tensors with fewer
dimensions reach from 0 to 1 in the last ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from torchrl_ext.base.errors import ManifestError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.sharded.shares import Blocks
from torchrl_ext.data.weights.gather import disjoint
from torchrl_ext.data.weights.view import Block

__all__ = ["Transfers", "transfers_of"]

_FINEST = 8  # pieces per bucket, where a tensor is larger than one
_AT_ONCE = 1 << 20  # pairs of boxes that are compared at once, so that memory is bounded
_EVEN = 16  # rows per part from which parts are equal to within a sixteenth


class Transfers(NamedTuple):
    """Boxes of one tensor that go from a trainer rank to a worker: one row each.

    Attributes:
        chunk, rank, worker: int64 of shape (rows,); the rows of one chunk fit into one round.
        boxes: int64 of shape (rows, 2, dimensions).
        nbytes: int64 of shape (rows,).
    """

    chunk: np.ndarray
    rank: np.ndarray
    worker: np.ndarray
    boxes: np.ndarray
    nbytes: np.ndarray

    def loads(self, ranks: int, workers: int) -> np.ndarray:
        """Return the bytes of each chunk that each rank sends, and then that each worker gets: int64,
        of shape (chunks, ranks + workers).
        """
        found = np.zeros((int(self.chunk.max(initial=-1)) + 1, ranks + workers), dtype=np.int64)
        np.add.at(found, (self.chunk, self.rank), self.nbytes)
        np.add.at(found, (self.chunk, ranks + self.worker), self.nbytes)
        return found

    def chunked(self, ranks: int, workers: int, itemsize: int, bucket_bytes: int) -> Transfers:
        """Return the same transfers, cut so that no chunk is more than a bucket for any rank or worker."""
        most = int(self.loads(ranks, workers).max(initial=0))
        if most <= bucket_bytes:
            return self
        at = np.zeros(ranks + workers, dtype=np.int64)  # of each member: the last chunk that it takes part in
        filled = np.zeros(ranks + workers, dtype=np.int64)  # its bytes there
        rows: list[tuple[int, int, int]] = []
        cut_up: list[Block] = []
        for rank, worker, box in zip(self.rank.tolist(), self.worker.tolist(), self.boxes.tolist(), strict=True):
            members = [rank, ranks + worker]
            for piece in _chunks(Block(*map(tuple, box)), max(bucket_bytes // _FINEST, itemsize) // itemsize):
                chunk, nbytes = at[members].max(), piece.numel * itemsize
                used = np.where(at[members] == chunk, filled[members], 0) + nbytes
                if used.max() > bucket_bytes:
                    chunk, used[:] = chunk + 1, nbytes
                at[members], filled[members] = chunk, used
                rows.append((int(chunk), rank, worker))
                cut_up.append(piece)
        boxes = _as_array(cut_up, self.boxes.shape[-1])
        chunk, ranks_of, workers_of = np.array(rows, dtype=np.int64).T
        return Transfers(chunk, ranks_of, workers_of, boxes, _volumes(boxes) * itemsize)


def transfers_of(
    index: int, meta: ParamMeta, held: Sequence[Blocks], needed: Mapping[int, Blocks], dimensions: int, turn: int
) -> Transfers:
    """Find the parts of a parameter that workers need, each with a rank that holds it.

    Args:
        index: of the parameter; any of its class.
        meta: the parameter.
        held: by trainer rank; they may overlap.
        needed: by worker.
        dimensions: of the boxes.
        turn: where several ranks hold elements, which of them sends, counted from the first.

    Raises:
        ManifestError: a block is no part of the parameter, a worker names an element twice, or nobody holds some of
            the elements.
    """
    blocks = _by_block(index, meta, enumerate(held), "trainer rank")
    needs = _by_block(index, meta, needed.items(), "worker")
    owned = disjoint(meta, blocks)
    members, wants = list(needs.values()), _as_array(list(needs), dimensions)
    for one, other in zip(*_meets(wants, wants)[:2], strict=True):
        if one < other and (both := set(members[one]).intersection(members[other])):
            raise ManifestError(f"worker {min(both)} asks for elements of {meta} twice", expected="disjoint blocks")
    sender = np.array([ranks[(turn + at) % len(ranks)] for at, ranks in enumerate(owned.values())], dtype=np.int64)
    cell, need, boxes = _meets(_as_array(list(owned), dimensions), wants)
    row = np.repeat(np.arange(len(cell)), [len(members[one]) for one in need])
    worker = np.array([member for one in need for member in members[one]], dtype=np.int64)
    nbytes = _volumes(boxes[row]) * meta.dtype.itemsize
    return Transfers(np.zeros_like(row), sender[cell[row]], worker, boxes[row], nbytes)


def _by_block(index: int, meta: ParamMeta, shares: Iterable[tuple[int, Blocks]], who: str) -> dict[Block, list[int]]:
    """Return the blocks of a parameter in these shares, each with the members that have it, in order."""
    found: dict[Block, list[int]] = {}
    whole = Block.whole(meta.shape)
    for member, share in shares:
        for block in share.blocks(index):
            alike = {len(block.start), len(block.stop)} == {len(meta.shape)}
            if not alike or not whole.contains(block) or not all(map(int.__lt__, block.start, block.stop)):
                raise ManifestError(
                    f"{who} {member} names the block from {list(block.start)} to {list(block.stop)} of {meta}",
                    expected="a block of its elements",
                )
            found.setdefault(block, []).append(member)
    return found


def _as_array(blocks: Sequence[Block], dimensions: int) -> np.ndarray:
    """Return blocks of one tensor, which has at most ``dimensions`` dimensions, as an array of boxes."""
    ndim = len(blocks[0].start) if blocks else 0
    found = np.zeros((len(blocks), 2, dimensions), dtype=np.int64)
    found[:, 1] = 1
    found[:, :, :ndim] = np.array(blocks, dtype=np.int64).reshape(len(blocks), 2, ndim)
    return found


def _volumes(boxes: np.ndarray) -> np.ndarray:
    """Return the number of elements of each box, none of which is empty: int64 of shape (boxes,)."""
    return np.asarray((boxes[:, 1] - boxes[:, 0]).prod(axis=-1, dtype=np.int64))


def _meets(boxes: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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


def _cut(block: Block, parts: int) -> list[Block]:
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


def _chunks(block: Block, most: int) -> list[Block]:
    """Cut a block into boxes of at most ``most`` (>= 1) elements."""
    if block.numel <= most:
        return [block]
    return [chunk for part in _cut(block, -(-block.numel // most)) for chunk in _chunks(part, most)]
