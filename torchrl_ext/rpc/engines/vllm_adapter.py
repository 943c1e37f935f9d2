"""LoRA adapters of a vLLM server, by the routes that our plugin adds (`torchrl_ext.plugins.vllm.adapters`)."""

from __future__ import annotations

from typing import Any, ClassVar, final

from torchrl_ext.errors import EngineRefusedError
from torchrl_ext.messages import ADAPTERS_ROUTE, CheckAdapter, Message, ServeAdapter, StageAdapter, UnloadAdapter
from torchrl_ext.rpc.client import EngineClient
from torchrl_ext.rpc.engines.adapters import AdapterClient
from torchrl_ext.rpc.engines.base import restated
from torchrl_ext.rpc.engines.worker_words import unwrapped
from torchrl_ext.types import Info

__all__ = ["VLLMAdapter"]

_PLUGIN = (
    "install torchrl_ext in the engine's environment and name it in VLLM_PLUGINS, or let "
    "`torchrl-ext serve vllm --lora-rank N` start the server"
)
_ENABLE = "start the server with --enable-lora (`torchrl-ext serve vllm --lora-rank N`)"


@final
class VLLMAdapter(AdapterClient):
    """One adapter of a vLLM server; see `AdapterClient`."""

    kind: ClassVar[str] = "vllm"

    def __init__(self, engine: EngineClient, name: str, **settings: Any) -> None:
        super().__init__(engine, name, **settings)
        self._in_use: list[int] = []

    def oldest(self, version: int) -> int:
        """Requests read the files of the version that they began with where vLLM had to drop it meanwhile."""
        before = version if self._before is None else self._before
        return min([version, before, *self._in_use])

    def _serving(self) -> int | None:
        with _explaining():
            told = self._http.get(ADAPTERS_ROUTE)
        return told["adapters"].get(self.name, {}).get("version")

    def _check(self, info: Info) -> None:
        self._post(CheckAdapter.of(info))

    def _stage(self, version: int, path: str) -> None:
        self._post(StageAdapter(name=self.name, version=version, path=path))

    def _serve(self, version: int) -> None:
        self._in_use = self._post(ServeAdapter(name=self.name, version=version))["in_use"]

    def _drop(self) -> None:
        self._post(UnloadAdapter(name=self.name))

    def _post(self, message: Message) -> Any:
        with _explaining():
            return self._http.post(ADAPTERS_ROUTE, message.to_json(), timeout_s=self._load_timeout_s)


class _explaining:
    """The engine's refusals in words that help."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, EngineRefusedError):
            return
        hint = error.hint
        if "LoRA is not enabled" in error.what:
            hint = _ENABLE
        elif error.status in (404, 405) and "is loaded; there are" not in error.what:
            raise restated(error, error.what, expected="the routes of our plugin", hint=_PLUGIN) from error
        raise restated(error, unwrapped(error.what), hint=hint) from error
