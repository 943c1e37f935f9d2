"""Weight synchronisation for TorchRL: running engines follow a trainer's policy over a transport picked by name.

Everything here is imported on first use: an engine that only needs one worker end imports only that.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOME = {name: module for module, name in re.findall(r"^from (\S+) import (\w+) as \2$", _STUB, re.MULTILINE)}
"""Public name -> module that it is imported from on first use; type checkers read the same lines."""

__all__ = [*sorted(_HOME), "__version__", "engines", "make_engine", "make_transport", "transports"]


def transports() -> Mapping[str, str]:
    """Return a read-only mapping of the transport names to one line each."""
    from torchrl_ext.base import registry

    return registry.transports.names()


def engines() -> Mapping[str, str]:
    """Return a read-only mapping of the engine names to one line each."""
    from torchrl_ext.base import registry

    return registry.engines.names()


def make_transport(name: str, **settings: Any) -> Any:
    """Build the transport called ``name``.

    Raises:
        ConfigError: no such name (the message lists them), or settings that it does not take.
    """
    from torchrl_ext.base import registry

    return registry.transports.make(name, **settings)


def make_engine(name: str, **settings: Any) -> Any:
    """Build the engine client called ``name``.

    Raises:
        ConfigError: no such name (the message lists them), or settings that it does not take.
    """
    from torchrl_ext.base import registry

    return registry.engines.make(name, **settings)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("errors", "testing"):
        return importlib.import_module(f"{_HOME[name]}.{name}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
