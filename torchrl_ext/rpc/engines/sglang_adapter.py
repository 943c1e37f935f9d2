"""LoRA adapters of an SGLang server, by messages to our plugin (`torchrl_ext.plugins.sglang.adapters`)."""

from __future__ import annotations

import json
from typing import ClassVar, final

from torchrl_ext.errors import EngineRefusedError
from torchrl_ext.rpc.engines.adapters import AdapterClient
from torchrl_ext.rpc.engines.base import restated
from torchrl_ext.types import CHANNEL, Info

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
        return self._tell({"list": True}).get(self.name, {}).get("version")

    def _check(self, info: Info) -> None:
        self._tell({"check": info})

    def _stage(self, version: int, path: str) -> None:
        self._tell({"stage": self.name, "version": version, "path": path})

    def _serve(self, version: int) -> None:
        self._tell({"serve": self.name, "version": version})

    def _drop(self) -> None:
        self._tell({"unload": self.name})

    def _tell(self, question: Info) -> Info:
        """Ask our plugin; what every name stands for then."""
        body = {"action": CHANNEL + json.dumps({"adapters": question})}
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
