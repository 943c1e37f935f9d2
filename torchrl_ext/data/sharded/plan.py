"""`make_plan`: which trainer rank sends which blocks to which worker, in which round.

A plan follows from what ranks hold and workers need, so every member makes it by itself and all make the same one. Rank
0 leaves the `Shares` of all members in one note, once for each connection. Parameters of one shape that are held and
needed alike form a class, which is planned once.
"""

from __future__ import annotations

import base64
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple, final

import msgspec
import numpy as np
import xxhash

from torchrl_ext.base.errors import ConfigError, ManifestError, TransportError
from torchrl_ext.base.types import Count, ParamMeta, Params, Wire, dtype_name
from torchrl_ext.data.weights.gather import disjoint
from torchrl_ext.data.weights.view import Block, overlap

__all__ = ["Agreement", "Blocks", "MemberPlan", "Shares", "Transfer", "TransferPlan", "group_rank", "make_plan"]

_MOST_BLOCKS, _MOST_PATTERNS = 1 << 12, 1 << 16
_MOST_BYTES = 64 << 20
_FINEST = 8
"""Where a transfer is cut, a row of more than so small a part of a bucket is cut, too: less of each bucket is empty."""


@final
class Blocks(msgspec.Struct, frozen=True):
    """The share of one member: the blocks of every parameter that it holds, or needs; equal patterns are kept once.

    Shares that `of_blocks` makes of the same blocks are equal, in whatever order the blocks were given.

    Attributes:
        patterns: distinct tuples of blocks that are not empty, each in ascending order.
        of: for every parameter the index into ``patterns``, int32, little-endian.

    Raises:
        ValueError: there is an index outside of ``patterns``, or the last one is cut off.
    """

    patterns: Annotated[
        tuple[Annotated[tuple[Block, ...], msgspec.Meta(max_length=_MOST_BLOCKS)], ...],
        msgspec.Meta(max_length=_MOST_PATTERNS),
    ]
    of: bytes

    def __post_init__(self) -> None:
        indices = self.indices
        if indices.min(initial=0) < 0 or indices.max(initial=-1) >= len(self.patterns):
            raise ValueError("an index is outside of the patterns")

    @classmethod
    def of_blocks(cls, blocks: Iterable[Iterable[Block]]) -> Blocks:
        """Make a share from the blocks of every parameter, in order of parameters; empty blocks are left out."""
        found: dict[tuple[Block, ...], int] = {}
        seen: dict[tuple[Block, ...], int] = {}
        of = []
        for own in map(tuple, blocks):
            if own not in seen:
                seen[own] = found.setdefault(tuple(sorted(block for block in own if block.numel)), len(found))
            of.append(seen[own])
        return cls(tuple(found), np.array(of, dtype="<i4").tobytes())

    @property
    def indices(self) -> np.ndarray:
        """``of`` as an array of shape (parameters,), read-only."""
        return np.frombuffer(self.of, dtype="<i4")

    def blocks(self, index: int) -> tuple[Block, ...]:
        """Return the blocks of the parameter at this index, in ascending order; none of them is empty."""
        return self.patterns[self.indices[index]]

    def to_text(self) -> str:
        """Return it as text for JSON: msgpack, zlib, base64."""
        return base64.b64encode(zlib.compress(msgspec.msgpack.encode(self), 6)).decode()

    @classmethod
    def of_text(cls, text: Any, who: str, params: int) -> Blocks:
        """Return the share that `to_text` wrote.

        Args:
            text: not trusted: no more than 64 MiB are unpacked.
            who: sent it, in messages.
            params: of how many parameters it has to be.

        Raises:
            TransportError: it cannot be read.
            ManifestError: it is of another number of parameters.
        """
        try:
            data = zlib.decompressobj().decompress(msgspec.convert(text, bytes), _MOST_BYTES)
            share = msgspec.msgpack.decode(data, type=cls)
        except (zlib.error, msgspec.MsgspecError) as error:
            raise TransportError(
                f"{who} sent a share that cannot be read: {error!s:.200}",
                state="nothing was moved",
                hint="use one release of torchrl_ext on every rank and engine",
            ) from error
        if len(share.indices) != params:
            raise ManifestError(f"{who} has a share of {len(share.indices)} parameters", expected=f"{params}")
        return share


class Shares(Wire, frozen=True, kw_only=True):
    """What plans of one connection are made of: trainer rank 0 leaves it for all members.

    Attributes:
        held, needed: the share of each trainer rank, and of each worker, as `Blocks.to_text`.
        bucket_bytes: as for `make_plan`.
    """

    held: tuple[str, ...]
    needed: tuple[str, ...]
    bucket_bytes: Count


