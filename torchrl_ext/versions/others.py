"""What transports use of `torchrl_ext.compat`, which is imported on first use."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol, cast

from torchrl_ext.stores import Store
from torchrl_ext.stores.versions import ChainView

__all__ = ["LocalCheckpoint", "local_checkpoint", "view_of"]

_SLIME: Final = "torchrl_ext.compat.slime"


class LocalCheckpoint(Protocol):
    """A checkpoint directory on this host, brought to a published version in place."""

    directory: Path

    def pull(self, source: str, version: int, *, before: Callable[[str, int], None] | None = None) -> None:
        """Bring the files to version ``version`` of the root ``source``.

        Args:
            source: the directory or URL under which versions lie.
            version: its number; 0 is the base.
            before: called with source and version before anything is read.

        Raises:
            WeightSyncError: there is no such version, or it is damaged; the directory cannot be used.
        """


def local_checkpoint(directory: str | os.PathLike[str], base: str | os.PathLike[str] | None = None) -> LocalCheckpoint:
    """Return the checkpoint in ``directory``, which several processes may share; ``base`` is its version 0."""
    return cast(LocalCheckpoint, import_module(f"{_SLIME}.local_checkpoint").LocalCheckpoint(directory, base))


def view_of(store: Store, base: str | None = None, *, settles: bool = False) -> ChainView:
    """Return the view of versions in ``store`` that another library wrote.

    Args:
        store: where they are.
        base: the checkpoint directory that everything began with, if there is one.
        settles: take the newest version for complete once nothing changes in it, where its format marks no end. That
            depends on when one looks, so it is not for several workers that have to land the same version.
    """
    return cast(ChainView, import_module(f"{_SLIME}.foreign").ForeignVersions(store, base, settles=settles))
