"""Functions of the user's that a delta transport calls around its writes and reads."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torchrl_ext.errors import ConfigError

__all__ = ["hook_at"]


def hook_at(path: str | None) -> Callable[..., Any] | None:
    """Return the function at ``"module:function"``.

    Raises:
        ConfigError: nothing callable can be imported from there.
    """
    if path is None:
        return None
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the module raises while it is imported
        raise ConfigError(f"hook {path!r} cannot be imported: {error!r}", expected='"module:function"') from error
    if not callable(found):
        raise ConfigError(f"hook {path!r} is a {type(found).__name__}", expected="a function")
    return found
