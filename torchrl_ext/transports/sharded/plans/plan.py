"""`make_plan`: which trainer rank sends which blocks to which worker, in which round; the same on every side.

A pure function of what the ranks hold and what the workers need. Parameters of one shape that are held and needed alike
form a class, and are planned once.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np

from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.transports.sharded.plans.boxes import as_block
from torchrl_ext.transports.sharded.plans.classes import Moves, held_and_needed, make_pattern
from torchrl_ext.transports.sharded.plans.shares import Share, checksums, shape_ids
from torchrl_ext.types import Info, ParamMeta
from torchrl_ext.weights.shards.blocks import Block

__all__ = ["Share", "Transfer", "TransferPlan", "make_plan"]

_FORM = b"torchrl_ext sharded plan 1"


class Transfer(NamedTuple):
    """One block of one parameter that goes over one link.

    Attributes:
        param: index of the parameter.
        block: the elements, in checkpoint coordinates.
    """

    param: int
    block: Block


class _Outcome(NamedTuple):
    """What `make_plan` computes: a kind is a class of parameters with one choice among holders.

    Attributes:
        rows: uint64 of shape (parameters,): checksums of the inputs.
        leaders: the leader of every worker.
        kind: of every parameter, int64.
        moves: of every kind.
        loads: of every kind, as `Moves.loads` gives them.
        item_param, item_chunk: what is sent, round by round: chunks of parameters, int64 of shape (items,).
        starts: the first item of each round, and behind the last round the number of items.
    """

    rows: np.ndarray
    leaders: list[int]
    kind: np.ndarray
    moves: list[Moves]
    loads: list[np.ndarray]
    item_param: np.ndarray
    item_chunk: np.ndarray
    starts: np.ndarray


@final
class TransferPlan:
    """The plan of an update: made by `make_plan`, from the same inputs equally on every side.

    Attributes:
        params: the parameters, in order.
        ranks, workers: how many trainer ranks and workers there are.
        bucket_bytes: the most that a rank sends, or a leader gets, in one round.
        digest: 32 hex digits over inputs and outcome.
        rounds: how many there are.
        rank_bytes: bytes that each trainer rank sends, without digests; int64 of shape (ranks,).
        worker_bytes: bytes that each worker gets, from the trainer or from the worker before it; int64 of shape
            (workers,).
    """

    def __init__(self, params: Sequence[ParamMeta], ranks: int, bucket_bytes: int, outcome: _Outcome) -> None:
        self.params, self.ranks, self.workers = tuple(params), ranks, len(outcome.leaders)
        self.bucket_bytes, self._found = bucket_bytes, outcome
        self.rounds = len(outcome.starts) - 1
        times = np.bincount(outcome.kind, minlength=len(outcome.moves))
        total = np.zeros(ranks + self.workers, dtype=np.int64)
        for count, loads in zip(times, outcome.loads, strict=True):
            total += count * loads.sum(axis=0)
        self.rank_bytes: np.ndarray = total[:ranks]
        self.worker_bytes: np.ndarray = total[ranks:][outcome.leaders]
        self._times = times
        if self.rounds:
            params_of, starts = outcome.item_param, outcome.starts[:-1]
            self._first = np.minimum.accumulate(np.minimum.reduceat(params_of, starts)[::-1])[::-1]
            self._last = np.maximum.accumulate(np.maximum.reduceat(params_of, starts))
        self._latest: tuple[int, list[tuple[int, int, int]]] = (-1, [])
        self._blocks_of: dict[tuple[int, int, int, int], tuple[Block, ...]] = {}
        self.digest = self._digest()

    def link(self, rank: int, worker: int, round: int) -> list[Transfer]:
        """Return what a trainer rank sends to a worker in a round, in order of parameters.

        Args:
            rank: 0 ... ranks - 1.
            worker: 0 ... workers - 1; only a leader gets something from the trainer.
            round: 0 ... rounds - 1.
        """
        return [
            Transfer(param, block)
            for param, kind, chunk in self._items(round)
            for block in self._blocks(kind, chunk, rank, worker)
        ]

    def senders(self, worker: int, round: int) -> list[int]:
        """Return the trainer ranks that send something to a worker in a round, in order."""
        return self._others(round, "worker", worker, "rank")

    def receivers(self, rank: int, round: int) -> list[int]:
        """Return the workers, leaders all, to which a trainer rank sends something in a round, in order."""
        return self._others(round, "rank", rank, "worker")

    def span(self, round: int) -> tuple[int, int]:
        """Return a stretch of parameters in which all lie that have a part in a round: the first, and the one behind.

        Neither number is smaller than in the round before. What lies before the stretch is complete when the round
        begins, and of what lies behind it nothing has come when the round ends.
        """
        return int(self._first[round]), int(self._last[round]) + 1

    def leader(self, worker: int) -> int:
        """Return the worker that gets these bytes from the trainer: the first that needs the same; may be itself."""
        return self._found.leaders[worker]

    def successor(self, worker: int) -> int | None:
        """Return the worker to which this one passes on what it gets; None for the last of a chain of equal ones."""
        leaders = self._found.leaders
        return next((at for at in range(worker + 1, self.workers) if leaders[at] == leaders[worker]), None)

    def predecessor(self, worker: int) -> int | None:
        """Return the worker that passes its bytes on to this one; None for a leader."""
        leaders = self._found.leaders
        return next((at for at in range(worker - 1, -1, -1) if leaders[at] == leaders[worker]), None)

    def link_bytes(self) -> np.ndarray:
        """Return the bytes from each trainer rank to each worker, int64 of shape (ranks, workers); relays left out."""
        found = np.zeros((self.ranks, self.workers), dtype=np.int64)
        for count, moves in zip(self._times, self._found.moves, strict=True):
            np.add.at(found, (moves.rank, moves.worker), count * moves.nbytes)
        return found

    def round_bytes(self) -> np.ndarray:
        """Return what each rank sends, and then what each leader gets, in every round: int64 of shape
        (rounds, ranks + workers).
        """
        if not self.rounds:
            return np.zeros((0, self.ranks + self.workers), dtype=np.int64)
        table, first = np.concatenate(self._found.loads), np.cumsum([0, *map(len, self._found.loads)])
        rows = table[first[self._found.kind[self._found.item_param]] + self._found.item_chunk]
        return np.asarray(np.add.reduceat(rows, self._found.starts[:-1], axis=0))

    def row(self, index: int) -> Info:
        """Return who sends what of a parameter to whom, in words that show a difference between two plans."""
        moves = self._found.moves[self._found.kind[index]]
        items = np.flatnonzero(self._found.item_param == index)
        rounds = np.searchsorted(self._found.starts, items, side="right") - 1
        at = dict(zip(self._found.item_chunk[items].tolist(), rounds.tolist(), strict=True))
        sends = [
            {"round": at[chunk], "rank": rank, "worker": worker, "start": box[0], "stop": box[1]}
            for rank, worker, chunk, box in zip(
                *(column.tolist() for column in (moves.rank, moves.worker, moves.chunk, moves.boxes)), strict=True
            )
        ]
        return {"param": str(self.params[index]), "sends": sends}

    def rows_digest(self) -> np.ndarray:
        """Return a checksum per parameter over what it is, who holds what of it and who needs what: uint64 of shape
        (parameters,).

        The first that differs between two plans is the first parameter about which two sides do not agree. Where none
        differs and `digest` does, it is the plans' rules that are not the same.
        """
        return self._found.rows

    def _items(self, round: int) -> list[tuple[int, int, int]]:
        """Return parameter, kind and chunk of each item of a round."""
        if round != self._latest[0]:
            self._latest = round, self._items_of(round)
        return self._latest[1]

    def _items_of(self, round: int) -> list[tuple[int, int, int]]:
        first, stop = self._found.starts[round : round + 2]
        params = self._found.item_param[first:stop]
        columns = params, self._found.kind[params], self._found.item_chunk[first:stop]
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def _blocks(self, kind: int, chunk: int, rank: int, worker: int) -> tuple[Block, ...]:
        key = kind, chunk, rank, worker
        if key not in self._blocks_of:
            moves = self._found.moves[kind]
            rows = np.flatnonzero((moves.rank == rank) & (moves.worker == worker) & (moves.chunk == chunk))
            self._blocks_of[key] = tuple(as_block(moves.boxes[row]) for row in rows)
        return self._blocks_of[key]

    def _others(self, round: int, end: str, member: int, other: str) -> list[int]:
        found: set[int] = set()
        for kind, chunk in {item[1:] for item in self._items(round)}:
            moves = self._found.moves[kind]
            rows = (getattr(moves, end) == member) & (moves.chunk == chunk)
            found.update(np.unique(getattr(moves, other)[rows]).tolist())
        return sorted(found)

    def _digest(self) -> str:
        found = hashlib.blake2b(_FORM, digest_size=16)
        sizes = np.array([len(self.params), self.ranks, self.workers, self.bucket_bytes, *self._found.leaders])
        order = self._found.kind, self._found.item_param, self._found.item_chunk, self._found.starts
        for column in (self._found.rows.view(np.int64), sizes, *order, *itertools.chain(*self._found.moves)):
            found.update(np.array(column.shape, dtype="<i8").tobytes())
            found.update(column.astype("<i8").tobytes())
        return found.hexdigest()


def make_plan(
    params: Sequence[ParamMeta], held: Sequence[Share], needed: Sequence[Share], *, bucket_bytes: int
) -> TransferPlan:
    """Plan how every worker gets the elements that it needs, each once, from trainer ranks that hold them.

    What several ranks hold is cut into as many parts where it is large, and is sent by them in turn where it is small.
    Workers that need the same form a chain, of which the first alone is served by the trainer.

    Args:
        params: in the order in which they are sent.
        held: what each trainer rank holds, by rank.
        needed: what each worker needs, by worker.
        bucket_bytes: the most that a rank sends, or a worker gets from the trainer, in one round.

    Raises:
        ConfigError: there is no rank or no worker, or a bucket does not hold one element.
        ManifestError: shares speak of other parameters, or nobody holds some of the elements.
    """
    if not held or not needed:
        raise ConfigError("a plan needs trainer ranks and workers", expected="one of each, or more")
    largest = max((meta.dtype.itemsize for meta in params), default=1)
    if bucket_bytes < largest:
        raise ConfigError(f"bucket_bytes is {bucket_bytes}", expected=f"{largest} or more, the size of one element")
    for number, share in enumerate((*held, *needed)):
        if len(share) != len(params):
            who = f"trainer rank {number}" if number < len(held) else f"worker {number - len(held)}"
            raise ManifestError(f"{who} speaks of {len(share)} parameters", expected=f"{len(params)}")
    first_of: dict[Share, int] = {}
    leaders = [first_of.setdefault(share, worker) for worker, share in enumerate(needed)]
    kind, moves = _kinds(params, held, {worker: needed[worker] for worker in first_of.values()}, len(needed))
    cut = [
        one.chunked(len(held), len(needed), params[int(first)].dtype.itemsize, bucket_bytes)
        for one, first in zip(moves, np.unique(kind, return_index=True)[1], strict=True)
    ]
    loads = [one.loads(len(held), len(needed)) for one in cut]
    order = _rounds(kind, loads, len(held), bucket_bytes)
    rows = checksums(params, (*held, *needed))
    return TransferPlan(params, len(held), bucket_bytes, _Outcome(rows, leaders, kind, cut, loads, *order))


def _kinds(
    params: Sequence[ParamMeta], held: Sequence[Share], needed: dict[int, Share], workers: int
) -> tuple[np.ndarray, list[Moves]]:
    """Return the kind of every parameter, and the moves of each kind."""
    of_class, firsts = _classes(params, (*held, *needed.values()))
    sizes = np.bincount(of_class, minlength=len(firsts))
    patterns = [make_pattern(params[at], *held_and_needed(at, params[at], held, needed)) for at in firsts]
    sent = np.zeros(len(held), dtype=np.int64)
    for at in sorted(range(len(patterns)), key=lambda at: (patterns[at].periods > 1, -patterns[at].nbytes.sum(), at)):
        patterns[at].settle(int(sizes[at]), sent)
    periods = np.array([pattern.periods for pattern in patterns], dtype=np.int64)
    order = np.argsort(of_class, kind="stable")
    place = np.empty(len(params), dtype=np.int64)  # of a parameter in its class
    place[order] = np.arange(len(params)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    first_kind = np.cumsum(periods) - periods
    used, kind = np.unique(first_kind[of_class] + place % periods[of_class], return_inverse=True)
    class_of = np.searchsorted(first_kind, used, side="right") - 1
    found = [patterns[one].moves(int(at - first_kind[one])) for one, at in zip(class_of.tolist(), used, strict=True)]
    return kind, found


def _classes(params: Sequence[ParamMeta], shares: Sequence[Share]) -> tuple[np.ndarray, list[int]]:
    """Return the class of every parameter, numbered by first appearance, and the first parameter of each class."""
    code, count = shape_ids(params)
    for share in shares:
        if count * len(share.patterns) >= 1 << 62:
            used, code = np.unique(code, return_inverse=True)
            count = len(used)
        code = code * len(share.patterns) + share.of
        count *= max(1, len(share.patterns))
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    number = np.empty(len(first), dtype=np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[inverse], np.sort(first).tolist()


def _rounds(
    kind: np.ndarray, loads: Sequence[np.ndarray], ranks: int, bucket_bytes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return in which order everything is sent, and where each round starts.

    Consecutive parameters of which no worker needs more than a bucket in all make a window. Within it each rank sends
    its own parts in order, as many to a round as fit, whatever the others do: where each expert lies on one rank, ranks
    would else take turns. A worker never has more than a window that waits for what comes before it.

    Args:
        kind: of every parameter, an index into ``loads``.
        loads: for every kind the bytes of each of its chunks out of every rank, and then into every worker: int64 of
            shape (chunks, ranks + workers).
        ranks: how many there are.
        bucket_bytes: the most for a rank or a worker in one round.

    Returns:
        Parameter and chunk of each item, int64 of shape (items,), round by round and in order within one; and the first
        item of each round, with the number of items behind the last. A parameter that nobody needs is no item.
    """
    if not loads:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
    table = np.concatenate(loads)
    chunks = np.array([len(one) if one.any() else 0 for one in loads], dtype=np.int64)
    times = chunks[kind]
    param = np.repeat(np.arange(len(kind)), times)
    chunk = np.arange(len(param)) - np.repeat(np.cumsum(times) - times, times)
    at = (np.cumsum([len(one) for one in loads]) - [len(one) for one in loads])[kind[param]] + chunk
    sends, gets = np.split(table, [ranks], axis=1)
    parts = [(np.flatnonzero(row), row[row > 0]) for row in sends]
    peaks, biggest = gets.max(axis=1).tolist(), np.maximum.reduce
    found, used, most = [], 0, 0
    window = np.zeros(gets.shape[1], dtype=np.int64)
    clock = np.zeros(ranks, dtype=np.int64)  # of each rank: its round * bucket_bytes + what it sends in this round
    for row, several in zip(at.tolist(), (times[param] > 1).tolist(), strict=True):
        window += gets[row]
        most += peaks[row]  # no worker gets more: what they get is only looked at where this bound does not do
        if most > bucket_bytes:
            most = int(biggest(window))
        if most > bucket_bytes:
            window, most, clock[:] = gets[row].copy(), peaks[row], used * bucket_bytes
        mine, more = parts[row]
        if several or len(mine) == ranks:  # chunks of one tensor follow each other
            mine, more = slice(ranks), sends[row]
        had = clock[mine]
        number = int(biggest(had)) // bucket_bytes
        then = np.maximum(had, number * bucket_bytes) + more
        if biggest(then) > (number + 1) * bucket_bytes:
            number += 1
            then = number * bucket_bytes + more
        clock[mine] = then
        found.append(number)
        used = max(used, number + 1)
    rounds = np.array(found, dtype=np.int64)
    order = np.argsort(rounds, kind="stable")
    starts = np.searchsorted(rounds[order], np.arange(used + 1))
    return param[order], chunk[order], starts