@final
class Agreement:
    """What all members of a connection hold and need, by which each of them plans every update for itself.

    Args:
        shares: of all members, of the parameters of the connection's first update; not trusted.
        params: these parameters, in the order in which they are sent.
        member: this one's rank in the group.

    Raises:
        TransportError, ManifestError: as `Blocks.of_text`.
    """

    def __init__(self, shares: Shares, params: Params, member: int) -> None:
        self._params, self._bucket_bytes, self._member = params, shares.bucket_bytes, member
        self._held, self._needed = (
            [Blocks.of_text(text, f"{who} {number}", len(params)) for number, text in enumerate(texts)]
            for who, texts in (("trainer rank", shares.held), ("worker", shares.needed))
        )
        self._places = {meta: place for place, meta in enumerate(params)}
        self._last: MemberPlan | None = None

    def holds(self, rank: int, params: Sequence[ParamMeta], share: Blocks) -> bool:
        """Return whether this is a trainer rank's share of these parameters."""
        return set(params) <= self._places.keys() and self._of(params, self._held[rank : rank + 1]) == [share]

    def plan(self, params: Sequence[ParamMeta], digest: str | None = None) -> MemberPlan:
        """Return this member's part of the plan for an update of some parameters, or of all; the last one is kept.

        Args:
            params: in the order of the model's.
            digest: of the plan that rank 0 made of the same shares.

        Raises:
            ManifestError, ConfigError: as `make_plan`; or one is none of the model's parameters.
            TransportError: rank 0 made another plan.
        """
        if self._last is None or self._last.params != tuple(params):
            if absent := [meta for meta in params if meta not in self._places]:
                raise ManifestError(f"trainer ranks and workers were connected without {absent[0]}")
            held, needed = self._of(params, self._held), self._of(params, self._needed)
            plan = make_plan(params, held, needed, bucket_bytes=self._bucket_bytes)
            self._last = MemberPlan(plan, self._member)
        if digest not in (None, self._last.plan.digest):  # gloo ends a process that gets a message of another size
            raise TransportError(
                f"rank 0 made another transfer plan than rank {self._member} of the same shares",
                expected=f"plan {digest}, and found {self._last.plan.digest}",
                state="nothing was moved",
                hint="use one release of torchrl_ext on every rank and engine",
            )
        return self._last

    def _of(self, params: Sequence[ParamMeta], shares: Sequence[Blocks]) -> Sequence[Blocks]:
        if tuple(params) == self._params:
            return shares
        places = [self._places[meta] for meta in params]
        return [Blocks.of_blocks(map(share.blocks, places)) for share in shares]


def group_rank(rank: int, workers: int) -> int:
    """Return the rank in the group of a trainer rank: rank 0 is 0, the others follow the workers, of which worker ``w``
    is ``1 + w``.
    """
    return rank and rank + workers


class Transfer(NamedTuple):
    """One block of one parameter that goes from a trainer rank to a worker.

    Attributes:
        param: index of the parameter.
        block: the elements, in checkpoint coordinates.
    """

    param: int
    block: Block


class _Way(NamedTuple):
    """A block of all parameters of a class, the trainer rank that sends it, and the worker that needs it."""

    rank: int
    worker: int
    block: Block


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class TransferPlan:
    """All transfers of an update: made by `make_plan`.

    Attributes:
        params: the parameters, in order.
        leaders: the worker that gets the bytes of each worker from the trainer: the first that needs the same.
        nbytes: that leave the trainer, without digests.
        chunks: ways of one class that fit into one round.
        rounds: the index of the parameter, and that of a chunk of its class, in order of parameters.
    """

    params: tuple[ParamMeta, ...]
    leaders: tuple[int, ...]
    nbytes: int
    chunks: list[list[_Way]]
    rounds: list[list[tuple[int, int]]]

    @cached_property
    def digest(self) -> str:
        """32 hex digits over parameters, transfers and rounds, by which a member sees that another plans the same."""
        whole = (self.params, self.leaders, self.chunks, self.rounds)
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(whole, enc_hook=dtype_name))


