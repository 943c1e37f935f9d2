"""Functions of the user's that are called around writes and reads of versions."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from torchrl_ext.errors import ConfigError

__all__ = ["PRE_READ_HOOK", "hook_at", "read_hook"]

PRE_READ_HOOK: Final = "TORCHRL_EXT_PRE_READ_HOOK"
"""Environment variable of an engine: the function that it calls before it looks for a version."""


def hook_at(path: str | Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Return the function at ``"module:function"`` or ``"module.function"``; a function is returned as it is.

    Raises:
        ConfigError: nothing callable can be imported from there.
    """
    if path is None or callable(path):
        return path
    module, _, name = path.rpartition(":" if ":" in path else ".")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the module raises while it is imported
        expected = '"module:function" or "module.function"'
        raise ConfigError(f"hook {path!r} cannot be imported: {error!r}", expected=expected) from error
    if not callable(found):
        raise ConfigError(f"hook {path!r} is a {type(found).__name__}", expected="a function")
    return found


def read_hook(path: str | Callable[..., Any] | None) -> Callable[[str, int], Any] | None:
    """Return the hook for readers at ``path``, to be called with the root and the version that is looked for.

    A function of one argument is called with the root only.

    Raises:
        ConfigError: as `hook_at`.
    """
    found = hook_at(path)
    if found is None:
        return None
    with suppress(ValueError):  # a function of C has no signature
        try:
            inspect.signature(found).bind("root", 1)
        except TypeError:
            return lambda root, version: found(root)
    return found
