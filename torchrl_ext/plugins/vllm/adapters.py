"""LoRA adapters by name and version: routes beside vLLM's own, for a switch that no request can fall into.

=====================================  =========================================================================
``GET  /torchrl_ext/adapters``         ``{"adapters": {name: {"version", "path", "in_use"}}}``: what each name stands
                                       for, and the versions that requests are still at work with
``POST /torchrl_ext/adapters/check``   ``{"info": {...}}``: could such an adapter be loaded? (all workers are asked)
``POST /torchrl_ext/adapters/stage``   ``{"name", "version", "path"}``: load it; nobody is served with it yet
``POST /torchrl_ext/adapters/serve``   ``{"name", "version"}``: from now on ``name`` stands for what was staged
``POST /torchrl_ext/adapters/unload``  ``{"name"}``: from now on requests by that name are refused
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
from collections.abc import Awaitable, Callable
from typing import Any, final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from torchrl_ext.errors import ConfigError, NotConnectedError
from torchrl_ext.stores.opening import admit
from torchrl_ext.types import ADAPTERS_ROUTE, Info, adapter_label, adapter_version

__all__ = ["AdapterRoutes"]


@final
class AdapterRoutes:
    """The routes, and what was staged last under each name."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._state: Any = None
        self._staged: dict[str, LoRARequest] = {}
        self._times: Counter[str] = Counter()  # that a path was staged

    def attach(self, router: APIRouter) -> None:
        """Add the routes."""
        router.add_api_route(ADAPTERS_ROUTE, self.told, methods=["GET"])
        for what in (self.check, self.stage, self.serve, self.unload):
            router.add_api_route(f"{ADAPTERS_ROUTE}/{what.__name__}", _answering(what), methods=["POST"])

    def init(self, engine_client: Any, state: Any) -> None:
        """Remember the engine, and the server's state."""
        self._engine, self._state = engine_client, state

    async def told(self) -> JSONResponse:
        """What each name stands for."""
        rows = {
            name: {
                "version": adapter_version(request.lora_name),
                "path": request.lora_path,
                "in_use": self._in_use(name),
            }
            for name, request in self._served.items()
        }
        return JSONResponse({"adapters": rows})

    async def check(self, body: Info) -> Info:
        """Ask every worker whether such an adapter could be loaded."""
        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"adapter": body["info"]}))
        return {}

    async def stage(self, body: Info) -> Info:
        """Load a version under an id of its own."""
        name, version, path = body["name"], int(body["version"]), body["path"]
        if self._models.is_base_model(name):
            raise ConfigError(f"{name!r} is what the base model is called here", hint="call the adapter something else")
        lora_config = self._engine.vllm_config.lora_config
        if lora_config is None:
            raise ConfigError("LoRA is not enabled", hint="start the server with --enable-lora")
        admit(path)
        # refused here, since a worker that raises leaves later calls a reply behind where there are several
        PEFTHelper.from_local_dir(path, None).validate_legal(lora_config)
        number = self._models.lora_id_counter.inc(1)
        again = (
            "/." * self._times[path]
        )  # a trainer began anew in an emptied root: what is cached is not of these files
        self._times[path] += 1
        request = LoRARequest(lora_name=adapter_label(name, version), lora_int_id=number, lora_path=path + again)
        if not await self._engine.add_lora(request):
            raise ConfigError(f"the workers did not take {path}")
        self._staged[name] = request
        return {}

    async def serve(self, body: Info) -> Info:
        """Point the name at what was staged."""
        name, label = body["name"], adapter_label(body["name"], int(body["version"]))
        request = self._staged.pop(name, None)
        if request is None or request.lora_name != label:
            raise NotConnectedError(f"{label} is not staged", hint="load the adapter again")
        self._served[name] = request
        return {"in_use": self._in_use(name)}

    async def unload(self, body: Info) -> Info:
        """Forget a name. Requests that run end with what they began with."""
        self._staged.pop(body["name"], None)
        if self._served.pop(body["name"], None) is None:
            raise _NotLoaded(f"no adapter {body['name']!r} is loaded; there are: {', '.join(self._served) or 'none'}")
        return {}

    @property
    def _models(self) -> Any:
        return self._state.openai_serving_models

    @property
    def _served(self) -> dict[str, LoRARequest]:
        return self._models.lora_requests

    def _in_use(self, name: str) -> list[int]:
        """Versions that requests of this server are at work with."""
        running = (state.lora_request for state in list(self._engine.output_processor.request_states.values()))
        labels = {request.lora_name for request in running if request is not None}
        versions = (adapter_version(label) for label in labels if label.rpartition("@")[0] == name)
        return sorted(version for version in versions if version is not None)


class _NotLoaded(Exception):
    """There is no adapter of that name."""


def _answering(call: Callable[[Info], Awaitable[Info]]) -> Callable[[Request], Awaitable[JSONResponse]]:
    async def route(request: Request) -> JSONResponse:
        try:
            return JSONResponse(await call(await request.json()))
        except _NotLoaded as error:
            return JSONResponse({"error": str(error)}, status_code=404)
        except Exception as error:  # noqa: BLE001 - told to the caller, whatever it is
            return JSONResponse({"error": str(error) or type(error).__name__}, status_code=400)

    return route
