"""Adds a class per transport to `torchrl.weight_update.WeightSyncScheme.from_backend`; importing this module does it::

    import torchrl_ext.collectors.backends
    from torchrl.weight_update import WeightSyncScheme

    scheme = WeightSyncScheme.from_backend("delta", root="/shared/updates")

The class for ``"delta"`` is `DeltaWeightSyncScheme` of this module, a `TransportWeightSyncScheme`.
"""

from __future__ import annotations

import logging
from functools import partialmethod

from torchrl.weight_update.weight_sync_schemes import register_weight_sync_backend

from torchrl_ext.collectors.scheme import TransportWeightSyncScheme
from torchrl_ext.collectors.torchrl_private import backend_of
from torchrl_ext.registry import transports

__all__ = ["register"]

log = logging.getLogger("torchrl_ext")


def register() -> None:
    """Add every transport that is registered now; call it again after registering more.

    A name that another package, or TorchRL, gave to a class keeps it, and a warning says so.
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
            globals()[title] = type(title, (TransportWeightSyncScheme,), members)  # where pickle finds it
            register_weight_sync_backend(name)(globals()[title])
        elif taken.__module__ != __name__:
            log.warning("transport %r is no backend of from_backend: the name is that of %r", name, taken)


register()
