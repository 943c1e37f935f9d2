"""Make known weights: a checkpoint with something changed in each tensor, and the delta that undoes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.deltas.kernels import flat_bits
from torchrl_ext.data.deltas.streams import StreamPatch
from torchrl_ext.data.deltas.table import ParamTable
from torchrl_ext.data.deltas.units import units
from torchrl_ext.data.landing.loader import Changes
from torchrl_ext.data.landing.placement import keeps_values
from torchrl_ext.data.weights.digests import PositionDigest

__all__ = ["changed", "chosen_positions", "content", "reverting_changes", "start_tensors"]

_AT_ONCE = 1 << 22  # elements

_PERIOD, _EVERY, _SMALL = 257, 32, 1 << 14


def start_tensors(
    start: Iterable[tuple[str, Tensor]], params: Iterable[ParamMeta], own: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a start checkpoint that an update has, too; in the update's dtypes if that loses nothing.

    Args:
        start: a pass over the checkpoint.
        params: the update's.
        own: dtype in which the engine computes.
    """
    dtypes = {meta.name: meta.dtype for meta in params}
    for name, tensor in start:
        if name in dtypes:
            exact = dtypes[name] == own or keeps_values(tensor.dtype, dtypes[name])
            yield name, tensor.to(dtypes[name]) if exact else tensor


def chosen_positions(name: str, tensor: Tensor) -> Tensor:
    """Return which elements of a checkpoint tensor a rehearsal changes: int64, shape (k,), increasing.

    All of a small one; of a large one about one in 32, with a prime period that no layout of a kernel shares, so that a
    delta's staging stays small. None where the rule ``indices`` applies: a loader may use the values.
    """
    count = tensor.numel()
    values = tensor.is_floating_point() or tensor.is_complex()
    if not values and (count < _EVERY or tensor.dtype is torch.bool or name.endswith("g_idx")):
        return torch.empty(0, dtype=torch.int64)
    if count <= _SMALL:
        return torch.arange(count)
    pattern = torch.arange(0, _PERIOD, _EVERY)
    whole = torch.arange(0, count, _PERIOD).unsqueeze(1) + pattern
    return whole.reshape(-1)[: int((whole.reshape(-1) < count).sum())]


def changed(name: str, tensor: Tensor) -> Tensor:
    """Return a copy of a checkpoint tensor that is changed at its `chosen_positions`.

    Floats come nearer to zero by a factor that differs between neighbours (no value overflows, no scale turns
    negative), zeros become small; integers lose or gain their lowest bit.
    """
    where = chosen_positions(name, tensor)
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    if tensor.is_floating_point() or tensor.is_complex():
        factor = 0.5 + 0.25 * ((where * 7919) % _PERIOD) / _PERIOD
        old = flat[where].to(torch.complex128 if tensor.is_complex() else torch.float64)
        flat[where] = torch.where(old == 0, 0.01 * factor, old * factor).to(tensor.dtype)
    elif where.numel():  # bool has no last bit
        flat[where] = flat[where] ^ 1
    return flat.reshape(tensor.shape)


def reverting_changes(
    start: Callable[[], Iterable[tuple[str, Tensor]]], digests: Mapping[str, str], sparse: Callable[[str], bool]
) -> Changes:
    """Return the changes that lead from the changed checkpoint back to the start checkpoint.

    Args:
        start: makes a pass over the start checkpoint.
        digests: digest of each of its tensors, 32 hex digits.
        sparse: whether changes of a tensor are written element by element. Of other tensors, and of complex ones, which
            a delta brings whole, the changes only say that something changed.
    """

    def patches(wanted: Callable[[str], bool]) -> Iterator[StreamPatch]:
        for name, tensor in start():
            meta = ParamMeta.of(name, tensor)
            where = chosen_positions(name, tensor).numpy()
            where = where if sparse(name) and not meta.dtype.is_complex else where[:1]
            if where.size and wanted(name):
                table = ParamTable.of((meta,))
                yield StreamPatch(table, 0, 0, table.streams[0].size, where, units(tensor)[where], steps=False)

    def whole(names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        wanted = frozenset(names)
        return ((name, tensor) for name, tensor in start() if name in wanted)

    return Changes(patches=patches, digests=digests, whole=whole)


def content(tensor: Tensor) -> PositionDigest:
    """Return the sums of the elements' bits and of their squares, modulo 2^64, which do not depend on their order."""
    found = PositionDigest()
    for part in flat_bits(tensor).split(_AT_ONCE):
        wide = part.to(torch.int64)
        found = found.plus((int(wide.sum()), int((wide * wide).sum())))
    return found