@final
class MemberPlan:
    """The part of a plan that one member carries out; ranks in the group are those of `group_rank`.

    Args:
        plan: of all members.
        member: this one's rank in the group.

    Attributes:
        plan: of all members.
        params: in order.
        rounds: how many there are.
        source: of a worker that is served by another one: that worker's rank in the group.
        successor: of a worker that passes on its bytes: the rank in the group of the next one.
    """

    def __init__(self, plan: TransferPlan, member: int) -> None:
        self.plan, self.params, self.rounds = plan, plan.params, len(plan.rounds)
        self.source: int | None = None
        self.successor: int | None = None
        workers, served = len(plan.leaders), member
        if 1 <= member <= workers:
            served = 1 + plan.leaders[member - 1]
            chain = [None, *(1 + one for one, leader in enumerate(plan.leaders) if 1 + leader == served), None]
            at = chain.index(member)
            self.source, self.successor = chain[at - 1], chain[at + 1]
        self._blocks: dict[int, dict[int, list[Block]]] = {}  # by chunk, and rank in the group of the other end
        for number, chunk in enumerate(plan.chunks):
            for rank, worker, block in chunk:
                ends = [group_rank(rank, workers), 1 + worker]
                if served in ends:
                    ends.remove(served)
                    self._blocks.setdefault(number, {}).setdefault(ends[0], []).append(block)

    def links(self, round: int) -> Iterator[tuple[int, list[Transfer]]]:
        """Yield what this member sends, or gets from trainer ranks, in a round.

        Yields:
            The rank in the group of the other end, ascending, with the transfers in order of parameters. Of a worker
            that another worker serves: what that one got from the trainer ranks.
        """
        found = defaultdict[int, list[Transfer]](list)
        for param, chunk in self.plan.rounds[round]:
            for peer, blocks in self._blocks.get(chunk, {}).items():
                found[peer] += [Transfer(param, block) for block in blocks]
        yield from sorted(found.items())

    def span(self, round: int) -> tuple[int, int]:
        """Return the first parameter of a round, and the one behind its last; both are the same for all members."""
        return self.plan.rounds[round][0][0], self.plan.rounds[round][-1][0] + 1


