"""`inspect` reports an engine worker's environment to `torchrl-ext doctor`.

It takes an `Inspect` message and returns one JSON object:

=================  ==========================================================================================
(always)           ``torchrl_ext`` (its version), ``host``, ``pid``, ``transports`` (names that this environment can
                   import)
``root``           if the message has one: ``{"seen", "why", "remedy"}``; ``remedy`` is empty unless the engine does not
                   open the root
=================  ==========================================================================================

It runs in the thread that generates. If something is wrong, it takes at most a few seconds.

Anyone who can reach the engine's port can send the message, so an answer reveals nothing about files other than probes,
or roots that the engine may not open (`torchrl_ext.data.stores.opening.admit`).
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

import torchrl_ext
from torchrl_ext.base import registry
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import ConfigError, WeightSyncError, why
from torchrl_ext.base.messages import Inspect
from torchrl_ext.base.types import Info
from torchrl_ext.data.stores.opening import admit, open_store
from torchrl_ext.data.transports.disk import Invitation

__all__ = ["followed", "inspect"]


def followed() -> list[str]:
    """Return the names of the transports that an engine here supports: all that can be imported except ``memory``."""
    found = []
    for name in registry.transports.names():
        with suppress(ConfigError):
            registry.transports.load(name)
            found.append(name)
    return [name for name in found if name != "memory"]


def inspect(question: Inspect) -> Info:
    """Answer ``question``; failures are reported in the answer, not raised."""
    answer: Info = {
        "torchrl_ext": torchrl_ext.__version__,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "transports": followed(),
    }
    if question.root is not None:
        answer["root"] = _look(question.root)
    return answer


def _look(invitation: Info) -> Info:
    try:
        store = open_store(admit(invitation.get("root")))
        Invitation.from_json(invitation, "the root to look at").find(store, Deadline(2.0))
    except (WeightSyncError, OSError) as error:
        remedy = (error.hint if isinstance(error, ConfigError) else None) or ""
        return {"seen": False, "why": f"{why(error):.400}", "remedy": remedy}
    return {"seen": True, "why": "", "remedy": ""}
