"""Pairs of tensors that try a codec: every dtype, many densities, bit patterns of all kinds."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from torchrl_ext import testing
from torchrl_ext.base.types import ParamMeta, dtype_name
from torchrl_ext.data.deltas.codec_loops import steps_between
from torchrl_ext.data.deltas.streams import StreamPatch
from torchrl_ext.data.deltas.table import ParamTable, unit_of, units

DTYPES = [*testing.DTYPES, torch.uint16, torch.complex64]


def random_bits(count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Any bit pattern: NaNs with payloads, infinities, both zeros, subnormals."""
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return (raw & 1 if dtype == torch.bool else raw).view(dtype)


def patch_of(meta: ParamMeta, positions: np.ndarray, values: np.ndarray, steps: bool = False) -> StreamPatch:
    """The change of a parameter, in a table of its own."""
    return StreamPatch.of(ParamTable.of([meta]), meta.name, positions.astype(np.int32), values, steps)


def diff(meta: ParamMeta, old: Tensor, new: Tensor) -> StreamPatch:
    """The new bits where two tensors differ."""
    positions, after = np.flatnonzero(units(old) != units(new)), units(new)
    return patch_of(meta, positions, after[positions])


def steps_of(old: Tensor, new: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the units that differ between two tensors of one dtype, and the steps between them."""
    unit, before, after = unit_of(old.dtype), units(old), units(new)
    positions = np.flatnonzero(before != after)
    steps = np.empty(positions.size, unit.dtype)
    steps_between(before[positions], after[positions], unit.top, unit.mask, unit.ordered, steps)
    return positions, steps


def small_steps(old: Tensor, where: Tensor, generator: torch.Generator) -> Tensor:
    """``old`` with its lowest byte moved by one or two at ``where``, as training moves it."""
    new = old.clone()
    low = new.view(torch.uint8).reshape(-1, old.dtype.itemsize)
    step = torch.randint(1, 3, (int(where.sum()),), dtype=torch.uint8, generator=generator)
    low[where, 0] = low[where, 0] ^ 1 if old.dtype == torch.bool else low[where, 0] + step
    return new


def pairs(dtype: torch.dtype, sizes: tuple[int, ...] = (0, 1, 63, 64, 4097, 20_000)) -> Iterator[tuple]:
    """``(meta, old, new)``: unchanged, sparse, dense, clustered, replaced; small steps and arbitrary bits."""
    generator = torch.Generator().manual_seed(7)
    for count in sizes:
        old = random_bits(count, dtype, generator)
        meta = ParamMeta(f"{dtype_name(dtype)}.{count}", dtype, (count,))
        for density in (0.0, 0.001, 0.03, 0.6, 1.0):
            where = torch.rand(count, generator=generator) < density
            yield meta, old, small_steps(old, where, generator)
            yield meta, old, torch.where(where, random_bits(count, dtype, generator), old)
        cluster = torch.zeros(count, dtype=torch.bool)
        cluster[count // 3 : count // 3 + 300] = True
        yield meta, old, small_steps(old, cluster, generator)


class Listed:
    """What `Patcher.stage` uses of a transport's changes: one patch of each stream that changes.

    Args:
        patches: one per tensor, all of one kind.
        digests: digest of every tensor at the end, 32 hex digits, by name.
    """

    def __init__(self, *patches, digests=None):
        self._patches, self.digests = patches, digests or {}

    def patches(self, wanted):
        table = ParamTable.of(patch.meta for patch in self._patches)
        wants = {patch.meta.name: wanted(patch.meta.name) for patch in self._patches if patch.positions.size}
        for number, stream in enumerate(table.streams):
            own = [self._patches[param] for param in stream.params]
            if not any(wants.get(patch.meta.name) for patch in own):
                continue
            firsts = zip(stream.first[:-1], own, strict=True)
            positions = np.concatenate([first + one.positions for first, one in firsts])
            values = np.concatenate([patch.values for patch in own])
            yield StreamPatch(table, number, 0, stream.size, positions, values, own[0].steps)

    def whole(self, names):
        return iter(())
