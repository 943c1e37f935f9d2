"""What changed in a model, stream by stream (`ParamTable`): found on the trainer, landed by a reader.

Tensors come in the order of a source. Small neighbours are copied into one run, large ones are scanned where they lie,
and a block of a stream is a task of its own, for several threads, whose results come out in order. So a change costs
what its bytes cost, however many tensors it is in.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import NamedTuple, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.base.devices import Recorded, download, recorded, wait_for
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.deltas.bits import BITS, UNSIGNED, flat_bits, linear_keys, unsigned
from torchrl_ext.data.deltas.table import ParamTable, Stream, index_dtype, unit_of
from torchrl_ext.data.deltas.torch_ops import kernels_on

__all__ = ["BLOCK_UNITS", "Found", "StreamPatch", "find", "fold", "in_threads", "worker_threads"]

BLOCK_UNITS = 1 << 22
"""Units of a block of a stream; the last one is shorter."""
_STAGED = 1 << 14  # units: smaller tensors are copied together before they are scanned
_AHEAD = 1 << 30  # bytes of new tensors that may wait to be scanned
_MOST_SPARE = 4  # several workers of an engine share a host
_lists = threading.local()
_Result = TypeVar("_Result")


class Found(NamedTuple):
    """What changed in a block of a stream. Its lists belong to the thread, until that searches again.

    Attributes:
        stream: its number.
        start: the block's first unit.
        positions: int32, shape (k,): units that changed, increasing, counted from ``start``.
        before, after: unsigned, shape (k,): their bits.
        segments: numbers of the segments that meet the block.
        words: uint64, shape (segments, 2): what the change adds to the digest of each.
        old: unsigned, shape (size,): the block as it was.
        news: where in the block new units begin that were compared on the host, and these: unsigned.
    """

    stream: int
    start: int
    positions: np.ndarray
    before: np.ndarray
    after: np.ndarray
    segments: range
    words: np.ndarray
    old: np.ndarray
    news: Sequence[tuple[int, np.ndarray]] = ()

    @property
    def size(self) -> int:
        """Units of the block."""
        return self.old.size


class _Run(NamedTuple):
    """Tensors of one device that follow one another in a block, from unit ``at`` on; a single one may be a part."""

    at: int
    units: int
    tensors: list[Tensor]


@final
class _Open:
    """The block of a stream to which tensors are being added."""

    def __init__(self, stream: int, start: int, size: int) -> None:
        self.stream, self.start, self.size = stream, start, size
        self.runs = list[_Run]()
        self.nbytes = 0
        self._small, self._at, self._end = list[Tensor](), 0, 0

    def add(self, first: int, end: int, tensor: Tensor, small: bool) -> None:
        """Add units ``first`` to ``end`` of the stream: elements of a small tensor, or bits of a large one."""
        self.nbytes += tensor.nbytes
        if small:
            if not self._small or first != self._end or tensor.device != self._small[0].device:
                self.close()
                self._at = first
            self._small.append(tensor.resolve_neg())  # of these, bits are taken by a view
        else:
            self.close()
            self.runs.append(_Run(first - self.start, end - first, [tensor]))
        self._end = end

    def close(self) -> None:
        """Make a run of the small tensors that were added last."""
        if self._small:
            self.runs.append(_Run(self._at - self.start, self._end - self._at, self._small))
            self._small = []


def find(
    table: ParamTable,
    olds: Sequence[Tensor],
    tensors: Iterable[tuple[int, int, Tensor]],
    then: Callable[[Found], _Result],
    *,
    threads: int,
    follow: bool = False,
) -> Generator[_Result, None, None]:
    """Find what changed in a model, block by block.

    Args:
        table: its parameters and streams.
        olds: bits of each stream as it was, 1-D, on the host.
        tensors: stream, segment and new tensor, of the segment's shape; in order in each stream, of some or all
            segments, on any devices. Consumed by the caller's thread, about a GiB ahead of what is yielded; on an
            accelerator they may still be computed on its current stream.
        then: called with each block that was looked at, in the thread that found what changed.
        threads: worker threads.
        follow: make ``olds`` what is new, at the latest when the block's result is yielded.

    Yields:
        What ``then`` returned, in the order of blocks in each stream.
    """

    def tasks() -> Iterator[tuple[int, Callable[[], _Result]]]:
        for block in _blocks(table, tensors):
            block.close()
            old = olds[block.stream][block.start : block.start + block.size]
            made = recorded(run.tensors[0].device for run in block.runs)
            yield block.nbytes, partial(_done, table.streams[block.stream], old, block, made, then, follow)

    return in_threads(tasks(), threads=threads)


def _blocks(table: ParamTable, tensors: Iterable[tuple[int, int, Tensor]]) -> Iterator[_Open]:
    """Yield blocks as they are filled, the last one of each stream at the end."""
    firsts, opened = [stream.first.tolist() for stream in table.streams], dict[int, _Open]()
    staged = [0 if stream.dtype.is_complex else _STAGED for stream in table.streams]  # their bits are more than a view
    for stream, segment, tensor in tensors:
        first, end = firsts[stream][segment], firsts[stream][segment + 1]
        block, small = opened.get(stream), end - first < staged[stream]
        if small and block is not None and end <= block.start + BLOCK_UNITS:
            block.add(first, end, tensor, True)
            continue
        flat = tensor.reshape(-1) if small else flat_bits(tensor)
        for at in range(first - first % BLOCK_UNITS, end, BLOCK_UNITS):
            if block is None or block.start != at:
                if block is not None:
                    yield block
                block = opened[stream] = _Open(stream, at, min(BLOCK_UNITS, firsts[stream][-1] - at))
            low, high = max(first, at), min(end, at + BLOCK_UNITS)
            block.add(low, high, flat[low - first : high - first], small)
    yield from opened.values()


def _done(
    stream: Stream,
    live: Tensor,
    block: _Open,
    made: Recorded,
    then: Callable[[Found], _Result],
    follow: bool,
) -> _Result:
    wait_for(made)
    found = _found(stream, live, block)
    result = then(found)
    if not follow or not found.positions.size:
        return result
    if 32 * found.positions.size > found.size and len(found.news) == len(block.runs):
        for at, new in found.news:
            np.copyto(found.old[at : at + new.size], new)  # torch would ask other threads for help
    else:
        changed = torch.from_numpy(found.positions), torch.from_numpy(found.after).view(live.dtype)
        kernels_on(live.device).scatter(live, *changed)
    return result


def _found(stream: Stream, live: Tensor, block: _Open) -> Found:
    from torchrl_ext.data.deltas.loops import digest_segments, scan

    segments = stream.within(block.start, block.start + block.size)
    firsts = stream.first[segments.start : segments.stop + 1] - block.start
    words, count, keys = np.zeros((len(segments), 2), np.uint64), 0, linear_keys()
    lists, news = _room(block.size + 64, live.element_size()), list[tuple[int, np.ndarray]]()
    for device, together in groupby(block.runs, lambda run: run.tensors[0].device):
        runs = [*together]
        flats = (torch._utils._flatten_dense_tensors(run.tensors) for run in runs)  # what is contiguous is not copied
        bits, rest = [flat.view(BITS[live.element_size()]) for flat in flats], [one[count:] for one in lists]
        if kernels_on(device).on_host:
            for run, new in zip(runs, bits, strict=True):
                news.append((run.at, unsigned(new)))
                old = live[run.at : run.at + run.units]
                count += scan(unsigned(old), news[-1][1], run.at, firsts, keys, *rest, words)
                rest = [one[count:] for one in lists]
            continue
        old = torch.cat([live[run.at : run.at + run.units].to(device, non_blocking=True) for run in runs])
        new = torch.cat(bits)
        where = (old != new).nonzero().flatten()
        places, now = (one.numpy() for one in download([where.to(torch.int32), new.index_select(0, where)]))
        ends = np.cumsum([run.units for run in runs])
        starts = np.array([run.at + run.units for run in runs]) - ends  # less where each run begins among these
        places = places + starts[np.searchsorted(ends, places, "right")]
        more = places.size
        for column, listed in zip(
            rest, (places, unsigned(live)[places], now.view(UNSIGNED[now.itemsize])), strict=True
        ):
            column[:more] = listed
        digest_segments(*(one[:more] for one in rest), firsts, keys, words)
        count += more
    positions, before, after = (one[:count] for one in lists)
    return Found(block.stream, block.start, positions, before, after, segments, words, unsigned(live), news)


def _room(size: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the thread's lists: fresh memory would cost more than finding does."""
    lists = vars(_lists).get(str(width))
    if lists is None or lists[0].size < size:
        before, after = np.empty((2, size), UNSIGNED[width])
        lists = vars(_lists)[str(width)] = np.empty(size, np.int32), before, after
    return lists


