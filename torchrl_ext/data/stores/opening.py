"""Open a store by its path or URL, and check which roots a trainer may name to an engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.data.stores.local import LocalStore
from torchrl_ext.data.stores.remote import RemoteStore
from torchrl_ext.data.stores.store import Store

__all__ = ["ROOTS_VARIABLE", "admit", "open_store"]

_FILE = "file://"

ROOTS_VARIABLE = "TORCHRL_EXT_ROOTS"
"""Environment variable of an engine: a comma-separated list of directories and URLs that contain trainers' roots.

If it is not set, an engine opens any absolute directory, and any URL of a remote store; if it is empty, nothing.
"""

_STORES = ("memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss")


def admit(root: Any) -> str:
    """Return where a root in a message is, if this engine may open it; the caller opens it there and nowhere else.

    A client that can send messages to an engine may not read every location that the engine can reach. Links are
    resolved once, so that one which is moved afterwards changes nothing.

    Args:
        root: a directory, ``file://`` and a directory, or another URL.

    Returns:
        The absolute path of the directory, without links; or the URL.

    Raises:
        ConfigError: ``root`` is not a directory or URL, or the engine's settings exclude it.
    """
    if not isinstance(root, str) or not root or "\0" in root:
        raise ConfigError(f"{root!r:.80} is not a root", expected="a directory or a URL", state="unchanged")
    place, listed = _place(root), os.environ.get(ROOTS_VARIABLE)
    scheme, separator, _ = place.partition("://")
    if not separator and not os.path.isabs(root.removeprefix(_FILE)):
        allowed, expected = False, "an absolute path, or a URL"
    elif listed is not None:
        named = [name.strip() for name in listed.split(",") if name.strip()]
        allowed = any(_below(place, _place(name)) for name in named)
        expected = f"a root below {', '.join(named)}" if named else f"none, as {ROOTS_VARIABLE} is set but empty"
    else:
        allowed = not separator or scheme in _STORES
        expected = f"a directory, or a URL that begins with one of {', '.join(_STORES)}"
    if not allowed:
        raise ConfigError(
            f"this engine does not open {_without_password(root)}",
            expected=expected,
            state="unchanged",
            hint=f"add it to {ROOTS_VARIABLE} in the engine's environment, and start the engine again",
        )
    return place


def _place(name: str) -> str:
    """Return a directory's absolute path without links, also of a ``file://`` URL; any other URL as it is."""
    path = name.removeprefix(_FILE)
    return path if "://" in path else os.path.realpath(path)


def _below(place: str, name: str) -> bool:
    if "://" in place:
        return ".." not in place.split("/") and f"{place.rstrip('/')}/".startswith(f"{name.rstrip('/')}/")
    return Path(place).is_relative_to(name)


def _without_password(root: str) -> str:
    """Return a URL without user and password, for messages: ``ftp://user:secret@host/x`` -> ``ftp://host/x``."""
    scheme, separator, rest = root.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}" if separator else root


def open_store(root: str | os.PathLike[str]) -> Store:
    """Return the store at ``root``.

    Args:
        root: a directory, ``file://`` and a directory, or another URL that fsspec knows (``s3://bucket/prefix``).

    Raises:
        ConfigError: the URL has a password (engines receive the URL), or its filesystem is not installed.
    """
    name = os.fspath(root)
    if _without_password(name) != name:
        raise ConfigError(
            f"the URL {_without_password(name)} contains a user or a password, and engines receive the URL",
            expected="a URL without them",
            hint="give them in the environment of each side",
        )
    if "://" in name and not name.startswith(_FILE):
        return RemoteStore(name)
    return LocalStore(name.removeprefix(_FILE))
