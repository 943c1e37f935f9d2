"""Functions that a user names by import path."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torchrl_ext.errors import ConfigError

__all__ = ["load_hook"]


def _nothing(*_: Any) -> None:
    return None


def load_hook(path: str | None) -> Callable[..., Any]:
    """The function at ``"module:function"``; None is one that does nothing.

    Raises:
        ConfigError: nothing callable can be imported from there.
    """
    if path is None:
        return _nothing
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the module raises while it is imported
        raise ConfigError(f"hook {path!r} cannot be imported: {error!r}", expected='"module:function"') from error
    if not callable(found):
        raise ConfigError(f"hook {path!r} is a {type(found).__name__}", expected="a function")
    return found
