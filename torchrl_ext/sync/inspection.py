"""What an engine's worker says of its surroundings when `torchrl-ext doctor` asks; no part of any update.

A question is one JSON object, an answer another one:

=================  ==========================================================================================
in the question    in the answer
=================  ==========================================================================================
anything           ``torchrl_ext``, ``python``, ``torch`` (versions), ``host``, ``pid``, ``time`` (seconds since
                   1970), ``transports`` (names whose modules can be imported), ``devices`` (accelerators)
``root``           ``root``: ``{"seen", "why", "free_bytes", "probe"}``; the question's is `SharedRoot.invite`'s
                   info, and ``probe`` names a file that was written for the asker to find, or is null
``clear``          removes the probe that an earlier answer named
``dial``           ``dial``: ``{"reached", "why"}``: whether a TCP connection to ``[host, port]`` can be made
=================  ==========================================================================================

It runs in the thread that generates. Only where something is wrong does it take longer than a moment, at most a few
seconds.
"""

from __future__ import annotations

import os
import platform
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import torch

import torchrl_ext
from torchrl_ext import registry
from torchrl_ext.errors import ConfigError, StoreError, WeightSyncError
from torchrl_ext.stores import open_store
from torchrl_ext.transports.shared_root import SharedRoot
from torchrl_ext.types import Info

__all__ = ["inspect"]

_DIAL_S = 2.0
_WORDS = 400
_PROBE = ".probe"


def inspect(question: Info) -> Info:
    """Answer ``question``. What goes wrong is told, not raised."""
    answer: Info = {
        "torchrl_ext": torchrl_ext.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
        "transports": [name for name in registry.transports.names() if name != "memory" and _importable(name)],
        "devices": torch.accelerator.device_count() if torch.accelerator.is_available() else 0,
    }
    if isinstance(question.get("root"), dict):
        answer["root"] = _look(question["root"])
    if isinstance(question.get("clear"), dict):
        _clear(question["clear"])
    if isinstance(question.get("dial"), list):
        answer["dial"] = _dial(*question["dial"])
    return answer


def _look(invitation: Info) -> Info:
    """Find the asker's probe, and leave one for the asker."""
    found: Info = {"seen": False, "why": "", "free_bytes": None, "probe": None}
    try:
        store = open_store(invitation["root"])
        shared = SharedRoot(store, invitation["run_id"])
        shared.find(invitation, timeout_s=2.0, aborted=threading.Event())
        found["seen"] = True
        if "://" not in store.url:
            status = os.statvfs(store.url)
            found["free_bytes"] = status.f_bavail * status.f_frsize
    except (WeightSyncError, OSError, KeyError) as error:
        found["why"] = _short(error.what if isinstance(error, WeightSyncError) else error)
        return found
    try:
        found["probe"] = shared.invite()["probe"]
    except (StoreError, OSError) as error:  # readers need not write
        found["why"] = _short(error)
    return found


def _clear(asked: Info) -> None:
    name = str(asked.get("probe"))
    if name.startswith(_PROBE) and "/" not in name:
        with suppress(WeightSyncError, OSError, KeyError):
            open_store(asked["root"]).delete(name)


def _dial(host: Any, port: Any) -> Info:
    try:
        socket.create_connection((str(host), int(port)), timeout=_DIAL_S).close()
    except (OSError, ValueError, OverflowError) as error:
        return {"reached": False, "why": _short(error)}
    return {"reached": True, "why": ""}


def _importable(transport: str) -> bool:
    try:
        registry.transports.load(transport)
    except ConfigError:
        return False
    return True


def _short(error: Any) -> str:
    text = str(error)
    return text if len(text) <= _WORDS else text[:_WORDS] + "..."
