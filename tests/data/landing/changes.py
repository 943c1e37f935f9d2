"""Changes as a transport hands them to a loader, from patches that a test made."""

from __future__ import annotations

import numpy as np

from torchrl_ext.data.deltas.streams import StreamPatch
from torchrl_ext.data.deltas.table import ParamTable


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
