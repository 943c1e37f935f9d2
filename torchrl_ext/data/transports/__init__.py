"""Data layer: move bytes, know nothing of engines."""

import sys
import types
from collections.abc import Mapping

from torchrl_ext.base import registry
from torchrl_ext.data.transports.base import Transport

__all__ = ["Transport"]


class _CallablePackage(types.ModuleType):
    """A package that can be called: importing a submodule puts it in place of the function `torchrl_ext.transports`."""

    def __call__(self) -> Mapping[str, str]:
        """Return a read-only mapping of the transport names to one line each."""
        return registry.transports.names()


sys.modules[__name__].__class__ = _CallablePackage
