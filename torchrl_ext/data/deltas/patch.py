"""Patches, the decoded changes of tensors: which places change and to what, ready to land."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from torch import Tensor

from torchrl_ext.base.errors import ConfigError, IntegrityError, ManifestError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.deltas.units import unit_of, units

__all__ = ["Patch", "SparsePatch", "StepPatch", "apply_patch", "diff", "index_dtype", "same"]


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
        from torchrl_ext.data.deltas.host_loops import move

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
