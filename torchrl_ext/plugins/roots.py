"""What a path says that a trainer hands to an engine's ``/update_weights_from_disk`` with ``load_format="delta"``."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torchrl_ext.errors import ConfigError, StoreError
from torchrl_ext.stores import open_store
from torchrl_ext.stores.chain import Chain
from torchrl_ext.stores.manifest import MANIFEST
from torchrl_ext.stores.opening import admit
from torchrl_ext.stores.versions import version_name, version_number
from torchrl_ext.versions.foreign import ForeignVersions

__all__ = ["locate", "parameters"]


def locate(path: str) -> tuple[str, int]:
    """Root and version that a path names.

    Raises:
        ConfigError: the engine may not open it.
        StoreError: there is no version there.
    """
    admit(path)
    given = Path(path).absolute()
    version = version_number(given.name)
    if version is not None:
        return str(given.parent), version
    if not given.is_dir():
        raise StoreError(f"{path} is no directory", state="the engine serves what it served")
    store = open_store(given)
    version = Chain(store, foreign=ForeignVersions(store, None)).latest()
    if not version:
        raise StoreError(f"{path} holds no version", state="the engine serves what it served")
    return str(given), version


def parameters(root: str, version: int, base: str, files: Collection[str] | None = None) -> list[Any]:
    """What a version holds, as JSON. ``files``, where given, has to be all of the version's."""
    store = open_store(root)
    chain = Chain(store, foreign=ForeignVersions(store, base if os.path.isdir(base) else None))
    try:
        params = chain.version(version).params
        names = set(store.list(version_name(version)))
    except FileNotFoundError as error:
        raise StoreError(
            f"{root} holds no version {version}",
            state="the engine serves what it served",
            hint="publish every file of a version before the engine is told of it",
        ) from error
    lost = sorted(name for name in names - set(files or names) if name.endswith((".safetensors", ".bin")))
    if lost and MANIFEST not in names:
        raise ConfigError(
            f"the call names only a part of version {version}: not {lost[0]}",
            expected="one call per version, when all of its files are there",
            state="the engine serves what it served",
        )
    return [meta.to_json() for meta in params]
