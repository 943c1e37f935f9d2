"""Who sends which box of a tensor to whom, for all parameters of one shape that are held and needed alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from torchrl_ext.errors import ManifestError
from torchrl_ext.transports.sharded.plans.boxes import as_array, as_block, cells, chunks, cut, meets, missing, volumes
from torchrl_ext.transports.sharded.plans.shares import Share, check_block
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.shards.blocks import Block

__all__ = ["Moves", "Pattern", "held_and_needed", "make_pattern"]

_WORTH_CUTTING_BYTES = 64 << 10
_UNEVEN = 1.05  # the busiest holder may send that many times the mean of one tensor
_MOST_REGIONS = 1 << 10  # different needs of one tensor, above which it is cut without a look at them
_FINEST = 8  # pieces per bucket, where a tensor is larger than one


class Moves(NamedTuple):
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

    def chunked(self, ranks: int, workers: int, itemsize: int, bucket_bytes: int) -> Moves:
        """Return the same moves, cut so that no chunk is more than a bucket for any rank or worker."""
        most = int(self.loads(ranks, workers).max(initial=0))
        if most <= bucket_bytes:
            return self
        wanted = -(-most // bucket_bytes)
        loads = np.zeros((2 * wanted, ranks + workers), dtype=np.int64)
        rows: list[tuple[int, int, int, Block]] = []
        for rank, worker, box in zip(self.rank.tolist(), self.worker.tolist(), self.boxes, strict=True):
            block = as_block(box)
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
        return Moves(rank_of, worker_of, boxes, volumes(boxes) * itemsize, chunk)


@dataclass(eq=False)
class Pattern:
    """The moves of all parameters of a class, but for which of several holders sends what all of them hold.

    Attributes:
        group: int64 of shape (rows,): which of `holders` may send it.
        part: int64 of shape (rows,): which of the parts of that group it is.
        worker, boxes, nbytes: as in `Moves`.
        holders: the ranks of each group, in the order in which parts are dealt to them.
        turns: groups whose parts are not equal, and change hands from one parameter to the next.
        periods: how many parameters later the moves are the same again.
    """

    group: np.ndarray
    part: np.ndarray
    worker: np.ndarray
    boxes: np.ndarray
    nbytes: np.ndarray
    holders: list[tuple[int, ...]]
    turns: np.ndarray
    periods: int

    def ranks(self, period: int) -> np.ndarray:
        """Return who sends each row for parameters of this period, int64 of shape (rows,)."""
        sizes = np.array([len(ranks) for ranks in self.holders], dtype=np.int64)
        first = np.cumsum(sizes) - sizes
        flat = np.array([rank for ranks in self.holders for rank in ranks], dtype=np.int64)
        turned = (self.part + period * self.turns[self.group]) % sizes[self.group]
        return np.asarray(flat[first[self.group] + turned])

    def moves(self, period: int) -> Moves:
        """Return the moves of parameters of this period."""
        rank = self.ranks(period)
        order = np.lexsort((self.part, self.group, self.worker, rank))
        chunk = np.zeros(len(rank), dtype=np.int64)
        return Moves(rank[order], self.worker[order], self.boxes[order], self.nbytes[order], chunk)

    def counts(self, params: int) -> np.ndarray:
        """Return how many of the class's parameters are of each period, int64 of shape (periods,)."""
        return (params - np.arange(self.periods) + self.periods - 1) // self.periods

    def settle(self, params: int, sent: np.ndarray) -> None:
        """Let those holders begin that have the least to send.

        Args:
            params: how many parameters the class has.
            sent: bytes that each rank sends of what was settled before, int64; what this class adds is added.
        """
        counts = self.counts(params)
        for group, holders in enumerate(self.holders):
            rows = np.flatnonzero(self.group == group)
            if len(holders) > 1:
                self.holders[group] = holders = tuple(sorted(holders, key=lambda rank: (sent[rank], rank)))
            of_part = np.bincount(self.part[rows], self.nbytes[rows], len(holders)).astype(np.int64)
            for period, times in enumerate(counts.tolist()):
                sent[np.roll(holders, -period * int(self.turns[group]))] += times * of_part


