"""Serve LoRA adapters by name and version, by routes beside vLLM's: each request keeps the version it began with.

=====================================  =========================================================================
``GET  /torchrl_ext/adapters``         ``{"adapters": {name: {"version", "path", "in_use"}}}``: what each name stands
                                       for, and the versions that requests still use
``POST /torchrl_ext/adapters``         a message: `CheckAdapter`, `StageAdapter`, `ServeAdapter` or `UnloadAdapter`
=====================================  =========================================================================

An answer that is no: ``{"error": "..."}`` with status 400, or 404 for a name that is not loaded.

Why not ``/v1/load_lora_adapter`` with ``load_inplace`` (vLLM 0.32). It leaves ``load_inplace`` set in the `LoRARequest`
that every later request carries, and `LRUCacheWorkerLoRAManager.add_adapter`, which runs before each step, then reads
the files again each time. Both versions have one ``lora_int_id``: a request that began under the older version, and
goes on beside newer ones, reloads the older files into the slot that all of them use. Without ``load_inplace`` a name
has to be unloaded first, and requests in between are refused. Here every version has an id of its own, and the name is
pointed at it in one step: a request is served by one version from its first token to its last. Cached keys and values
belong to a pair of `lora_name` and `lora_path` (`vllm.v1.core.kv_cache_utils`), and no two versions share it;
a path that is staged once more is spelt differently.

Responses name the version in their ``model``: a request for ``policy-lora`` is answered by ``policy-lora@7``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, final

from starlette.requests import Request
from starlette.responses import JSONResponse

from torchrl_ext.errors import ConfigError, NotConnectedError
from torchrl_ext.messages import CheckAdapter, read
from torchrl_ext.plugins.adapters import AdapterTable, NoAdapterError
from torchrl_ext.routes import ListAdapters
from torchrl_ext.types import Info
from torchrl_ext.weights.peft import adapter_version

__all__ = ["AdapterRoutes"]


@final
class AdapterRoutes(AdapterTable):
    """Answers the routes, and keeps what was staged last under each name."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._state: Any = None
        self._staged: dict[str, Any] = {}
        self._times: Counter[str] = Counter()  # how often a path was staged

    def init(self, engine_client: Any, state: Any) -> None:
        """Remember the engine, and the server's state."""
        self._engine, self._state = engine_client, state

    async def answer(self, request: Request) -> JSONResponse:
        """Do what the message in a request says, and answer the request; a GET asks what each name stands for."""
        try:
            message = ListAdapters() if request.method == "GET" else read(await request.json())
            return JSONResponse(await self.handle(message))
        except Exception as error:  # noqa: BLE001 - told to the caller, whatever it is
            status = 404 if isinstance(error, NoAdapterError) else 400
            return JSONResponse({"error": str(error) or type(error).__name__}, status_code=status)

    @property
    def served(self) -> dict[str, str]:
        return {name: request.lora_name for name, request in self._requests.items()}

    def row(self, name: str, label: str) -> Info:
        return {**super().row(name, label), "path": self._requests[name].lora_path, "in_use": self._in_use(name)}

    async def check(self, message: CheckAdapter) -> None:
        """Ask all workers, which look at the layers of their models."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info=message.to_json())
        await self._engine.init_weight_transfer_engine(request)

    async def stage(self, name: str, label: str, path: str) -> None:
        """Load a version under an id of its own."""
        from vllm.lora.peft_helper import PEFTHelper
        from vllm.lora.request import LoRARequest

        if self._models.is_base_model(name):
            raise ConfigError(f"{name!r} is the name of the base model here", hint="give the adapter another name")
        lora_config = self._engine.vllm_config.lora_config
        if lora_config is None:
            raise ConfigError("LoRA is not enabled", hint="start the server with --enable-lora")
        # refused here, since one worker of several that raises leaves later calls a reply behind
        PEFTHelper.from_local_dir(path, None).validate_legal(lora_config)
        number = self._models.lora_id_counter.inc(1)
        # a trainer may begin anew in an emptied root: another spelling keeps vLLM off what it cached of older files
        again = "/." * self._times[path]
        self._times[path] += 1
        request = LoRARequest(lora_name=label, lora_int_id=number, lora_path=path + again)
        if not await self._engine.add_lora(request):
            raise ConfigError(f"the workers did not take {path}")
        self._staged[name] = request

    def serve(self, name: str, label: str) -> Info:
        request = self._staged.pop(name, None)
        if request is None or request.lora_name != label:
            raise NotConnectedError(f"{label} is not staged", hint="load the adapter again")
        self._requests[name] = request
        return {"in_use": self._in_use(name)}

    async def unload(self, name: str) -> None:
        self._staged.pop(name, None)
        del self._requests[name]

    @property
    def _models(self) -> Any:
        return self._state.openai_serving_models

    @property
    def _requests(self) -> dict[str, Any]:
        """What vLLM looks names up in."""
        return self._models.lora_requests

    def _in_use(self, name: str) -> list[int]:
        """Return the versions of an adapter that requests of this server still use."""
        running = (state.lora_request for state in list(self._engine.output_processor.request_states.values()))
        labels = {request.lora_name for request in running if request is not None}
        versions = (adapter_version(label) for label in labels if label.rpartition("@")[0] == name)
        return sorted(version for version in versions if version is not None)
