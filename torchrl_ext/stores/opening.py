"""A root by its name: a path, or the URL of an object store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torchrl_ext.errors import ConfigError
from torchrl_ext.stores.base import Root
from torchrl_ext.stores.local import LocalStore

__all__ = ["open_store"]


def open_store(root: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Root:
    """The store at ``root``.

    Args:
        root: a directory, ``file://`` and a directory, or another URL that fsspec knows (``s3://bucket/prefix``).
        options: settings of the fsspec filesystem (``endpoint_url``, ``key``, ...); only for URLs.

    Raises:
        ConfigError: options for a directory, or a URL whose filesystem is not installed.
    """
    name = os.fspath(root)
    if "://" in name and not name.startswith("file://"):
        from torchrl_ext.stores.object import ObjectStore

        return ObjectStore(name, **(options or {}))
    if options:
        raise ConfigError(f"{name} is a directory, which takes no storage_options", expected="a URL such as s3://...")
    return LocalStore(name.removeprefix("file://"))
