"""Inside an engine: the plugins of stock vLLM and SGLang, and the embedded engine, which hosts a `transformers` model.

Here belongs what touches a live model of an engine: its loader, its rehearsal, its routes. A make's own package
is imported in its folder. Nothing here knows how bytes travel.

==============  =======================================================================================
plugin          our code in a stock engine, which the engine loads by an entry point
loader          lands tensors in the form that the engine computes with
rehearsal       shows, before a first update, that a load brings an engine to where a cold start does
agreement       messages between the workers of one engine, before one of them answers
==============  =======================================================================================
"""

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
