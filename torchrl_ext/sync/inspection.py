"""`inspect` answers the questions of `torchrl-ext doctor` about an engine worker's surroundings; no part of any update.

The question is an `Inspect` message, and the answer one JSON object:

=================  ==========================================================================================
field              in the answer
=================  ==========================================================================================
(any question)     ``torchrl_ext``, ``python``, ``torch`` (versions), ``host``, ``pid``, ``time`` (seconds since
                   1970), ``transports`` (names that this environment knows, and can import), ``devices``
                   (accelerators)
``root``           ``root``: ``{"seen", "why", "free_bytes", "probe"}``; the question's is `SharedRoot.invite`'s
                   info, and ``probe`` names a file that was written for `doctor` to find, or is null
``clear``          removes the probe that an earlier answer of this process named, and nothing else
``dial``           ``dial``: ``{"reached", "why"}``: whether ``[host, port]`` can be reached, and sends ``token`` there
``token``          what the listener at ``dial`` sends: 32 hexadecimal digits
=================  ==========================================================================================

It runs in the thread that generates. Only where something is wrong does it take longer than a moment, at most a few
seconds.

Whoever can reach the engine's port can ask. So an answer says nothing of files that are no probes, of roots that the
engine may not open (`torchrl_ext.stores.opening.admit`), or of ports that do not belong to `doctor`: these look alike,
whether somebody listens there or not, and take equally long.
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
from torchrl_ext.errors import ConfigError, StoreError, WeightSyncError
from torchrl_ext.messages import Inspect
from torchrl_ext.stores import open_store
from torchrl_ext.stores.opening import admit
from torchrl_ext.transports.shared_root import Invitation, SharedRoot
from torchrl_ext.types import Info

__all__ = ["followed", "inspect"]

_DIAL_S = 2.0
_WORDS = 400
_TOKEN = re.compile("[0-9a-f]{32}")
_written: set[tuple[str, str]] = set()
"""The root and the name of each probe that this process has written and not removed."""


def followed() -> list[str]:
    """Return the names of the transports that an engine here can follow: all that can be imported but ``memory``."""
    return [name for name in registry.transports.names() if name != "memory" and _importable(name)]


def inspect(question: Inspect) -> Info:
    """Answer ``question``; failures stand in the answer, and are not raised."""
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
    if question.clear is not None:
        _clear(question.clear)
    if question.dial is not None:
        answer["dial"] = _dial(question.dial, question.token)
    return answer


def _look(invitation: Info) -> Info:
    """Look for the probe of `doctor`, and write one that it can look for."""
    found: Info = {"seen": False, "why": "", "free_bytes": None, "probe": None}
    try:
        admit(invitation.get("root"))
        store = open_store(invitation["root"])
        Invitation.from_json(invitation, "the root to look at").find(store, Deadline(2.0))
        found["seen"] = True
        if "://" not in store.url:
            status = os.statvfs(store.url)
            found["free_bytes"] = status.f_bavail * status.f_frsize
    except (WeightSyncError, OSError) as error:
        found["why"] = _short(error.what if isinstance(error, WeightSyncError) else error)
        return found
    try:
        found["probe"] = SharedRoot(store, invitation["run_id"]).invite()["probe"]
        _written.add((store.url, found["probe"]))
    except (StoreError, OSError) as error:  # readers need not be able to write
        found["why"] = _short(error)
    return found


def _clear(named: Info) -> None:
    """Remove the probe that ``named`` names, if this process has written it."""
    for root, probe in [written for written in _written if written[1] == named.get("probe")]:
        with suppress(WeightSyncError, OSError):  # a later sweep of `doctor` removes it
            open_store(root).delete(probe)
        _written.discard((root, probe))


def _dial(address: list[Any], token: str | None) -> Info:
    """Return whether `doctor` can be reached; of a port that is not its own, the answer says nothing."""
    within = Deadline(_DIAL_S)
    if token is None or not _TOKEN.fullmatch(token):
        return {"reached": False, "why": "the question has no token"}
    with suppress(OSError, ValueError, TypeError, OverflowError):
        host, port = address
        with socket.create_connection((str(host), int(port)), timeout=within.left_s) as connection:
            sent = b""
            while len(sent) < len(token):
                connection.settimeout(max(0.01, within.left_s))
                chunk = connection.recv(len(token) - len(sent))
                if not chunk:
                    break
                sent += chunk
        if hmac.compare_digest(sent, token.encode()):
            return {"reached": True, "why": ""}
    within.stop.wait(within.left_s)
    return {"reached": False, "why": f"no answer of the trainer within {_DIAL_S:g} s"}


def _importable(transport: str) -> bool:
    try:
        registry.transports.load(transport)
    except ConfigError:
        return False
    return True


def _short(error: Any) -> str:
    text = str(error)
    return text if len(text) <= _WORDS else text[:_WORDS] + "..."