def make_plan(
    params: Sequence[ParamMeta], held: Sequence[Blocks], needed: Sequence[Blocks], *, bucket_bytes: int
) -> TransferPlan:
    """Plan how every worker gets the elements that it needs, each once, from trainer ranks that hold them.

    Ranks that hold the same take turns, class by class. Workers that need the same form a chain, and trainer ranks
    serve the first one of it.

    Args:
        params: in the order in which they are sent.
        held: what each trainer rank holds, by rank; not trusted.
        needed: what each worker needs, by worker; not trusted.
        bucket_bytes: the most that a rank sends, or a worker gets from the trainer, in one round.

    Raises:
        ConfigError: there is no rank or no worker, or a bucket does not hold one element.
        ManifestError: a block is no part of its parameter, a worker names an element twice, or nobody holds some of the
            elements.
    """
    if not held or not needed:
        raise ConfigError("a plan needs trainer ranks and workers", expected="one of each, or more")
    largest = max((meta.dtype.itemsize for meta in params), default=1)
    if bucket_bytes < largest:
        raise ConfigError(f"bucket_bytes is {bucket_bytes}", expected=f"{largest} or more, the size of one element")
    first_of: dict[Blocks, int] = {}
    leaders = tuple(first_of.setdefault(share, worker) for worker, share in enumerate(needed))
    needs = {worker: share for share, worker in first_of.items()}
    columns = {share.of: share.indices for share in (*held, *needed)}  # far fewer than shares
    classes = defaultdict[Any, list[int]](list)
    for param, (meta, row) in enumerate(zip(params, np.stack(list(columns.values()), axis=1), strict=True)):
        classes[row.tobytes(), meta.shape, meta.dtype].append(param)
    chunks, loads, steps = list[list[_Way]](), list[np.ndarray](), [range(0)] * len(params)
    for turn, own in enumerate(classes.values()):
        meta = params[own[0]]
        ways, size = _ways(meta, own[0], held, needs, turn), meta.dtype.itemsize
        whole = _load(ways, len(held), len(needed)) * size <= bucket_bytes
        first, parts = len(chunks), [ways] if whole.all() else _cut(ways, bucket_bytes // size)
        chunks += filter(None, parts)
        loads += [_load(part, len(held), len(needed)) * size for part in chunks[first:]]
        for param in own:
            steps[param] = range(first, len(chunks))
    rounds, total = list[list[tuple[int, int]]](), np.int64(0)
    for step in ((param, chunk) for param, found in enumerate(steps) for chunk in found):
        total = total + loads[step[1]]
        if not rounds or total.max() > bucket_bytes:
            rounds.append([])
            total = loads[step[1]]
        rounds[-1].append(step)
    nbytes = sum(int(loads[chunk][: len(held)].sum()) for own in rounds for _, chunk in own)
    return TransferPlan(params=tuple(params), leaders=leaders, nbytes=nbytes, chunks=chunks, rounds=rounds)


def _load(ways: Iterable[_Way], ranks: int, workers: int) -> np.ndarray:
    """Return the elements that each rank sends, and then those that each worker gets: int64, (ranks + workers,)."""
    found = [0] * (ranks + workers)
    for rank, worker, block in ways:
        found[rank] += block.numel
        found[ranks + worker] += block.numel
    return np.array(found, dtype=np.int64)


def _ways(meta: ParamMeta, index: int, held: Sequence[Blocks], needs: Mapping[int, Blocks], turn: int) -> list[_Way]:
    """Return the ways of a class.

    Args:
        meta, index: of any of its parameters.
        held: by trainer rank; they may overlap.
        needs: by worker.
        turn: where several ranks hold elements, which of them sends, counted from the first.
    """
    holders: dict[Block, list[int]] = {}
    for rank, block in _named(meta, index, enumerate(held), "trainer rank"):
        holders.setdefault(block, []).append(rank)
    cells = disjoint(meta, holders)
    wants = list(_named(meta, index, needs.items(), "worker"))
    for number, share in needs.items():
        if overlap(share.blocks(index)) is not None:
            raise ManifestError(f"worker {number} asks for elements of {meta} twice", expected="disjoint blocks")
    edges = np.array([block for _, block in wants], dtype=np.int64).reshape(len(wants), 2, len(meta.shape))
    found = []
    for at, (cell, ranks) in enumerate(cells.items()):  # one row of the table of cells and wants in memory at a time
        start, stop = np.array(cell, dtype=np.int64)
        met = (np.maximum(edges[:, 0], start) < np.minimum(edges[:, 1], stop)).all(axis=1)
        for one in met.nonzero()[0].tolist():
            worker, block = wants[one]
            common = cell.meet(block)
            assert common is not None
            found.append(_Way(ranks[(turn + at) % len(ranks)], worker, common))
    return found


def _named(meta: ParamMeta, index: int, shares: Iterable[tuple[int, Blocks]], who: str) -> Iterator[tuple[int, Block]]:
    """Yield the blocks of a parameter in these shares, each with its member, once they are found to be sound."""
    whole = Block.whole(meta.shape)
    for member, share in shares:
        for block in share.blocks(index):
            alike = len(block.start) == len(block.stop) == len(meta.shape)
            if not alike or not whole.contains(block) or not all(map(int.__lt__, *block)):
                raise ManifestError(
                    f"{who} {member} names the block from {list(block.start)} to {list(block.stop)} of {meta}",
                    expected="a block of its elements",
                )
            yield member, block


def _cut(ways: Sequence[_Way], most: int) -> list[list[_Way]]:
    """Cut the ways of a class into chunks in which no member moves more than ``most`` (>= 1) elements.

    A block fills what is left of a bucket at both ends, and goes on in the next chunk.
    """
    side = 1 + max(max(rank, worker) for rank, worker, _ in ways)
    chunks = list[list[_Way]]()
    last, used = defaultdict[int, int](int), defaultdict[tuple[int, int], int](int)
    # by diagonals of the table of ranks and workers, so that as many pairs as possible move at once
    for rank, worker, block in sorted(ways, key=lambda way: (way.rank + way.worker) % side):
        ends, left = (rank, side + worker), [block]
        while left:
            block, chunk = left.pop(), max(last[end] for end in ends)
            room = most - max(used[end, chunk] for end in ends)
            axis, size = next(((axis, size) for axis, size in enumerate(block.shape) if size > 1), (0, 1))
            row = block.numel // size
            if room < row <= max(1, most // _FINEST):
                chunk, room = chunk + 1, most
            last[rank] = chunk
            if block.numel > room:
                (low, high), edge = block, block.start[axis] + max(1, room // row)
                left.append(Block((*low[:axis], edge, *low[axis + 1 :]), high))
                left.append(Block(low, (*high[:axis], edge, *high[axis + 1 :])))
                continue
            for end in ends:
                last[end], used[end, chunk] = chunk, used[end, chunk] + block.numel
            chunks += [[] for _ in range(len(chunks), chunk + 1)]
            chunks[chunk].append(_Way(rank, worker, block))
    return chunks