def held_and_needed(
    index: int, meta: ParamMeta, held: Sequence[Share], needed: Mapping[int, Share]
) -> tuple[dict[Block, list[int]], dict[Block, list[int]]]:
    """Return the blocks of a parameter that ranks hold, and that workers need, each with the members in order.

    Raises:
        ManifestError: a block is no part of the parameter.
    """
    found: tuple[dict[Block, list[int]], dict[Block, list[int]]] = ({}, {})
    for blocks, shares, who in zip(found, (enumerate(held), needed.items()), ("trainer rank", "worker"), strict=True):
        for member, share in shares:
            for block in share.blocks(index):
                if block not in blocks:
                    check_block(block, meta, f"{who} {member}")
                blocks.setdefault(block, []).append(member)
    return found


def make_pattern(
    meta: ParamMeta, held: Mapping[Block, Sequence[int]], needed: Mapping[Block, Sequence[int]]
) -> Pattern:
    """Decide which rank, or which rank of several, sends what to whom.

    Args:
        meta: a parameter of the class.
        held: the blocks that trainer ranks hold, and the ranks; they may overlap.
        needed: the blocks that workers need, and the workers; those of one worker do not overlap.

    Raises:
        ManifestError: nobody holds some of the elements.
    """
    ndim, itemsize = len(meta.shape), meta.dtype.itemsize
    owned = cells(held, ndim)
    if sum(block.numel for block, _ in owned) != meta.numel:
        hole = missing(held, meta.shape)
        assert hole is not None
        where = ", ".join(f"{start}:{stop}" for start, stop in zip(hole.start, hole.stop, strict=True))
        raise ManifestError(
            f"nobody holds elements [{where}] of {meta}",
            expected="every element of every parameter at a trainer rank at least",
            state="nothing was sent",
            hint="look at what the source's shards() yields on each trainer rank",
        )
    wants, fans = as_array(needed, ndim), np.array([len(workers) for workers in needed.values()], dtype=np.int64)
    pieces: list[Block] = []
    group: list[int] = []
    part: list[int] = []
    holders: list[tuple[int, ...]] = []
    for cell, ranks in owned:
        for parts in _parts(cell, len(ranks), itemsize, needed, wants, fans):
            group += [len(holders)] * len(parts)
            part += range(len(parts))
            pieces += parts
            holders.append(ranks)
    at, want, boxes = meets(as_array(pieces, ndim), wants)
    row = np.repeat(np.arange(len(at)), fans[want])
    members = [np.array(workers, dtype=np.int64) for workers in needed.values()]
    worker = np.concatenate([members[one] for one in want]) if len(want) else np.zeros(0, dtype=np.int64)
    group_of, part_of = np.array(group, dtype=np.int64)[at[row]], np.array(part, dtype=np.int64)[at[row]]
    nbytes = volumes(boxes[row]) * itemsize
    turns = np.zeros(len(holders), dtype=np.int64)
    for number, ranks in enumerate(holders):
        if len(ranks) > 1:
            rows = group_of == number
            turns[number] = np.ptp(np.bincount(part_of[rows], nbytes[rows], len(ranks))) > 0
    periods = max((len(ranks) for ranks, turn in zip(holders, turns, strict=True) if turn), default=1)
    return Pattern(group_of, part_of, worker, boxes[row], nbytes, holders, turns, periods)


def _parts(
    cell: Block, ranks: int, itemsize: int, needed: Mapping[Block, Sequence[int]], wants: np.ndarray, fans: np.ndarray
) -> list[list[Block]]:
    """Cut a cell that ``ranks`` ranks hold into parts for them; several lists are dealt out one by one."""
    if ranks == 1:
        return [[cell]]
    ndim = len(cell.start)
    _, want, shared = meets(as_array([cell], ndim), wants)
    if not len(want):
        return []
    hull = as_block(np.stack([shared[:, 0].min(axis=0), shared[:, 1].max(axis=0)]))
    parts = _cut_if_worth(hull, ranks, itemsize)
    if len(parts) == 1:
        return [parts]
    which, want, shared = meets(as_array(parts, ndim), wants)
    sent = np.bincount(which, volumes(shared) * fans[want], len(parts))
    if len(wants) > _MOST_REGIONS or sent.max() * ranks <= _UNEVEN * sent.sum():
        return [parts]
    regions: dict[Block, list[int]] = {}
    for block, workers in needed.items():
        both = cell.meet(block)
        if both is not None:
            regions.setdefault(both, []).extend(workers)
    return [_cut_if_worth(region, ranks, itemsize) for region, _ in cells(regions, ndim)]


def _cut_if_worth(block: Block, parts: int, itemsize: int) -> list[Block]:
    large = math.prod(block.shape) * itemsize >= _WORTH_CUTTING_BYTES
    return cut(block, parts) if large else [block]
