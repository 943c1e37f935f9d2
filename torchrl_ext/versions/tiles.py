"""Deltas in tiles: what is found in whole parameters is sent in streams of tiles, of which a worker reads its own.

A row of a tile is short, and lies apart from the next one: to compare tile by tile takes more than twice as long. So
parameters are compared as they lie, and what changed in them is sorted by tile, which costs what changed.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.codecs import streams
from torchrl_ext.codecs.blocks import KINDS
from torchrl_ext.codecs.choice import BlockEncoding
from torchrl_ext.codecs.streams import Found
from torchrl_ext.codecs.units import unit_of, units
from torchrl_ext.kernels.base import BITS
from torchrl_ext.stores.table import ParamTable
from torchrl_ext.versions.containers import Coded

__all__ = ["Tiles"]


_lists = threading.local()


class _Change(NamedTuple):
    """Changes in one stream, in order: units of the stream, old and new bits, and the kind in which they are coded."""

    positions: np.ndarray
    before: np.ndarray
    after: np.ndarray
    kind: str

    def part(self, low: int, high: int) -> _Change:
        """Return some of the changes."""
        return _Change(self.positions[low:high], self.before[low:high], self.after[low:high], self.kind)


class _Routed(NamedTuple):
    """What was found in a block of whole parameters: as `Coded`, without a payload; and its changes by new stream."""

    looked: Coded
    changes: dict[int, _Change]


class _Plan:
    """Where the parameters of a stream are in streams of tiles.

    Attributes:
        targets: the number of each stream; -1 where no parameter is whole.
        columns: of `torchrl_ext.codecs.tile_loops.route`: rows, columns, cuts, wholes; int64, shape (segments,).
        corners: as there.
        segments: for each target the segments of its parameters here.
        done: how many segments were looked at.
        index: dtype of units of its streams.
    """

    def __init__(self, number: int, plain: ParamTable, table: ParamTable) -> None:
        stream, tiles = plain.streams[number], max(1, table.tiles)
        self.targets = [-1] * (1 + tiles * tiles)
        self.columns = np.zeros((4, stream.params.size), np.int64)
        corners: list[list[int]] = []
        owners: list[list[int]] = [[] for _ in self.targets]
        for segment, param in enumerate(stream.params.tolist()):
            places = table.places[param]
            units_at = [int(table.streams[target].first[own]) for target, own in places]
            if len(places) == 1:
                self.columns[2:, segment] = -1, units_at[0]
                self.targets[0] = places[0][0]
                owners[0].append(segment)
                continue
            self.columns[:3, segment] = *plain.params[param].shape[-2:], len(corners)
            corners.append(units_at)
            for tile, (target, _) in enumerate(places, 1):
                self.targets[tile] = target
                owners[tile].append(segment)
        self.corners = np.array(corners, np.int64).reshape(len(corners), tiles * tiles)
        self.segments, self.done = owners, 0
        self.index = np.int32 if stream.size < 2**31 else np.int64


def _room(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the thread's memory to work in: fresh memory would cost more than the work does."""
    held: tuple[np.ndarray, np.ndarray] | None = getattr(_lists, "room", None)
    if held is None or held[0].size < count:
        held = _lists.room = np.empty(count, np.uint16), np.empty(count, np.int64)
    return held


