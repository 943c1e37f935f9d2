"""Entry point of group ``vllm.endpoint_plugins``: ``/update_weights_from_disk``
(`torchrl_ext.engines.update_from_disk`).

In vLLM's development mode ``GET /is_sleeping`` also answers ``is_paused``, ``tags`` that sleep, ``dropped``, ``empty``
and ``whole``, so that a trainer learns in one request what it has to know before it pauses the engine, or lets it
serve.

vLLM loads the plugin only where ``VLLM_PLUGINS`` names it (`torchrl_ext`, the name of our general plugin too). A delta
needs a server with ``--weight-transfer-config '{"backend": "torchrl_ext"}'``, which the route drives without a trainer
process; a checkpoint directory is loaded whole, beside any backend or none.

Where the server has an API key, ``/update_weights_from_disk`` wants it too; vLLM's own check knows only the prefixes
of its own (`vllm.entrypoints.serve.middleware.authenticate`). Web pages may not call it
(`torchrl_ext.base.routes.Guard`).
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import os
import re
from contextlib import suppress
from typing import Any, ClassVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, request_response

from torchrl_ext.base.deadline import in_thread
from torchrl_ext.base.messages import Finish, Reset, State
from torchrl_ext.base.routes import BACKEND, Guard
from torchrl_ext.base.types import Info
from torchrl_ext.engines.update_from_disk import PATH, DiskLoads, handler
from torchrl_ext.sync.local.module import VLLMObjectPort

__all__ = ["UpdateFromDisk"]


_STATE = "/is_sleeping"
_GAUGE = re.compile(r'^vllm:engine_sleep_state\{[^}\n]*sleep_state="(\w+)"[^}\n]*\}\s+([0-9.e+]+)', re.MULTILINE)
_FILES_S = 7200.0  # a large model is read


class UpdateFromDisk:
    """Adds the routes to a vLLM server, in the form of vLLM's `EndpointPlugin`."""

    name: ClassVar[str] = "torchrl_ext"
    required_tasks: ClassVar[tuple[str, ...]] = ("generate",)

    def __init__(self) -> None:
        self._engine: Any = None
        self._keys: list[str] = []

    def attach_router(self, app: Starlette) -> None:
        """Add the routes to the application, before its own."""
        load = handler(lambda body: self._loads.load(body), Request.json)
        routes = [Route(PATH, Guard(request_response(load), self._keys), methods=["POST"])]
        if any(getattr(route, "path", None) == _STATE for route in app.routes):
            routes.append(Route(_STATE, self.state, methods=["GET"]))
        app.router.routes[:0] = routes

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Remember the engine, and the checkpoint that it was started with."""
        self._engine = _Reloadable(engine_client, args.model, asyncio.get_running_loop())
        self._loads = DiskLoads(self._engine)
        self._keys += [key for key in (args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]  # as vLLM finds them

    async def state(self, request: Request) -> JSONResponse:
        """Answer one call of ``/is_sleeping``."""
        return JSONResponse(await asyncio.wrap_future(in_thread(self._engine.report, "torchrl_ext")))


class _Reloadable(VLLMObjectPort):
    """The engine behind the route, driven from threads beside the server's loop."""

    def __init__(self, engine: Any, model: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(engine, pause_mode="keep", loop=loop)
        self.model = model
        transfer = self._config.weight_transfer_config
        self._made_with_ours = transfer is not None and transfer.backend == BACKEND

    def paused(self) -> bool:
        return bool(super().paused())

    def report(self) -> Info:
        """Return the engine's state for `torchrl_ext.control.makes.vllm`; what workers of another backend hold is left
        out."""
        sleeps = bool(self._do(self._llm.is_sleeping))
        gauge = _asleep(_metrics()) if sleeps else {}
        workers = self.handle(State()) if self._made_with_ours else {}
        return {
            "is_sleeping": sleeps,
            "is_paused": self.paused(),
            "tags": gauge.get("tags", []),
            "dropped": gauge.get("dropped", False),
            **{name: workers[name] for name in ("empty", "whole") if name in workers},
        }

    def finish(self, message: Finish, label: str | None) -> None:
        self.call(message)
        self._label(label)

    def reload(self, path: str, label: str | None) -> None:
        patient = copy.copy(self)
        patient.timeout_s = _FILES_S
        patient._workers("reload_weights", weights_path=path)
        if self._made_with_ours:
            self.handle(Reset(weights="reloaded"))
        self._label(label)

    def undo(self, landing: bool) -> bool:
        if not landing:
            with suppress(Exception):  # the engine is gone
                self.cancel()
        return not landing  # nobody can tell what workers hold then

    def _label(self, label: str | None) -> None:
        if label is not None:
            self._done(self._llm.update_weight_version(label))


def _metrics() -> str:
    """Return what the server answers to ``GET /metrics``."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    exposition = importlib.import_module("prometheus_client")  # by name: it comes with vLLM
    return str(exposition.generate_latest(get_prometheus_registry()).decode())


def _asleep(metrics: str) -> Info:
    """Return the ``tags`` that sleep in a paused vLLM, and whether its weights were ``dropped``, from its metrics.

    The gauge does not distinguish sleep level 0 from an engine in which only the cache sleeps.
    """
    rows = _GAUGE.findall(metrics)
    found = {state for state, value in rows if float(value) > 0}
    if not rows or "awake" in found:
        return {}
    if found & {"weights_offloaded", "discard_all"}:
        return {"tags": ["kv_cache", "weights"], "dropped": "discard_all" in found}
    return {"tags": ["kv_cache"]}
