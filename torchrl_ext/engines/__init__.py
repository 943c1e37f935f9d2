"""Inside an engine: stock vLLM and SGLang with our plugin, and an engine of our own."""

import sys
import types
from collections.abc import Mapping

from torchrl_ext.base import registry


class _CallablePackage(types.ModuleType):
    """A package that can be called: importing a submodule puts it in place of the function `torchrl_ext.engines`."""

    def __call__(self) -> Mapping[str, str]:
        """Return a read-only mapping of the engine names to one line each."""
        return registry.engines.names()


sys.modules[__name__].__class__ = _CallablePackage
