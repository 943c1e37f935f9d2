"""Messages to our plugin in an SGLang server: the ``action`` of ``/weights_checker``, and JSON back."""

from __future__ import annotations

import json
from typing import final

from torchrl_ext.errors import EngineRefusedError
from torchrl_ext.messages import CHANNEL, Inspect, Message, State, merged
from torchrl_ext.rpc.http import HTTPSession
from torchrl_ext.types import Info

__all__ = ["PLUGIN", "SGLangChannel", "is_absent"]

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
            return any("torchrl_ext" in answer for answer in self.tell(Inspect()))
        except EngineRefusedError as error:
            if is_absent(error):
                return False
            raise

    def state(self) -> Info:
        """``{"paused", "asleep", "empty"}`` (`torchrl_ext.plugins.sglang.worker`); nothing of it without a plugin."""
        try:
            return merged(self.tell(State()))
        except EngineRefusedError as error:
            if is_absent(error):
                return {}
            raise

    def tell(self, message: Message, timeout_s: float | None = None) -> list[Info]:
        """Send a message; returns the answer of each data-parallel rank.

        Raises:
            EngineRefusedError: the plugin says no, or is not there.
            EngineUnreachableError, DeadlineError: as they say.
        """
        body = {"action": CHANNEL + json.dumps(message.to_json())}
        told = self._http.post("/weights_checker", body, timeout_s=timeout_s)
        try:
            return [dict(json.loads(text)) for text in told["message"].split(" | ")]  # SGLang's own way to join them
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
            raise EngineRefusedError(f"{self._http.url}/weights_checker answered {told!r}", hint=PLUGIN) from None


def is_absent(error: EngineRefusedError) -> bool:
    """Whether the server has no plugin of ours."""
    return error.status in (404, 405, 501) or "Unsupported action" in error.what