@final
@dataclass(frozen=True, eq=False)
class StreamPatch:
    """The decoded change of a range of a stream.

    Attributes:
        table: has the stream.
        stream: its number.
        start, size: the range, in units.
        positions: int32 or int64, shape (k,), strictly increasing, counted from ``start``.
        values: unsigned, of the stream's unit, shape (k,): new bits, or steps.
        steps: ``values`` are steps in units in the last place, on the ordered line modulo 2^width.
    """

    table: ParamTable
    stream: int
    start: int
    size: int
    positions: np.ndarray
    values: np.ndarray
    steps: bool = False

    @classmethod
    def of(
        cls, table: ParamTable, name: str, positions: np.ndarray, values: np.ndarray, steps: bool = False
    ) -> StreamPatch:
        """Return the change of one parameter, whose units ``positions`` count."""
        stream, segment = table.place_of(name)
        first, end = table.streams[stream].first[segment : segment + 2].tolist()
        return cls(table, stream, first, end - first, positions, values, steps)

    @property
    def meta(self) -> ParamMeta:
        """The parameter to which the first unit of the range belongs."""
        return self.table.at(self.stream, self.start)

    def apply(self, units: np.ndarray) -> None:
        """Write the patch into the units of its range: unsigned, shape (size,)."""
        units[self.positions] = self._moved(units[self.positions], self.values) if self.steps else self.values

    def _moved(self, old: np.ndarray, steps: np.ndarray) -> np.ndarray:
        from torchrl_ext.data.deltas.loops import move

        unit, new = unit_of(self.table.streams[self.stream].dtype), np.empty_like(old)
        move(old, steps, unit.top, unit.mask, unit.ordered, new)
        return new

    def split(self) -> Iterator[StreamPatch]:
        """Yield the change of each parameter in the range, which may be a part of it."""
        for segment in self.table.streams[self.stream].within(self.start, self.start + self.size):
            own = self.segment(segment)
            if own.positions.size:
                yield own

    def segment(self, segment: int) -> StreamPatch:
        """Return what changes in one parameter, whose units positions count then; by its segment."""
        first, end = self.table.streams[self.stream].first[segment : segment + 2].tolist()
        low, high = np.searchsorted(self.positions, (first - self.start, end - self.start)).tolist()
        positions = self.positions[low:high] + np.int64(self.start - first)
        positions = positions.astype(index_dtype(end - first), copy=False)
        return StreamPatch(self.table, self.stream, first, end - first, positions, self.values[low:high], self.steps)


