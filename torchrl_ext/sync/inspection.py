"""`inspect` reports an engine worker's environment to `torchrl-ext doctor`.

It takes an `Inspect` message and returns one JSON object:

=================  ==========================================================================================
(always)           ``torchrl_ext``, ``python``, ``torch`` (versions), ``host``, ``pid``, ``time`` (seconds since
                   1970), ``transports`` (names that this environment can import), ``devices`` (number of
                   accelerators)
``root``           if the message has one: ``{"seen", "why", "remedy", "free_bytes", "probe"}``; ``remedy`` is empty
                   unless the engine does not open the root; ``probe`` names a file that the worker wrote for `doctor`
                   to find, or is null
``dial``           if the message has one: ``{"reached", "why"}``; whether the listener there sends its ``token``, 32
                   hexadecimal digits
=================  ==========================================================================================

It runs in the thread that generates. If something is wrong, it takes at most a few seconds.

Anyone who can reach the engine's port can send the message. So an answer reveals nothing about files other than probes,
roots that the engine may not open (`torchrl_ext.stores.opening.admit`), or ports other than `doctor`'s: open and closed
ports give the same answer after the same time.
"""

from __future__ import annotations

import hmac
import os
import platform
import re
import socket
import time
from contextlib import suppress
from typing import Any

import torch

import torchrl_ext
from torchrl_ext import registry
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, WeightSyncError, why
from torchrl_ext.messages import Inspect
from torchrl_ext.stores import open_store
from torchrl_ext.stores.opening import admit
from torchrl_ext.transports.shared_root import Invitation, SharedRoot
from torchrl_ext.types import Info

__all__ = ["followed", "inspect"]

_DIAL_S = 2.0
_TOKEN = re.compile("[0-9a-f]{32}")
_written: dict[str, SharedRoot] = {}
"""Probes that this process has written and not yet removed, by name."""


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
        "python": platform.python_version(),
        "torch": torch.__version__,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
        "transports": followed(),
        "devices": torch.accelerator.device_count() if torch.accelerator.is_available() else 0,
    }
    if question.root is not None:
        answer["root"] = _look(question.root)
    if question.clear is not None and (written := _written.pop(str(question.clear.get("probe")), None)):
        with suppress(OSError):  # a later sweep of `doctor` removes it
            written.clear()
    if question.dial is not None:
        answer["dial"] = _dial(question.dial, question.token)
    return answer


def _look(invitation: Info) -> Info:
    """Look for the probe of `doctor`, and write one for `doctor` to find."""
    found: Info = {"seen": False, "why": "", "remedy": "", "free_bytes": None, "probe": None}
    try:
        store = open_store(admit(invitation.get("root")))
        Invitation.from_json(invitation, "the root to look at").find(store, Deadline(2.0))
        found["seen"] = True
        if "://" not in store.url:
            status = os.statvfs(store.url)
            found["free_bytes"] = status.f_bavail * status.f_frsize
        shared = SharedRoot(store, invitation["run_id"])  # last, because readers need no write permission
        found["probe"] = shared.invite()["probe"]
        _written[found["probe"]] = shared
    except (WeightSyncError, OSError) as error:
        found["why"] = f"{why(error):.400}"
        found["remedy"] = (error.hint if isinstance(error, ConfigError) else None) or ""
    return found


def _dial(address: list[Any], token: str | None) -> Info:
    """Return whether `doctor` can be reached; the answer reveals nothing about other listeners."""
    within = Deadline(_DIAL_S)
    if token is None or not _TOKEN.fullmatch(token):
        return {"reached": False, "why": "the request has no token"}
    with suppress(OSError, ValueError, TypeError, OverflowError):
        host, port = address
        with socket.create_connection((str(host), int(port)), timeout=within.left_s) as connection:
            sent = b""
            while len(sent) < len(token):
                connection.settimeout(max(0.01, within.left_s))
                if not (chunk := connection.recv(len(token) - len(sent))):
                    break
                sent += chunk
        if hmac.compare_digest(sent, token.encode()):
            return {"reached": True, "why": ""}
    within.stop.wait(within.left_s)
    return {"reached": False, "why": f"the trainer did not answer within {_DIAL_S:g} s"}
