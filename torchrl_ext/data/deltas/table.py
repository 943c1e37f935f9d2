"""The table of a model's parameters, and the streams in which deltas lay out their units.

A *unit* is an element's bits as one integer. A *stream* is a sequence of
units of one dtype: those of its *segments*, one after the other. A segment is a parameter, in C order. So a delta of
many small parameters is a few long sequences, which cost what their bytes cost. Codecs see every dtype as unsigned
integers, so that any bit pattern survives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.base.errors import ConfigError, ManifestError
from torchrl_ext.base.types import ParamMeta, dtype_name
from torchrl_ext.data.deltas.bits import BITS, flat_bits, unsigned

__all__ = ["PARAMETERS", "ParamTable", "Stream", "Unit", "index_dtype", "unit_of", "units"]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A dtype as codecs see it: unsigned integers of 1, 2, 4 or 8 bytes.

    Attributes:
        width: bytes of one unit.
        ordered: sign-magnitude, as IEEE formats are; False for integers, bool and packed bytes.
        shift, select: ``(bits >> shift) & select`` is the exponent (of float64, its low eight bits); 0 for integers.
    """

    width: int
    ordered: bool = False
    shift: int = 0
    select: int = 0

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The unsigned numpy dtype of a unit, little-endian."""
        return np.dtype(f"<u{self.width}")

    @cached_property
    def top(self) -> np.uint64:
        """The highest bit of a unit."""
        return np.uint64(1 << (8 * self.width - 1))

    @cached_property
    def mask(self) -> np.uint64:
        """All bits of a unit."""
        return np.uint64((1 << (8 * self.width)) - 1)


_FLOATS = {
    name: Unit(width=width, ordered=True, shift=shift, select=select)
    for name, width, shift, select in (
        ("float16", 2, 10, 31),
        ("bfloat16", 2, 7, 255),
        ("float32", 4, 23, 255),
        ("float64", 8, 52, 255),
        ("float8_e4m3fn", 1, 3, 15),
        ("float8_e4m3fnuz", 1, 3, 15),
        ("float8_e5m2", 1, 2, 31),
        ("float8_e5m2fnuz", 1, 2, 31),
    )
}


@cache
def unit_of(dtype: torch.dtype) -> Unit:
    """Return the unit of a dtype.

    Raises:
        ConfigError: its elements are not 1, 2, 4 or 8 plain bytes.
    """
    name = dtype_name(dtype)
    if name in _FLOATS:
        return _FLOATS[name]
    if dtype.itemsize not in BITS or name.startswith(("qint", "quint")):
        raise ConfigError(
            f"tensors of dtype {name} cannot be coded as a delta",
            expected="a dtype of 1, 2, 4 or 8 bytes",
            hint="send the integer storage of a quantised tensor",
        )
    return Unit(width=dtype.itemsize)


def units(tensor: Tensor) -> np.ndarray:
    """Return the bits of ``tensor`` in C order, unsigned, 1-D; shared memory where it is contiguous on the host."""
    return unsigned(flat_bits(tensor.cpu()))


PARAMETERS = 1 << 20
"""The most parameters that a table may have."""


@final
class Stream:
    """A sequence of units: those of its segments, one after the other.

    Attributes:
        dtype: of every segment.
        params: int32, shape (k,): the number of the parameter that each segment is.
        first: int64, shape (k + 1,): the unit at which each segment begins; the last is the number of units.
    """

    def __init__(self, dtype: torch.dtype, params: Sequence[int], metas: Sequence[ParamMeta]) -> None:
        self.dtype, self.params = dtype, np.array(params, np.int32)
        self.first = np.array([*accumulate((metas[param].numel for param in params), initial=0)], np.int64)

    @property
    def size(self) -> int:
        """The number of units."""
        return int(self.first[-1])

    def within(self, start: int, stop: int) -> range:
        """Return the numbers of the segments that have units from ``start`` to below ``stop``."""
        low = int(np.searchsorted(self.first, start, "right")) - 1
        return range(low, int(np.searchsorted(self.first, stop, "left")))


@final
@dataclass(frozen=True, eq=False)
class ParamTable:
    """The parameters of a model, in order, and the streams of its deltas.

    Attributes:
        params: every parameter; names differ.
        streams: each parameter is a segment of one of them.
    """

    params: tuple[ParamMeta, ...]
    streams: tuple[Stream, ...]

    @classmethod
    def of(cls, params: Iterable[ParamMeta], streams: Sequence[Sequence[int]] | None = None) -> ParamTable:
        """Return the table of ``params``.

        Args:
            params: every parameter.
            streams: the numbers of the parameters of each stream; by default there is one for each dtype.

        Raises:
            ManifestError: a stream has no parameters, or some of several dtypes; or a parameter is in no stream, or in
                more than one.
        """
        params = tuple(params)
        if streams is None:
            own: dict[torch.dtype, list[int]] = {}
            for number, meta in enumerate(params):
                own.setdefault(meta.dtype, []).append(number)
            streams = [*own.values()]
        counts = [0] * len(params)
        for stream in streams:
            for number in stream:
                if not 0 <= number < len(params):
                    raise ManifestError(f"a stream has parameter {number}, and there are {len(params)}")
                if params[number].dtype != params[stream[0]].dtype:
                    raise ManifestError(f"a stream has {params[number]} and {params[stream[0]]}", expected="one dtype")
                counts[number] += 1
            if not stream:
                raise ManifestError("a stream has no parameters")
        for meta, count in zip(params, counts, strict=True):
            if count != 1:
                raise ManifestError(f"{count} streams have {meta}", expected="one")
        return cls(params, tuple(Stream(params[stream[0]].dtype, stream, params) for stream in streams))

    @cached_property
    def number(self) -> Mapping[str, int]:
        """The number of each parameter, by name."""
        return {meta.name: number for number, meta in enumerate(self.params)}

    @cached_property
    def place(self) -> tuple[Sequence[int], Sequence[int]]:
        """The stream of each parameter, and its segment there.

        Lists of numbers: a tuple for each of very many parameters would keep Python's collector busy.
        """
        found = np.zeros((2, len(self.params)), np.int64)
        for number, stream in enumerate(self.streams):
            found[0, stream.params], found[1, stream.params] = number, np.arange(stream.params.size)
        return found[0].tolist(), found[1].tolist()

    def place_of(self, name: str) -> tuple[int, int]:
        """Return the stream of a parameter, and its segment there."""
        streams, segments = self.place
        return streams[self.number[name]], segments[self.number[name]]

    def at(self, stream: int, unit: int) -> ParamMeta:
        """Return the parameter to which a unit of a stream belongs."""
        own = self.streams[stream]
        return self.params[own.params[own.within(unit, unit + 1)[0]]]

    def lays_out_as(self, other: ParamTable) -> bool:
        """Return whether both have the same parameters and streams."""
        if self is other:
            return True
        ours, theirs = ([stream.params.tolist() for stream in table.streams] for table in (self, other))
        return self.params == other.params and ours == theirs


def index_dtype(count: int) -> np.dtype[Any]:
    """Return int32 where it can number ``count`` units, else int64."""
    return np.dtype(np.int32 if count <= 2**31 - 1 else np.int64)
