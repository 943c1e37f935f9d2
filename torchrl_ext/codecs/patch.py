"""Patches, the decoded changes of tensors: which places change and to what, ready to land or to be folded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.codecs.units import unit_of, units
from torchrl_ext.errors import ConfigError, IntegrityError, ManifestError
from torchrl_ext.kernels.base import flat_bits, kernels_on, unsigned
from torchrl_ext.types import ParamMeta

__all__ = ["DensePatch", "Patch", "SparsePatch", "StepPatch", "apply_patch", "diff", "fold", "index_dtype"]


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
        count = self.meta.numel * unit.parts
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
        from torchrl_ext.kernels.host_loops import move

        unit, values = unit_of(self.meta.dtype), np.empty_like(self.values)
        move(np.ascontiguousarray(old), self.values, unit.top, unit.mask, unit.ordered, values)
        return SparsePatch(self.meta, self.indices, values)


@final
@dataclass(frozen=True, eq=False)
class DensePatch:
    """New bits for every unit of a parameter.

    Attributes:
        meta: the parameter.
        values: unsigned, of the width of the dtype's unit, shape (units,).
    """

    meta: ParamMeta
    values: np.ndarray

    def __post_init__(self) -> None:
        unit = unit_of(self.meta.dtype)
        count = self.meta.numel * unit.parts
        if self.values.shape != (count,) or self.values.dtype != unit.dtype:
            raise IntegrityError(
                f"{self.meta.name!r} came as {self.values.shape} units of {self.values.dtype}",
                expected=f"{count} of {unit.dtype}",
            )

    @property
    def changed(self) -> int:
        """The number of units that are written."""
        return self.values.size


Patch = SparsePatch | StepPatch | DensePatch


def diff(meta: ParamMeta, old: Tensor, new: Tensor) -> SparsePatch:
    """Return what changed between two tensors of one dtype and shape, byte for byte.

    Raises:
        ManifestError: they do not have ``meta``'s dtype and shape.
    """
    check_same(meta, old, new)
    found = kernels_on(torch.device("cpu")).diff(flat_bits(old.cpu()), flat_bits(new.cpu()))
    return SparsePatch(meta, found.places.numpy(), unsigned(found.after))


def same(meta: ParamMeta, *tensors: Tensor) -> list[np.ndarray]:
    """Return the units of tensors that all must have ``meta``'s dtype and shape.

    Raises:
        ManifestError: one of them has not.
    """
    check_same(meta, *tensors)
    return [units(tensor) for tensor in tensors]


def check_same(meta: ParamMeta, *tensors: Tensor) -> None:
    """Check that tensors have ``meta``'s dtype and shape.

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


def apply_patch(patch: Patch, tensor: Tensor) -> None:
    """Write a patch into a contiguous host tensor, in place, in time proportional to what changed.

    Raises:
        ManifestError: the tensor has another dtype or shape.
        ConfigError: the tensor is not contiguous on the host.
    """
    (target,) = same(patch.meta, tensor)
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ConfigError("a patch can be applied in place to contiguous host tensors only")
    if isinstance(patch, DensePatch):
        target[:] = patch.values
    else:
        resolved = patch.resolve(target[patch.indices]) if isinstance(patch, StepPatch) else patch
        target[resolved.indices] = resolved.values


def fold(patches: Iterable[Patch]) -> Patch:
    """Return one patch that does what ``patches``, applied in this order, do; it writes each place once.

    New bits replace, steps add up (steps that cancel vanish), steps after known bits are resolved.

    Raises:
        ManifestError: no patches, or patches of different parameters.
    """
    queue = list(patches)
    if not queue:
        raise ManifestError("there is no patch to fold")
    result = queue[0]
    for patch in queue[1:]:
        if patch.meta != result.meta:
            raise ManifestError(f"a patch of {patch.meta} follows one of {result.meta}", expected="one parameter")
        result = _then(result, patch)
    return result


def _then(first: Patch, second: Patch) -> Patch:
    if isinstance(second, DensePatch):
        return second
    if isinstance(first, DensePatch):
        values = first.values.copy()
        if isinstance(second, StepPatch):
            second = second.resolve(values[second.indices])
        values[second.indices] = second.values
        return DensePatch(first.meta, values)
    if isinstance(first, StepPatch) and isinstance(second, StepPatch):
        return _sum(first, second)
    if isinstance(first, StepPatch) or isinstance(second, StepPatch):
        return _mixed(first, second)
    keep = ~np.isin(first.indices, second.indices, assume_unique=True)
    return SparsePatch(first.meta, *_sorted((first.indices[keep], second.indices), (first.values[keep], second.values)))


def _sorted(indices: tuple[np.ndarray, ...], values: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    where, what = np.concatenate(indices), np.concatenate(values)
    order = np.argsort(where, kind="stable")
    return where[order], what[order]


def _sum(first: StepPatch, second: StepPatch) -> StepPatch:
    where, what = _sorted((first.indices, second.indices), (first.values, second.values))
    repeated = np.flatnonzero(where[1:] == where[:-1])
    what[repeated] += what[repeated + 1]  # modulo 2^width, as unsigned numpy addition is
    keep = what != 0
    keep[repeated + 1] = False
    return StepPatch(first.meta, where[keep], what[keep])


def _mixed(first: SparsePatch | StepPatch, second: SparsePatch | StepPatch) -> Patch:
    """Fold a patch of known bits and one of steps, which is possible where every step meets known bits."""
    if isinstance(first, SparsePatch) and isinstance(second, StepPatch):
        at = np.searchsorted(first.indices, second.indices)
        known = at < first.indices.size
        known[known] = first.indices[at[known]] == second.indices[known]
        if known.all():
            return _then(first, second.resolve(first.values[at]))
    elif np.isin(first.indices, second.indices, assume_unique=True).all():
        return second
    raise ManifestError(
        f"known bits and steps of {first.meta.name!r} cannot be folded without the base",
        hint="decode with `base=`, so that both are known bits",
    )
