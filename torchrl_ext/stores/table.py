"""The table of a model's parameters, and the streams in which deltas lay out their units.

A *unit* is an element's bits as one integer; an element of 16 bytes has two units of 8. A *stream* is a sequence of
units of one dtype: those of its segments, one after the other. A *segment* is a parameter, or a box of one, in C order.
So a delta of many small parameters is a few long sequences, which cost what their bytes cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import attrgetter
from typing import Annotated, final

import msgspec
import numpy as np
import torch
from torch import Tensor

from torchrl_ext.errors import ManifestError
from torchrl_ext.types import Count, ParamMeta
from torchrl_ext.weights.view import Block

__all__ = ["PARAMETERS", "ParamTable", "Segment", "Stream", "unit_bytes", "units_of"]

PARAMETERS = 1 << 20
"""The most parameters that a table may have."""

_Index = tuple[Count, ...]


class Segment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A parameter's place in a stream.

    Attributes:
        param: number of the parameter in the table.
        start, sizes: first element and sizes of a box of it, one number per dimension; None for all of it.
    """

    param: Annotated[int, msgspec.Meta(ge=0, lt=PARAMETERS)]
    start: _Index | None = None
    sizes: _Index | None = None


def unit_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of a unit of this dtype: those of an element, but at most 8."""
    return min(8, dtype.itemsize)


def units_of(meta: ParamMeta, segment: Segment) -> int:
    """Return the number of units of a segment of this parameter."""
    elements = math.prod(meta.shape if segment.sizes is None else segment.sizes)
    return elements * (meta.dtype.itemsize // unit_bytes(meta.dtype))


@final
class Stream:
    """A sequence of units: those of its segments, one after the other.

    Attributes:
        dtype: of every segment.
        segments: in order.
        params: int32, shape (k,): the parameter of each segment.
        first: int64, shape (k + 1,): the unit at which each segment begins; the last is the number of units.
        starts: int64, shape (k,): the unit of the parameter at which each segment begins, where the others follow it
            there; -1 where they do not.
    """

    def __init__(self, dtype: torch.dtype, segments: Sequence[Segment], metas: Sequence[ParamMeta]) -> None:
        self.dtype, self.segments, self._metas = dtype, tuple(segments), metas
        self.params = np.fromiter(map(attrgetter("param"), segments), np.int32, len(segments))
        scale = dtype.itemsize // unit_bytes(dtype)
        sizes = (metas[one.param].shape if one.sizes is None else one.sizes for one in segments)
        counts = [scale * math.prod(size) for size in sizes]
        self.first = np.array([*accumulate(counts, initial=0)], np.int64)
        self.starts = np.zeros(len(segments), np.int64)
        for number, segment in enumerate(segments):
            if segment.start is not None and segment.sizes is not None:
                start = _run_start(metas[segment.param].shape, segment.start, segment.sizes)
                self.starts[number] = -1 if start is None else start * scale

    @property
    def size(self) -> int:
        """The number of units."""
        return int(self.first[-1])

    def box(self, segment: int) -> Block:
        """Return which elements of its parameter a segment is."""
        place, shape = self.segments[segment], self._metas[self.segments[segment].param].shape
        if place.start is None or place.sizes is None:
            return Block.whole(shape)
        return Block(place.start, tuple(map(sum, zip(place.start, place.sizes, strict=True))))

    def cut(self, segment: int, tensor: Tensor) -> Tensor:
        """Return a segment of a tensor of its parameter's shape: a view."""
        if self.segments[segment].start is None:
            return tensor
        return tensor[self.box(segment).within(Block.whole(tensor.shape))]

    def positions(self, segment: int, units: np.ndarray) -> np.ndarray:
        """Return where units of a segment, counted in it, lie in its parameter: int64, increasing if they increase."""
        found, place = units.astype(np.int64), self.segments[segment]
        if place.start is None or place.sizes is None:
            return found
        scale = self.dtype.itemsize // unit_bytes(self.dtype)
        left, stride, inner = found, scale, scale
        for whole, first, size in zip(
            *map(reversed, (self._metas[place.param].shape, place.start, place.sizes)), strict=True
        ):
            inner *= size
            found = found + first * stride
            if size < whole:  # at the end of each row of the box, the rest of the row is left out
                found += left // inner * ((whole - size) * stride)
            stride *= whole
        return found

    def within(self, start: int, stop: int) -> range:
        """Return the numbers of the segments that have units from ``start`` to below ``stop``."""
        low = int(np.searchsorted(self.first, start, "right")) - 1
        return range(low, int(np.searchsorted(self.first, stop, "left")))

    def has(self, segment: int, block: Block, start: int, stop: int) -> bool:
        """Return whether a segment has elements of a block of its parameter from unit ``start`` to below ``stop``."""
        own = self.box(segment)
        common = own.meet(block)
        if common is None:
            return False
        first, scale = int(self.first[segment]), self.dtype.itemsize // unit_bytes(self.dtype)
        low, high = max(0, start - first) // scale, min(own.numel, -((first - stop) // scale))
        return _before(common, own, low) < _before(common, own, high)


