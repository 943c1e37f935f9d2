"""Dtypes seen as unsigned integers, on which every codec works, so that any bit pattern survives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.base.types import ParamMeta, dtype_name
from torchrl_ext.data.deltas.kernels import BITS, flat_bits, unsigned

__all__ = ["Unit", "unit_of", "units"]


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
