"""Importing this module adds every transport to `torchrl.weight_update.WeightSyncScheme.from_backend`::

    import torchrl_ext.rl.collectors.backends
    from torchrl.weight_update import WeightSyncScheme

    scheme = WeightSyncScheme.from_backend("delta", root="/shared/updates")

This scheme is a `DeltaWeightSyncScheme`, which this module derives from `TransportWeightSyncScheme`.
"""

from __future__ import annotations

import logging
from functools import partialmethod

from torchrl.weight_update.weight_sync_schemes import register_weight_sync_backend

from torchrl_ext.base.registry import transports
from torchrl_ext.rl.collectors.scheme import TransportWeightSyncScheme
from torchrl_ext.rl.collectors.torchrl_private import backend_of

__all__ = ["register"]

log = logging.getLogger("torchrl_ext")


def register() -> None:
    """Add every registered transport; call it again after registering more.

    If TorchRL or another package already uses a name, its class stays and a warning is logged.
    """
    for name, summary in transports.names().items():
        taken = backend_of(name)
        if taken is None:
            title = f"{name.title()}WeightSyncScheme"
            members = {
                "__init__": partialmethod(TransportWeightSyncScheme.__init__, name),
                "__doc__": f"`TransportWeightSyncScheme` over the transport {name!r}: {summary}.",
                "__module__": __name__,
            }
            globals()[title] = type(title, (TransportWeightSyncScheme,), members)  # pickle looks for the class here
            register_weight_sync_backend(name)(globals()[title])
        elif taken.__module__ != __name__:
            log.warning("transport %r is no backend of from_backend: the name is that of %r", name, taken)


register()
