"""Changes as a transport hands them to a loader, from patches that a test made."""

from __future__ import annotations


class Listed:
    """What `Patcher.stage` uses of a transport's changes.

    Args:
        patches: one per tensor that changes.
        digests: position digest of every tensor at the end, 32 hex digits, by name.
    """

    def __init__(self, *patches, digests=None):
        self._patches, self.digests = patches, digests or {}

    def patches(self, wanted):
        return (patch for patch in self._patches if patch.changed and wanted(patch.meta.name))

    def whole(self, names):
        return iter(())
