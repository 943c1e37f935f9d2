"""`make_plan`: which trainer rank sends which blocks to which worker, in which round.

Trainer rank 0 makes the plan, from the shares of all ranks and workers, and hands each member its own rows of it.
Parameters of one shape that are held and needed alike form a class, and are planned once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

import msgspec
import numpy as np

from torchrl_ext.base.errors import ConfigError, ManifestError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.sharded.shares import Blocks, numbers, packed, unpacked, unreadable
from torchrl_ext.data.sharded.transfers import Transfers, transfers_of
from torchrl_ext.data.weights.blocks import Block

__all__ = ["Blocks", "MemberPlan", "Transfer", "TransferPlan", "group_rank", "make_plan"]


def group_rank(rank: Any, workers: int) -> Any:
    """Return the rank in the group of a trainer rank, or of each in an array: rank 0 is 0, the others follow the
    workers, of which worker ``w`` is ``1 + w``.
    """
    return rank + workers * (rank > 0)


class Transfer(NamedTuple):
    """One block of one parameter that goes from a trainer rank to a worker.

    Attributes:
        param: index of the parameter.
        block: the elements, in checkpoint coordinates.
    """

    param: int
    block: Block


class _Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """The order of a plan, for all members; each field is an int32 array, little-endian.

    Attributes:
        param, chunk: of every item, in order of parameters: the chunk of one; many parameters have the same chunks.
        starts: the first item of each round, and behind the last round the number of items.
    """

    param: bytes
    chunk: bytes
    starts: bytes


class _Rows(msgspec.Struct, frozen=True, kw_only=True):
    """The transfers of one member, for all chunks.

    Attributes:
        table: int64 of shape (rows, 2 + 2 * dimensions), little-endian: chunk, the group's rank of the other end, and
            start and stop of the box, in as many dimensions as any parameter has.
        source, successor: as in `MemberPlan`.
    """

    table: bytes
    source: int | None
    successor: int | None


@final
class MemberPlan:
    """The part of a plan that one member carries out.

    Args:
        params: the parameters of the plan, in order.
        schedule, rows: as `TransferPlan` gives them; not trusted.

    Attributes:
        rounds: how many there are.
        source: of a worker that is served by another one: that worker's rank in the group.
        successor: of a worker that passes on its bytes: the rank in the group of the next one.

    Raises:
        TransportError: they are malformed.
    """

    def __init__(self, params: Sequence[ParamMeta], schedule: Any, rows: Any) -> None:
        self.params = tuple(params)
        self._blocks: defaultdict[int, defaultdict[int, list[Block]]] = defaultdict(lambda: defaultdict(list))
        what = "trainer rank 0 sent a transfer plan"
        order, own = unpacked(schedule, _Schedule, what), unpacked(rows, _Rows, what)
        self.source, self.successor = own.source, own.successor
        try:
            self._param, self._chunk, self._starts = map(numbers, (order.param, order.chunk, order.starts))
            dimensions = _dimensions(self.params)
            self._first, self._behind = self._param[self._starts[:-1]], self._param[self._starts[1:] - 1] + 1
            table = numbers(own.table, "<i8").reshape(-1, 2 + 2 * dimensions).tolist()
            chunks, first = np.unique(self._chunk, return_index=True)
            ndims = [len(self.params[param].shape) for param in self._param[first].tolist()]
            ndim_of = dict(zip(chunks.tolist(), ndims, strict=True))
            for chunk, peer, *edges in table:
                start, stop = (tuple(side[: ndim_of[chunk]]) for side in (edges, edges[dimensions:]))
                self._blocks[chunk][peer].append(Block(start, stop))
        except (ValueError, LookupError) as error:
            raise unreadable(what, error) from error
        self.rounds = len(self._first)

    def links(self, round: int) -> Iterator[tuple[int, list[Transfer]]]:
        """Yield what this member sends, or gets from trainer ranks, in a round.

        Yields:
            The rank in the group of the other end, ascending, with the transfers in order of parameters. Of a worker
            that another worker serves: what that one got from the trainer ranks.
        """
        items = slice(*self._starts[round : round + 2])
        order = zip(self._param[items].tolist(), self._chunk[items].tolist(), strict=True)
        own = [(param, self._blocks[chunk]) for param, chunk in order if chunk in self._blocks]
        for peer in sorted(set().union(*(found for _, found in own))):
            yield peer, [Transfer(param, block) for param, found in own for block in found.get(peer, ())]

    def span(self, round: int) -> tuple[int, int]:
        """Return the first parameter of a round, and the one behind its last; both are the same for all members."""
        return int(self._first[round]), int(self._behind[round])


@final
class TransferPlan:
    """The plan of an update: made by `make_plan`; ranks in the group are those of `group_rank`.

    Attributes:
        params: the parameters, in order.
        ranks, workers: how many trainer ranks and workers there are.
        bucket_bytes: the most that a rank sends, or a leader gets, in one round.
        leaders: the worker that gets the bytes of each worker from the trainer: the first that needs the same.
        schedule: the order of the plan for `MemberPlan`, as text.
        rounds: how many there are.
        rank_bytes: bytes that each trainer rank sends, without digests; int64 of shape (ranks,).
        worker_bytes: bytes that each worker gets, from the trainer or from the worker before it; int64 of shape
            (workers,).
    """

    def __init__(
        self,
        params: Sequence[ParamMeta],
        ranks: int,
        leaders: Sequence[int],
        bucket_bytes: int,
        kind: np.ndarray,
        transfers: Sequence[Transfers],
    ) -> None:
        self.params, self.ranks, self.workers = tuple(params), ranks, len(leaders)
        self.bucket_bytes, self.leaders = bucket_bytes, tuple(leaders)
        loads = [one.loads(ranks, self.workers) for one in transfers]
        table = np.concatenate([np.zeros((0, ranks + self.workers), dtype=np.int64), *loads])
        counts = np.array([len(one) for one in loads], dtype=np.int64)
        first, times = np.cumsum(counts) - counts, counts[kind]
        param = np.repeat(np.arange(len(kind)), times)
        chunk = np.arange(len(param)) + np.repeat(first[kind] - np.cumsum(times) + times, times)
        starts = _starts(chunk, table, bucket_bytes)
        self.rounds = len(starts) - 1
        fields = {"param": param, "chunk": chunk, "starts": starts}
        self.schedule = packed(_Schedule(**{name: one.astype("<i4").tobytes() for name, one in fields.items()}))
        total = np.bincount(chunk, minlength=len(table)) @ table
        self.rank_bytes: np.ndarray = total[:ranks]
        self.worker_bytes: np.ndarray = total[ranks:][list(leaders)]
        tables = [
            np.column_stack([one.chunk + at, one.rank, one.worker, one.boxes.reshape(len(one.rank), -1)])
            for at, one in zip(first, transfers, strict=True)
            if len(one.rank)
        ]
        self._table = np.concatenate([np.zeros((0, 3 + 2 * _dimensions(params)), dtype=np.int64), *tables])

    def rows(self, member: int) -> str:
        """Return the rows of the member of this rank in the group for `MemberPlan`, as text."""
        source = successor = None
        ranks, workers = group_rank(self._table[:, 1], self.workers), 1 + self._table[:, 2]
        mine, peers = ranks == member, workers
        if 1 <= member <= self.workers:
            leader = self.leaders[member - 1]
            chain = [1 + worker for worker, other in enumerate(self.leaders) if other == leader]
            at = chain.index(member)
            source, successor = (chain[at - 1] if at else None), next(iter(chain[at + 1 :]), None)
            mine, peers = workers == 1 + leader, ranks
        table = np.column_stack([self._table[:, 0], peers, self._table[:, 3:]])[mine].astype("<i8").tobytes()
        return packed(_Rows(table=table, source=source, successor=successor))

    def member(self, member: int) -> MemberPlan:
        """Return the part of the plan that the member of this rank in the group carries out."""
        return MemberPlan(self.params, self.schedule, self.rows(member))


def make_plan(
    params: Sequence[ParamMeta], held: Sequence[Blocks], needed: Sequence[Blocks], *, bucket_bytes: int
) -> TransferPlan:
    """Plan how every worker gets the elements that it needs, each once, from trainer ranks that hold them.

    Ranks that hold the same take turns, class by class. Workers that need the same form a chain, and trainer ranks
    serve the first one of it.

    Args:
        params: in the order in which they are sent.
        held: what each trainer rank holds, by rank.
        needed: what each worker needs, by worker.
        bucket_bytes: the most that a rank sends, or a worker gets from the trainer, in one round.

    Raises:
        ConfigError: there is no rank or no worker, or a bucket does not hold one element.
        ManifestError: a share is of another number of parameters, or nobody holds some of the elements.
    """
    if not held or not needed:
        raise ConfigError("a plan needs trainer ranks and workers", expected="one of each, or more")
    largest = max((meta.dtype.itemsize for meta in params), default=1)
    if bucket_bytes < largest:
        raise ConfigError(f"bucket_bytes is {bucket_bytes}", expected=f"{largest} or more, the size of one element")
    for number, share in enumerate((*held, *needed)):
        if len(share.indices) != len(params):
            who = f"trainer rank {number}" if number < len(held) else f"worker {number - len(held)}"
            raise ManifestError(f"{who} has a share of {len(share.indices)} parameters", expected=f"{len(params)}")
    first_of: dict[Blocks, int] = {}
    leaders = [first_of.setdefault(share, worker) for worker, share in enumerate(needed)]
    needs = {worker: share for share, worker in first_of.items()}
    dimensions = _dimensions(params)
    classes = _classes(params, (*held, *first_of))
    kind, transfers = np.zeros(len(params), dtype=np.int64), list[Transfers]()
    for turn, own in enumerate(classes):
        kind[own], meta = turn, params[own[0]]
        found = transfers_of(own[0], meta, held, needs, dimensions, turn)
        transfers.append(found.chunked(len(held), len(needed), meta.dtype.itemsize, bucket_bytes))
    return TransferPlan(params, len(held), leaders, bucket_bytes, kind, transfers)


def _dimensions(params: Sequence[ParamMeta]) -> int:
    return max((len(meta.shape) for meta in params), default=0)


def _classes(params: Sequence[ParamMeta], shares: Sequence[Blocks]) -> list[list[int]]:
    """Return the parameters of each class: of one shape, with the same blocks in each share."""
    columns = {share.of: share.indices for share in shares}  # far fewer than shares: members have parts alike
    keys = np.stack(list(columns.values()), axis=1).view(f"V{4 * len(columns)}").ravel().tolist()
    found: dict[Any, list[int]] = {}
    for at, (meta, key) in enumerate(zip(params, keys, strict=True)):
        found.setdefault((key, meta.shape, meta.dtype), []).append(at)
    return list(found.values())


def _starts(chunk: np.ndarray, table: np.ndarray, bucket_bytes: int) -> np.ndarray:
    """Return the first item of each round, and behind the last round the number of items: int64.

    A round has as many items, in their order, as fit into a bucket of each rank and each worker.

    Args:
        chunk: of every item, in order of parameters.
        table: the bytes of each chunk out of every rank, and then into every worker: int64 of shape
            (chunks, ranks + workers).
        bucket_bytes: the most for a rank or a worker in one round.
    """
    peaks, starts, most = table.max(axis=1, initial=0).tolist(), [0][: len(chunk)], 0
    loads = np.zeros(table.shape[1], dtype=np.int64)
    for item, row in enumerate(chunk.tolist()):
        loads += table[row]
        most += peaks[row]  # no member has more: loads are only looked at where this bound does not do
        if most > bucket_bytes:
            most = int(loads.max())
        if most > bucket_bytes:
            loads, most = table[row].copy(), peaks[row]
            starts.append(item)
    return np.array([*starts, len(chunk)], dtype=np.int64)
