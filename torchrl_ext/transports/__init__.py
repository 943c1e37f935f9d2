"""Data layer: move bytes, know nothing of engines."""

import sys
import types
from collections.abc import Mapping

from torchrl_ext import registry
from torchrl_ext.transports.base import Transport

__all__ = ["Transport"]


class _CallablePackage(types.ModuleType):
    """Importing a submodule binds this package over the function `torchrl_ext.transports`: so it answers like it."""

    def __call__(self) -> Mapping[str, str]:
        """Read-only mapping of the transport names to one line each."""
        return registry.transports.names()


sys.modules[__name__].__class__ = _CallablePackage