@final
class Tiles:
    """Codes in the streams of one table what was found in those of another one, of whole parameters.

    Args:
        plain: of whole parameters.
        table: of the same parameters, some of them in tiles.
        codec: picks the kind of a block, for all changes that were found together.
        copy: returns the newest tensor of a name, to which the changes lead.
    """

    def __init__(
        self, plain: ParamTable, table: ParamTable, codec: BlockEncoding, copy: Callable[[str], Tensor]
    ) -> None:
        self._plain, self._table, self._codec, self._copy = plain, table, codec, copy
        self._plans = [_Plan(number, plain, table) for number in range(len(plain.streams))]
        self._open: dict[int, list[_Change]] = {}  # what is not coded yet, by stream
        self._begun = [0] * len(table.streams)  # the unit before which everything is

    def route(self, found: Found) -> _Routed:
        """Sort what was found in a block, in any thread."""
        from torchrl_ext.codecs.tile_loops import route

        stream, plan = self._plain.streams[found.stream], self._plans[found.stream]
        changes = dict[int, _Change]()
        own = slice(found.segments.start, found.segments.stop)
        firsts = stream.first[own.start : own.stop + 1] - found.start
        if found.positions.size:
            chosen, self._codec.reasons[chosen.name] = self._codec.choose(unit_of(stream.dtype), found)
            count, ends = found.positions.size, np.zeros(len(plan.targets), np.int64)
            bits = np.empty_like(found.before), np.empty_like(found.after)
            every = _Change(np.empty(count, plan.index), *bits, chosen.name)
            columns = (np.ascontiguousarray(column[own]) for column in plan.columns)
            tiles = max(1, self._table.tiles)
            route(*found[2:5], firsts, *columns, plan.corners, tiles, *_room(count), ends, *every[:3])
            begins = [0, *ends[:-1].tolist()]
            for target, low, high in zip(plan.targets, begins, ends.tolist(), strict=True):
                if low < high:
                    changes[target] = every.part(low, high)
        counts, params = np.diff(np.searchsorted(found.positions, firsts)), stream.params[own]
        row = found.stream, found.start, found.size, found.segments, params, found.words, counts
        return _Routed(Coded(*row, 0, "", b""), changes)

    def blocks(self, routed: Iterable[_Routed], threads: int) -> Iterator[Coded]:
        """Yield each of ``routed`` as it is, and coded blocks of streams, in the order of each stream."""
        waiting = deque[Future[Coded]]()
        pool = ThreadPoolExecutor(threads, thread_name_prefix="tiles")
        try:
            for looked, changes in routed:
                yield looked
                for target, change in changes.items():
                    self._open.setdefault(target, []).append(change)
                waiting.extend(pool.submit(call) for call in self._complete(looked))
                while len(waiting) > 2 * threads + 1:
                    yield waiting.popleft().result()
            for target in [*self._open]:
                waiting.extend(pool.submit(call) for call in self._until(target, self._table.streams[target].size))
            while waiting:
                yield waiting.popleft().result()
        finally:  # also when the caller stops early, or a task failed
            pool.shutdown(wait=True, cancel_futures=True)

    def _complete(self, looked: Coded) -> Iterator[Callable[[], Coded]]:
        """Return what codes the blocks in which nothing can change any more, since that block was looked at."""
        plan, stream = self._plans[looked.stream], self._plain.streams[looked.stream]
        done = int(np.searchsorted(stream.first[1:], looked.start + looked.size, "right"))
        if done == plan.done:
            return
        plan.done = done
        for target, segments in zip(plan.targets, plan.segments, strict=True):
            if target in self._open:
                own = self._table.streams[target]
                yield from self._until(target, int(own.first[bisect_left(segments, done)]))

    def _until(self, target: int, end: int) -> Iterator[Callable[[], Coded]]:
        """Return what codes the blocks of a stream that end before a unit."""
        size, begun = self._table.streams[target].size, self._begun[target]
        stop = size if end == size else end - end % streams.BLOCK_UNITS
        if stop <= begun:
            return
        self._begun[target], counts = stop, Counter[str]()
        for change in (changes := self._open.pop(target)):
            counts[change.kind] += change.positions.size
        positions, before, after, _ = zip(*changes, strict=True)
        kind = max(counts, key=counts.__getitem__)
        every = _Change(np.concatenate(positions), np.concatenate(before), np.concatenate(after), kind)
        low = 0
        for start in range(begun, stop, streams.BLOCK_UNITS):
            units_of_it = min(streams.BLOCK_UNITS, size - start)
            high = int(np.searchsorted(every.positions, start + units_of_it))
            if low < high:
                yield partial(self._coded, target, start, units_of_it, every.part(low, high))
            low = high
        if low < every.positions.size:
            self._open[target] = [every.part(low, every.positions.size)]

    def _coded(self, target: int, start: int, size: int, change: _Change) -> Coded:
        kind, stream = KINDS[change.kind], self._table.streams[target]
        places, words = (change.positions - start).astype(np.int32), np.empty((0, 2), np.uint64)
        old = torch.zeros((), dtype=BITS[change.before.itemsize]).expand(size)
        if kind.whole_base or kind.name == "dense":
            own = self._units(target, start, size)
            own[places] = change.before
            old = torch.from_numpy(own.view(np.uint8)).view(old.dtype)
        found = Found(target, start, places, change.before, change.after, range(0), words, old)
        payload, nothing = kind.encode(unit_of(stream.dtype), found), np.empty(0, np.int64)
        counted = places.size, kind.name, payload
        return Coded(target, start, size, range(0), nothing, words, nothing, *counted)

    def _units(self, target: int, start: int, size: int) -> np.ndarray:
        """Return the units of a block as they are now, in memory of their own."""
        stream = self._table.streams[target]
        segments = stream.within(start, start + size)
        names = (self._table.params[stream.params[segment]].name for segment in segments)
        parts = [units(stream.cut(segment, self._copy(name))) for segment, name in zip(segments, names, strict=True)]
        first = start - int(stream.first[segments.start])
        return np.concatenate(parts)[first : first + size]
