"""Adds our transports to the backends of `torchrl.weight_update.WeightSyncScheme.from_backend`.

Importing this module adds them, and imports TorchRL. `torchrl_ext` imports this module by itself where TorchRL was
imported first; it never imports TorchRL for that, since engines have none.
"""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

from torchrl.weight_update import weight_sync_schemes

from torchrl_ext.registry import transports

__all__ = ["register"]


def register() -> None:
    """Add every transport that is registered now, but for TorchRL's names. Call it again after registering more."""
    for name in transports.names():
        if name not in get_args(weight_sync_schemes.WeightSyncBackend):
            weight_sync_schemes.register_weight_sync_backend(name)(partial(_scheme, name))


def _scheme(transport: str, **settings: Any) -> Any:
    from torchrl_ext.collectors.scheme import TransportWeightSyncScheme  # on first use, with its imports

    return TransportWeightSyncScheme(transport, **settings)


register()
