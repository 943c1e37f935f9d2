"""Messages to our plugin in an SGLang server: the ``action`` of ``/weights_checker``, and JSON back."""

from __future__ import annotations

import json
import threading
import time
from typing import final

from torchrl_ext.errors import DeadlineError, EngineRefusedError
from torchrl_ext.rpc.http import HTTPSession
from torchrl_ext.types import CHANNEL, Info, least

__all__ = ["LONGEST_S", "PLUGIN", "SHORTEST_S", "SGLangChannel"]

SHORTEST_S, LONGEST_S = 0.02, 1.0
"""Between two questions of one kind, in seconds."""

PLUGIN = (
    "install torchrl_ext in the engine's environment (it needs no trainer packages), or let `torchrl-ext serve sglang` "
    'start the server; without it, use the "disk" transport, which SGLang loads by itself'
)


@final
class SGLangChannel:
    """One server's plugin.

    Args:
        http: the server.
    """

    def __init__(self, http: HTTPSession) -> None:
        self._http = http

    def answers(self) -> bool:
        """Whether the server has our plugin."""
        try:
            return "torchrl_ext" in self.tell({"hello": True})
        except EngineRefusedError as error:
            if _is_absent(error):
                return False
            raise

    def rest(self) -> Info:
        """``{"paused", "asleep", "hollow"}`` (`torchrl_ext.plugins.sglang.worker`); nothing of it without a plugin that
        knows the question."""
        try:
            return self.tell({"rest": True})
        except EngineRefusedError as error:
            if _is_absent(error) or "knows no message" in error.what:
                return {}
            raise

    def tell(self, message: Info, timeout_s: float | None = None) -> Info:
        """Send a message; returns the answer, of data-parallel ranks together where there are several.

        Raises:
            EngineRefusedError: the plugin says no, or is not there.
            EngineUnreachableError, DeadlineError: as they say.
        """
        body = {"action": CHANNEL + json.dumps(message)}
        told = self._http.post("/weights_checker", body, timeout_s=timeout_s)
        try:
            answers = [dict(json.loads(text)) for text in told["message"].split(" | ")]  # SGLang's own way to join them
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
            raise EngineRefusedError(f"{self._http.url}/weights_checker answered {told!r}", hint=PLUGIN) from None
        merged: Info = {}
        for answer in answers:
            working = bool(merged.get("working") or answer.get("working"))
            flushed = bool(merged.get("flushed", True) and answer.get("flushed", True))
            both = [row for row in (merged, answer) if "proof" in row]
            proof = least(str(row["proof"]) for row in both)
            needed = {"needed": any(row.get("needed") for row in both), "proof": proof}
            merged = {**merged, **answer, "working": working, "flushed": flushed, **(needed if both else {})}
        return merged

    def await_idle(self, what: str, timeout_s: float) -> None:
        """Wait until the plugin is at work on nothing.

        Raises:
            EngineRefusedError: what it was at failed.
            DeadlineError: it takes longer than ``timeout_s`` seconds to ``what``.
        """
        until, pause_s = time.monotonic() + timeout_s, SHORTEST_S
        while self.tell({"poll": True})["working"]:
            if time.monotonic() > until:
                raise DeadlineError(f"to {what} takes {self._http.url} longer than {timeout_s:g} s")
            threading.Event().wait(pause_s)
            pause_s = min(LONGEST_S, 1.5 * pause_s)


def _is_absent(error: EngineRefusedError) -> bool:
    """Whether the server has no plugin of ours."""
    return error.status in (404, 405, 501) or "Unsupported action" in error.what
