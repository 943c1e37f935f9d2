"""The table of a model's parameters, and the streams in which deltas lay out their units.

A *unit* is an element's bits as one integer; an element of 16 bytes has two units of 8. A *stream* is a sequence of
units of one dtype: those of its *segments*, one after the other. A segment is a parameter, in C order. So a delta of
many small parameters is a few long sequences, which cost what their bytes cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import final

import numpy as np
import torch

from torchrl_ext.base.errors import ManifestError
from torchrl_ext.base.types import ParamMeta

__all__ = ["PARAMETERS", "ParamTable", "Stream", "unit_bytes"]

PARAMETERS = 1 << 20
"""The most parameters that a table may have."""


def unit_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of a unit of this dtype: those of an element, but at most 8."""
    return min(8, dtype.itemsize)


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
        scale = dtype.itemsize // unit_bytes(dtype)
        self.first = np.array([*accumulate((scale * metas[param].numel for param in params), initial=0)], np.int64)

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

    def lays_out_as(self, other: ParamTable) -> bool:
        """Return whether both have the same parameters and streams."""
        if self is other:
            return True
        ours, theirs = ([stream.params.tolist() for stream in table.streams] for table in (self, other))
        return self.params == other.params and ours == theirs
