"""Open a store by its path or URL, and check which roots a trainer may name to an engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl_ext.errors import ConfigError
from torchrl_ext.stores.base import Store
from torchrl_ext.stores.local import LocalStore

__all__ = ["ROOTS_VARIABLE", "admit", "open_store"]

ROOTS_VARIABLE = "TORCHRL_EXT_ROOTS"
"""Environment variable of an engine: a comma-separated list of directories and URLs that contain trainers' roots.

If it is not set, an engine opens any absolute directory, and any URL of a file system or an object store.
"""

_STORES = ("file", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss")


def admit(root: Any, *, made: bool = False) -> None:
    """Refuse a root in a message if this engine may not open it.

    A client that can send messages to an engine may not read every location that the engine can reach.

    Args:
        root: a directory or a URL.
        made: the root is a directory, which is created if it is missing.

    Raises:
        ConfigError: ``root`` is not a directory or URL, or the engine's settings exclude it.
    """
    if not isinstance(root, str) or not root or "\0" in root:
        raise ConfigError(f"{root!r:.80} is not a root", expected="a directory or a URL", state="unchanged")
    named = [name.strip() for name in os.environ.get(ROOTS_VARIABLE, "").split(",") if name.strip()]
    scheme, separator, _ = root.partition("://")
    if named:
        allowed, expected = any(_below(root, name) for name in named), f"a root below {', '.join(named)}"
    elif separator:
        allowed, expected = scheme in _STORES, f"a directory, or a URL that begins with one of {', '.join(_STORES)}"
    elif made:
        allowed, expected = Path(root).parent.is_dir(), "a directory, or the name of a new one in a directory"
    else:
        allowed, expected = os.path.isabs(root), "an absolute path, or a URL"
    if not allowed:
        raise ConfigError(
            f"this engine does not open {_without_password(root)}",
            expected=expected,
            state="unchanged",
            hint=f"add it to {ROOTS_VARIABLE} in the engine's environment, and start the engine again",
        )


def _below(root: str, name: str) -> bool:
    if "://" in root or "://" in name:
        parts = root.split("/")
        return ".." not in parts and f"{root.rstrip('/')}/".startswith(f"{name.rstrip('/')}/")
    return Path(os.path.realpath(root)).is_relative_to(os.path.realpath(name))


def _without_password(root: str) -> str:
    """Return a URL without user and password, for messages: ``ftp://user:secret@host/x`` -> ``ftp://host/x``."""
    scheme, separator, rest = root.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}" if separator else root


def open_store(root: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Store:
    """Return the store at ``root``.

    Args:
        root: a directory, ``file://`` and a directory, or another URL that fsspec knows (``s3://bucket/prefix``).
        options: settings of the fsspec filesystem (``endpoint_url``, ``key``, ...); only for URLs.

    Raises:
        ConfigError: there are options for a directory, the URL has a password (engines receive the URL), or its
            filesystem is not installed.
    """
    name = os.fspath(root)
    if _without_password(name) != name:
        raise ConfigError(
            f"the URL {_without_password(name)} contains a user or a password, and engines receive the URL",
            expected="a URL without them",
            hint="give them as storage_options, or in the environment of each side",
        )
    if "://" in name and not name.startswith("file://"):
        from torchrl_ext.stores.object import ObjectStore

        return ObjectStore(name, **(options or {}))
    if options:
        raise ConfigError(f"{name} is a directory, which takes no storage_options", expected="a URL such as s3://...")
    return LocalStore(name.removeprefix("file://"))
