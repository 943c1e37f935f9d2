"""The table of a model's parameters, and the streams in which deltas lay out their units.

A *unit* is an element's bits as one integer; an element of 16 bytes has two units of 8. A *stream* is a sequence of
units of one dtype: those of its *segments*, one after the other. A segment is a parameter, in C order. So a delta of
many small parameters is a few long sequences, which cost what their bytes cost. Codecs see every dtype as unsigned
integers, so that any bit pattern survives. A *patch* is the decoded change of a tensor: which units, and to what.
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

from torchrl_ext.base.errors import ConfigError, IntegrityError, ManifestError
from torchrl_ext.base.types import ParamMeta, dtype_name
from torchrl_ext.data.deltas.bits import BITS, flat_bits, unsigned

__all__ = [
    "PARAMETERS",
    "ParamTable",
    "Patch",
    "SparsePatch",
    "StepPatch",
    "Stream",
    "Unit",
    "apply_patch",
    "diff",
    "index_dtype",
    "same",
    "unit_bytes",
    "unit_of",
    "units",
]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A dtype as codecs see it: elements made of units, unsigned integers of 1, 2, 4 or 8 bytes.

    An element of complex128 has two of them, the real part first.

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

    def count(self, meta: ParamMeta) -> int:
        """Return the number of units in a parameter."""
        return meta.nbytes // self.width


_FLOATS = {
    "float16": Unit(width=2, ordered=True, shift=10, select=31),
    "bfloat16": Unit(width=2, ordered=True, shift=7, select=255),
    "float32": Unit(width=4, ordered=True, shift=23, select=255),
    "float64": Unit(width=8, ordered=True, shift=52, select=255),
    "complex128": Unit(width=8, ordered=True, shift=52, select=255),
    "float8_e4m3fn": Unit(width=1, ordered=True, shift=3, select=15),
    "float8_e4m3fnuz": Unit(width=1, ordered=True, shift=3, select=15),
    "float8_e5m2": Unit(width=1, ordered=True, shift=2, select=31),
    "float8_e5m2fnuz": Unit(width=1, ordered=True, shift=2, select=31),
}


@cache
def unit_of(dtype: torch.dtype) -> Unit:
    """Return the unit of a dtype.

    Raises:
        ConfigError: its elements are not 1, 2, 4, 8 (or, complex, 16) plain bytes.
    """
    name = dtype_name(dtype)
    if name in _FLOATS:
        return _FLOATS[name]
    if dtype.itemsize not in BITS or name.startswith(("qint", "quint")):
        raise ConfigError(
            f"tensors of dtype {name} cannot be coded as a delta",
            expected="a dtype of 1, 2, 4 or 8 bytes, or complex128",
            hint="send the integer storage of a quantised tensor",
        )
    return Unit(width=dtype.itemsize)


def units(tensor: Tensor) -> np.ndarray:
    """Return the bits of ``tensor`` in C order, unsigned, 1-D; shared memory where it is contiguous on the host."""
    return unsigned(flat_bits(tensor.cpu()))


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


def index_dtype(count: int) -> np.dtype[Any]:
    """Return int32 where it can number ``count`` units, else int64."""
    return np.dtype(np.int32 if count <= 2**31 - 1 else np.int64)


@dataclass(frozen=True, eq=False)
class _Places:
    """What sparse patches share: places in a parameter, and a value for each.

    Attributes:
        meta: the parameter.
        indices: int32 or int64, shape (k,), strictly increasing: flat C-order unit indices (element indices, but for
            complex128, where an element is two units).
        values: unsigned, of the width of the dtype's unit, shape (k,).

    Raises:
        IntegrityError: places or values that cannot be those of the parameter; names it.
    """

    meta: ParamMeta
    indices: np.ndarray
    values: np.ndarray

    def __post_init__(self) -> None:
        unit, where = unit_of(self.meta.dtype), self.indices
        count = unit.count(self.meta)
        if where.ndim != 1 or where.shape != self.values.shape or self.values.dtype != unit.dtype:
            raise IntegrityError(
                f"the patch of {self.meta.name!r} has {where.shape} indices and {self.values.shape} "
                f"{self.values.dtype} values",
                expected=f"as many {unit.dtype} values as indices",
            )
        if where.size and (where[0] < 0 or where[-1] >= count or not (where[1:] > where[:-1]).all()):
            raise IntegrityError(
                f"the patch of {self.meta.name!r} has indices that do not increase from 0 to {count - 1}"
            )

    @property
    def changed(self) -> int:
        """The number of units that change."""
        return self.indices.size


@final
@dataclass(frozen=True, eq=False)
class SparsePatch(_Places):
    """New bits at some places: ``values`` are the raw bits after the change."""


@final
@dataclass(frozen=True, eq=False)
class StepPatch(_Places):
    """Steps from the old bits at some places; whoever holds the old bits can resolve them.

    ``values`` are steps in units in the last place, on the ordered line modulo 2^width, not 0.
    """

    def resolve(self, old: np.ndarray) -> SparsePatch:
        """Return the patch of new bits, made from the old bits at these places.

        Args:
            old: unsigned, of the unit's width, shape (k,).
        """
        from torchrl_ext.data.deltas.loops import move

        unit, values = unit_of(self.meta.dtype), np.empty_like(self.values)
        move(np.ascontiguousarray(old), self.values, unit.top, unit.mask, unit.ordered, values)
        return SparsePatch(self.meta, self.indices, values)


Patch = SparsePatch | StepPatch


def diff(meta: ParamMeta, old: Tensor, new: Tensor) -> SparsePatch:
    """Return what changed between two tensors of one dtype and shape, byte for byte.

    Raises:
        ManifestError: they do not have ``meta``'s dtype and shape.
    """
    before, after = same(meta, old, new)
    where = np.flatnonzero(before != after).astype(index_dtype(after.size), copy=False)
    return SparsePatch(meta, where, after[where])


def same(meta: ParamMeta, *tensors: Tensor) -> list[np.ndarray]:
    """Return the units of tensors that all must have ``meta``'s dtype and shape.

    Raises:
        ManifestError: one of them has not.
    """
    for tensor in tensors:
        if tensor.dtype != meta.dtype or tuple(tensor.shape) != meta.shape:
            raise ManifestError(
                f"{meta.name!r} is given as {ParamMeta.of(meta.name, tensor)}",
                expected=str(meta),
                hint="a delta is taken between tensors of one dtype and shape",
            )
    return [units(tensor) for tensor in tensors]


def apply_patch(patch: Patch, tensor: Tensor) -> None:
    """Write a patch into a contiguous host tensor, in place, in time proportional to what changed.

    Raises:
        ManifestError: the tensor has another dtype or shape.
        ConfigError: the tensor is not contiguous on the host.
    """
    (target,) = same(patch.meta, tensor)
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ConfigError("a patch can be applied in place to contiguous host tensors only")
    resolved = patch.resolve(target[patch.indices]) if isinstance(patch, StepPatch) else patch
    target[resolved.indices] = resolved.values