def _run_start(shape: Sequence[int], start: Sequence[int], sizes: Sequence[int]) -> int | None:
    """Return the first element of a box whose elements follow one another in C order; None where they do not."""
    at, stride, whole = 0, 1, True  # whether the box has all of the dimensions after this one
    for full, first, size in zip(shape[::-1], start[::-1], sizes[::-1], strict=True):
        if not whole and size != 1:
            return None
        at, stride, whole = at + first * stride, stride * full, whole and size == full
    return at


@final
@dataclass(frozen=True, eq=False)
class ParamTable:
    """The parameters of a model, in order, and the streams of its deltas.

    Attributes:
        params: every parameter; names differ.
        streams: they hold every unit of every parameter exactly once.
        plain: there is one stream for each dtype, of whole parameters in their order.
    """

    params: tuple[ParamMeta, ...]
    streams: tuple[Stream, ...]
    plain: bool

    @classmethod
    def of(cls, params: Iterable[ParamMeta], segments: Sequence[Sequence[Segment]] | None = None) -> ParamTable:
        """Return the table of ``params``.

        Args:
            params: every parameter.
            segments: those of each stream; by default the table is ``plain``.

        Raises:
            ManifestError: a stream has no segments, or segments of several dtypes; or a parameter is listed twice, or
                is not covered exactly once.
        """
        params = tuple(params)
        if segments is not None:
            return cls(params, tuple(_stream(own, params) for own in segments), False)
        return _plain(params)

    @cached_property
    def number(self) -> Mapping[str, int]:
        """The number of each parameter, by name."""
        return {meta.name: number for number, meta in enumerate(self.params)}

    @cached_property
    def last_place(self) -> tuple[Sequence[int], Sequence[int]]:
        """The streams and the numbers there of each parameter's last segment: its only one in a plain table.

        Lists of numbers: a tuple for each of very many parameters would keep Python's collector busy.
        """
        found = np.zeros((2, len(self.params)), np.int64)
        for number, stream in enumerate(self.streams):
            found[0, stream.params], found[1, stream.params] = number, np.arange(stream.params.size)
        return found[0].tolist(), found[1].tolist()

    @cached_property
    def places(self) -> Sequence[Sequence[tuple[int, int]]]:
        """For each parameter, the stream and the number there of each of its segments."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.params]
        for number, stream in enumerate(self.streams):
            for segment, param in enumerate(stream.params.tolist()):
                found[param].append((number, segment))
        return found

    def lost(self) -> ParamMeta | None:
        """Return the first parameter of which the streams have more units, or fewer, than it has; None without one."""
        counts = np.zeros(len(self.params), np.int64)
        for stream in self.streams:
            np.add.at(counts, stream.params, np.diff(stream.first))
        whole = np.fromiter((units_of(meta, Segment(0)) for meta in self.params), np.int64, len(self.params))
        return None if (counts == whole).all() else self.params[int(np.argmax(counts != whole))]

    def lays_out_as(self, other: ParamTable) -> bool:
        """Return whether both have the same parameters and streams."""
        if self.params != other.params or (self.plain and other.plain):
            return self.params == other.params
        return [stream.segments for stream in self.streams] == [stream.segments for stream in other.streams]


@lru_cache(maxsize=2)  # a delta's table is mostly that of the one before
def _plain(params: tuple[ParamMeta, ...]) -> ParamTable:
    segments: dict[torch.dtype, list[Segment]] = {}
    for number, meta in enumerate(params):
        segments.setdefault(meta.dtype, []).append(Segment(number))
    return ParamTable(params, tuple(Stream(dtype, own, params) for dtype, own in segments.items()), True)


def _before(block: Block, around: Block, index: int) -> int:
    """Return how many elements of a block come before an element of the block around it, counted there in C order."""
    found, stride, left = 0, around.numel, block.numel
    for first, size, low, high in zip(around.start, around.shape, *block, strict=True):
        stride, left = stride // size, left // (high - low)
        at, index = divmod(index, stride)
        found += min(max(first + at - low, 0), high - low) * left
        if not low <= first + at < high:
            return found
    return found + index


def _stream(segments: Sequence[Segment], metas: Sequence[ParamMeta]) -> Stream:
    """Return the stream of these segments, from an untrusted table; whether boxes meet is not looked at."""
    for segment in segments:
        if segment.param >= len(metas):
            raise ManifestError(f"a segment is of parameter {segment.param}, and there are {len(metas)}")
        meta = metas[segment.param]
        if meta.dtype != metas[segments[0].param].dtype:
            raise ManifestError(f"a stream has {meta} and {metas[segments[0].param]}", expected="one dtype")
        if (segment.start is None) != (segment.sizes is None):
            raise ManifestError(f"a segment of {meta} has a start or sizes", expected="both or none")
        if segment.start is None or segment.sizes is None:
            continue
        bounds = zip(segment.start, segment.sizes, meta.shape, strict=False)
        sound = len(segment.start) == len(segment.sizes) == len(meta.shape)
        if not sound or any(not first < first + size <= whole for first, size, whole in bounds):
            raise ManifestError(f"a segment of {meta} begins at {segment.start} and has sizes {segment.sizes}")
    if not segments:
        raise ManifestError("a stream has no segments")
    return Stream(metas[segments[0].param].dtype, segments, metas)
