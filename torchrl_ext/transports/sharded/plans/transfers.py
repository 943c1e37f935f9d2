"""The transfers of one class: parameters of one shape that trainer ranks hold alike, and workers need alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from torchrl_ext.errors import ManifestError
from torchrl_ext.transports.sharded.plans.boxes import as_array, cells, chunks, cut, meets, missing, volumes
from torchrl_ext.transports.sharded.plans.shares import Share, check_block
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.shards.blocks import Block

__all__ = ["Pieces", "Transfers", "pieces_of"]

_WORTH_CUTTING_BYTES = 64 << 10
_FINEST = 8  # pieces per bucket, where a tensor is larger than one


class Transfers(NamedTuple):
    """Boxes of one tensor that go from a trainer rank to a worker: one row each, in order of rank and worker.

    Attributes:
        rank, worker: int64 of shape (rows,).
        boxes: int64 of shape (rows, 2, dimensions).
        nbytes: int64 of shape (rows,).
        chunk: int64 of shape (rows,): the rows of one chunk fit into one round.
    """

    rank: np.ndarray
    worker: np.ndarray
    boxes: np.ndarray
    nbytes: np.ndarray
    chunk: np.ndarray

    def loads(self, ranks: int, workers: int) -> np.ndarray:
        """Return the bytes of each chunk that each rank sends, and then that each worker gets: int64,
        of shape (chunks, ranks + workers).
        """
        found = np.zeros((int(self.chunk.max(initial=0)) + 1, ranks + workers), dtype=np.int64)
        np.add.at(found, (self.chunk, self.rank), self.nbytes)
        np.add.at(found, (self.chunk, ranks + self.worker), self.nbytes)
        return found

    def chunked(self, ranks: int, workers: int, itemsize: int, bucket_bytes: int) -> Transfers:
        """Return the same transfers, cut so that no chunk is more than a bucket for any rank or worker."""
        most = int(self.loads(ranks, workers).max(initial=0))
        if most <= bucket_bytes:
            return self
        wanted = -(-most // bucket_bytes)
        loads = np.zeros((2 * wanted, ranks + workers), dtype=np.int64)
        rows: list[tuple[int, int, int, Block]] = []
        for rank, worker, box in zip(self.rank.tolist(), self.worker.tolist(), self.boxes.tolist(), strict=True):
            block = Block(*map(tuple, box))
            size = max(block.numel * itemsize // wanted, bucket_bytes // _FINEST, itemsize)
            pieces = chunks(block, size // itemsize)
            for number, piece in enumerate(pieces):
                nbytes, first = piece.numel * itemsize, number * wanted // len(pieces)
                while True:
                    free = np.maximum(loads[first:, rank], loads[first:, ranks + worker]) <= bucket_bytes - nbytes
                    if free.any():
                        break
                    loads = np.concatenate([loads, np.zeros_like(loads)])
                at = first + int(free.argmax())
                loads[at, rank] += nbytes
                loads[at, ranks + worker] += nbytes
                rows.append((at, rank, worker, piece))
        chunk, rank_of, worker_of = (np.array(column, dtype=np.int64) for column in list(zip(*rows, strict=True))[:3])
        boxes = as_array([row[3] for row in rows], self.boxes.shape[-1])
        return Transfers(rank_of, worker_of, boxes, volumes(boxes) * itemsize, chunk)


class Pieces(NamedTuple):
    """The transfers of a class before a sender is picked among replicas.

    Attributes:
        holders: the ranks that hold each piece, of which one sends it.
        repeats: over how many parameters of the class the senders of small pieces are spread.
        piece: int64 of shape (rows,): which of the pieces the box of this row is a part of.
        worker, boxes, nbytes: as in `Transfers`.
    """

    holders: list[tuple[int, ...]]
    repeats: int
    piece: np.ndarray
    worker: np.ndarray
    boxes: np.ndarray
    nbytes: np.ndarray

    def sent_by(self, sent: list[int], times: int) -> Transfers:
        """Let the holder of each piece send it that sends least so far, the largest piece first.

        Args:
            sent: bytes that each rank sends so far; the bytes of these transfers are added.
            times: how many parameters there are of this kind.
        """
        load = np.bincount(self.piece, self.nbytes, len(self.holders)).astype(np.int64)
        sender = np.zeros(len(self.holders), dtype=np.int64)
        for at in np.argsort(-load, kind="stable").tolist():
            sender[at] = rank = min(self.holders[at], key=sent.__getitem__)
            sent[rank] += times * int(load[at])
        rank_of = sender[self.piece]
        order = np.lexsort((self.piece, self.worker, rank_of))
        chunk = np.zeros(len(order), dtype=np.int64)
        return Transfers(rank_of[order], self.worker[order], self.boxes[order], self.nbytes[order], chunk)


def pieces_of(index: int, meta: ParamMeta, held: Sequence[Share], needed: Mapping[int, Share]) -> Pieces:
    """Cut a parameter into pieces, and find the parts of them that workers need.

    Args:
        index: of the parameter; any of its class.
        meta: the parameter.
        held: by trainer rank; they may overlap.
        needed: by worker; the blocks of one worker do not overlap.

    Raises:
        ManifestError: a block is no part of the parameter, or nobody holds some of the elements.
    """
    ndim, itemsize = len(meta.shape), meta.dtype.itemsize
    blocks = _by_block(index, meta, enumerate(held), "trainer rank")
    needs = _by_block(index, meta, needed.items(), "worker")
    owned = cells(blocks, ndim)
    if sum(block.numel for block, _ in owned) != meta.numel:
        hole = missing(blocks, meta.shape)
        assert hole is not None
        where = ", ".join(f"{start}:{stop}" for start, stop in zip(hole.start, hole.stop, strict=True))
        raise ManifestError(
            f"nobody holds elements [{where}] of {meta}",
            expected="every element of every parameter at a trainer rank at least",
            state="nothing was sent",
            hint="look at what the source's shards() yields on each trainer rank",
        )
    wants, pieces, holders, repeats = as_array(needs, ndim), list[Block](), list[tuple[int, ...]](), 1
    for cell, ranks in owned:
        parts = [cell]
        if len(ranks) > 1 and len(shared := meets(as_array([cell], ndim), wants)[2]):
            hull = Block(tuple(shared[:, 0].min(axis=0).tolist()), tuple(shared[:, 1].max(axis=0).tolist()))
            large = math.prod(hull.shape) * itemsize >= _WORTH_CUTTING_BYTES
            parts, repeats = (cut(hull, len(ranks)), repeats) if large else ([hull], max(repeats, len(ranks)))
        pieces += parts
        holders += [ranks] * len(parts)
    piece, need, boxes = meets(as_array(pieces, ndim), wants)
    members = list(needs.values())
    row = np.repeat(np.arange(len(piece)), [len(members[one]) for one in need])
    worker = np.array([member for one in need for member in members[one]], dtype=np.int64)
    return Pieces(holders, repeats, piece[row], worker, boxes[row], volumes(boxes[row]) * itemsize)


def _by_block(index: int, meta: ParamMeta, shares: Iterable[tuple[int, Share]], who: str) -> dict[Block, list[int]]:
    """Return the blocks of a parameter in these shares, each with the members that have it, in order."""
    found: dict[Block, list[int]] = {}
    for member, share in shares:
        for block in share.blocks(index):
            if block not in found:
                check_block(block, meta, f"{who} {member}")
            found.setdefault(block, []).append(member)
    return found