def fold(patches: Sequence[StreamPatch]) -> list[StreamPatch]:
    """Return what does the same as patches of one range, applied in this order; no position is in two of the results.

    New bits replace, steps add up (steps that cancel vanish), steps after known bits are resolved.
    """
    if len(patches) < 2:
        return [*patches]
    positions = np.unique(np.concatenate([patch.positions for patch in patches]))
    values, known = np.zeros(positions.size, patches[0].values.dtype), np.zeros(positions.size, np.bool_)
    for patch in patches:
        at = np.searchsorted(positions, patch.positions)
        if not patch.steps:
            values[at], known[at] = patch.values, True
            continue
        on_bits = known[at]
        there, more = at[on_bits], ~on_bits
        values[there] = patch._moved(values[there], patch.values[on_bits])
        values[at[more]] += patch.values[more]  # modulo 2^width, as unsigned numpy addition is
    parts = ((known, False), (~known & (values != 0), True))
    return [
        replace(patches[0], positions=positions[own], values=values[own], steps=steps)
        for own, steps in parts
        if own.any()
    ]


def in_threads(calls: Iterable[tuple[int, Callable[[], _Result]]], *, threads: int) -> Generator[_Result, None, None]:
    """Yield what each call returns, in order; some calls run ahead of what is yielded.

    Args:
        calls: each with the bytes that it holds, of which about a GiB wait; consumed by the caller's thread.
        threads: worker threads.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="codec")
    waiting, ahead = deque[tuple[int, Future[_Result]]](), 0
    try:
        for held, call in calls:
            waiting.append((held, pool.submit(call)))
            ahead += held
            while len(waiting) > 2 * threads + 1 or (len(waiting) > 2 and ahead > _AHEAD):
                nbytes, future = waiting.popleft()
                ahead -= nbytes
                yield future.result()
        while waiting:
            yield waiting.popleft()[1].result()
    finally:  # also when the caller stops early, or a task failed
        pool.shutdown(wait=True, cancel_futures=True)


def worker_threads(*, beside_model: bool = False) -> int:
    """Return how many threads may work: one per core that this process may use.

    Args:
        beside_model: only on cores that torch leaves free, from 1 to 4 of them. An engine on a GPU computes on one core
            or few; one on the host on all of them, unless a setting says otherwise.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        cores = os.cpu_count() or 1
    return max(1, min(_MOST_SPARE, cores - torch.get_num_threads())) if beside_model else cores
