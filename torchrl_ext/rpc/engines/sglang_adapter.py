"""LoRA adapters of an SGLang server, by messages to our plugin (`torchrl_ext.plugins.sglang.adapters`)."""

from __future__ import annotations

import json
from typing import ClassVar, final

from torchrl_ext.errors import EngineRefusedError
from torchrl_ext.messages import (
    CHANNEL,
    CheckAdapter,
    ListAdapters,
    Message,
    ServeAdapter,
    StageAdapter,
    UnloadAdapter,
)  # fmt: skip
from torchrl_ext.rpc.engines.adapters import AdapterClient
from torchrl_ext.rpc.engines.base import restated
from torchrl_ext.types import Info

__all__ = ["SGLangAdapter"]

_PLUGIN = (
    "install torchrl_ext in the engine's environment, or let `torchrl-ext serve sglang --lora-rank N` start the server"
)
_ENABLE = (
    "start the server with --enable-lora, --max-lora-rank and --lora-target-modules "
    "(`torchrl-ext serve sglang --lora-rank N`)"
)


@final
class SGLangAdapter(AdapterClient):
    """One adapter of an SGLang server; see `AdapterClient`."""

    kind: ClassVar[str] = "sglang"

    def _serving(self) -> int | None:
        return self._names(ListAdapters()).get(self.name, {}).get("version")

    def _check(self, info: Info) -> None:
        self._names(CheckAdapter.of(info))

    def _stage(self, version: int, path: str) -> None:
        self._names(StageAdapter(name=self.name, version=version, path=path))

    def _serve(self, version: int) -> None:
        self._names(ServeAdapter(name=self.name, version=version))

    def _drop(self) -> None:
        self._names(UnloadAdapter(name=self.name))

    def _names(self, message: Message) -> Info:
        """Ask our plugin; what every name stands for then."""
        body = {"action": CHANNEL + json.dumps(message.to_json())}
        try:
            told = self._http.post("/weights_checker", body, timeout_s=self._load_timeout_s)
            return json.loads(told["message"])["adapters"]
        except EngineRefusedError as error:
            if "LoRA is not enabled" in error.what:
                raise restated(error, error.what, hint=_ENABLE) from error
            if error.status in (404, 405) or "Unsupported action" in error.what:
                raise restated(error, error.what, expected="our plugin", hint=_PLUGIN) from error
            raise
        except (KeyError, TypeError, ValueError):
            raise EngineRefusedError(f"{self.url}/weights_checker answered {told!r}", hint=_PLUGIN) from None
