"""Our transports among the backends of `torchrl.weight_update.WeightSyncScheme.from_backend`.

TorchRL keeps schemes by backend name, and offers no entry point to add one. Importing `torchrl_ext` is enough: where
TorchRL was imported before, the names are added at once; where it comes later, when its table exists. TorchRL itself is
never imported from here, since engines have none.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torchrl_ext.registry import transports

__all__ = ["hook", "register"]

_TABLE = "torchrl.weight_update.weight_sync_schemes"


class _Backend:
    """Builds the scheme of one transport; imports it on first use."""

    def __init__(self, transport: str) -> None:
        self._transport = transport

    def __call__(self, **settings: Any) -> Any:
        from torchrl_ext.sync.scheme import TransportWeightSyncScheme

        return TransportWeightSyncScheme(self._transport, **settings)


def register() -> None:
    """Add every transport that is registered now; TorchRL's own names stay. Needed again after registering more."""
    module = importlib.import_module(_TABLE)
    for name in transports.names():
        module._WEIGHT_SYNC_SCHEMES.setdefault(name, _Backend(name))


def hook() -> None:
    """Call `register` now if TorchRL is imported, and else when it is."""
    if _TABLE in sys.modules:
        register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for one module, lets it be found as ever, and adds our names when it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TABLE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # nothing of ours stays behind
        self._loader.exec_module(module)
        register()
