"""Entry point of group ``vllm.endpoint_plugins``: ``/update_weights_from_disk`` and ``/pull_weights``.

The routes of `torchrl_ext.plugins.vllm.adapters` come with it. In vLLM's development mode
``GET /is_sleeping`` also answers ``is_paused``, ``tags`` that sleep, ``dropped``, ``empty`` and ``whole``, so that a
trainer learns in one request what it has to know before it pauses the engine, or lets it serve.

vLLM loads the plugin only where ``VLLM_PLUGINS`` names it (`torchrl_ext`, the name of our general plugin too).

``POST /update_weights_from_disk`` takes ``{"model_path", "load_format", "weight_version", "files", "flush_cache",
"abort_all_requests"}``, of which only the first is needed. With load format ``"delta"``, ``model_path`` is a version
directory ``weight_v000007`` or the root that holds it (then the newest version is taken): the version is fetched,
verified and staged while the engine serves, and committed in a short pause. The server needs
``--weight-transfer-config '{"backend": "torchrl_ext"}'`` for it: the route drives that backend, no other trainer
process is involved. Without, it is a checkpoint directory, loaded whole, beside any backend or none.

``POST /pull_weights`` with ``{"local_checkpoint_dir", "source_dir", "target_version"}`` brings a checkpoint directory
on each worker's host to a version while the engine serves; nothing is loaded.

Where the server has an API key, these routes and those of adapters want it too; vLLM's own check knows only the
prefixes of its own (`vllm.entrypoints.serve.middleware.authenticate`).

Answer: ``{"success": bool, "message": str, "num_paused_requests": 0}``, with status 400 where ``success`` is false. The
message says whether the engine serves what it served, or is paused.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from torchrl_ext.deadline import in_thread
from torchrl_ext.errors import ConfigError, WeightSyncError
from torchrl_ext.messages import Finish, Pull, Reset, State
from torchrl_ext.plugins.vllm.adapters import AdapterRoutes
from torchrl_ext.plugins.vllm.internals import internals
from torchrl_ext.routes import BACKEND, asleep_by, bears_key
from torchrl_ext.rpc.port import EngineState
from torchrl_ext.sync.engines.local import VLLMObjectPort
from torchrl_ext.sync.published import DiskLoads
from torchrl_ext.types import Info

__all__ = ["UpdateFromDisk"]

log = logging.getLogger("torchrl_ext")

ROUTE = "/update_weights_from_disk"
PULL = "/pull_weights"
STATE = "/is_sleeping"
_STEP_S = 600.0
_FILES_S = 7200.0  # a large model is read, or copied to the host first


class UpdateFromDisk:
    """Adds the routes to a vLLM server, in the form of vLLM's `EndpointPlugin`."""

    name: ClassVar[str] = "torchrl_ext"
    required_tasks: ClassVar[tuple[str, ...]] = ("generate",)

    def __init__(self) -> None:
        self._loads: Any = None
        self._reloadable: Any = None
        self._files: Any = None
        self._adapters = AdapterRoutes()
        self._keys: list[str] = []

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes to the application, all of them behind `require_key`."""
        guarded = APIRouter(dependencies=[Depends(self.require_key)])
        self._adapters.attach(guarded)
        guarded.add_api_route(ROUTE, self.update, methods=["POST"])
        guarded.add_api_route(PULL, self.pull, methods=["POST"])
        app.include_router(guarded)
        if any(getattr(route, "path", None) == STATE for route in app.routes):  # ours goes first, and says more
            app.router.routes.insert(0, APIRoute(STATE, self.state, methods=["GET"]))

    async def state(self) -> JSONResponse:
        """Answer one call of ``/is_sleeping``."""
        return JSONResponse(await asyncio.wrap_future(in_thread(self._reloadable.report, "torchrl_ext")))

    async def require_key(self, request: Request) -> None:
        """Refuse a request without the server's key, where it has one, with status 401."""
        if not bears_key(request.headers.get("authorization"), self._keys):
            raise HTTPException(401, "this route wants the server's API key")

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Remember the engine, and the checkpoint that it was started with."""
        self._adapters.init(engine_client, state)
        served: dict[str, Any] = {"pause_mode": "keep", "loop": asyncio.get_running_loop()}
        self._files = _Files(engine_client, **served)
        self._reloadable = _Reloadable(engine_client, files=self._files, model=args.model, **served)
        self._files.timeout_s, self._reloadable.timeout_s = _FILES_S, _STEP_S
        self._loads = DiskLoads(self._reloadable)
        self._keys = [key for key in (args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]  # as vLLM finds them

    async def update(self, request: Request) -> JSONResponse:
        """Answer one call of ``/update_weights_from_disk``."""
        return await _answered(request, self._update)

    async def pull(self, request: Request) -> JSONResponse:
        """Answer one call of ``/pull_weights``, beside loads of other calls."""
        return await _answered(request, self._pull)

    def _update(self, body: Mapping[str, Any]) -> str:
        label = body.get("weight_version")
        label = None if label is None else str(label)
        return str(self._loads.load(body.get("model_path"), body.get("load_format"), label, body.get("files")))

    def _pull(self, body: Mapping[str, Any]) -> str:
        self._files.pull(Pull.of(body))
        return "Success."


class _Files(VLLMObjectPort):
    """The engine for what takes as long as reading a model's files."""

    @property
    def made_with_ours(self) -> bool:
        """Whether the server was started with our backend."""
        transfer = self._config.weight_transfer_config
        return transfer is not None and transfer.backend == BACKEND

    def pull(self, message: Pull) -> None:
        """Bring a checkpoint on each worker's host to a version."""
        if self.made_with_ours:
            self.handle(message)
            return
        # in the workers' loop: nothing is generated meanwhile
        told = {"local_checkpoint_dir": message.directory, "source_dir": message.source}
        self._workers("pull_weights", **told, target_version=message.version)

    def reload(self, path: str) -> None:
        """Have vLLM load a checkpoint directory."""
        self._workers("reload_weights", weights_path=path)


class _Reloadable(VLLMObjectPort):
    """The engine as `DiskLoads` drives it, from a thread beside the server's loop."""

    def __init__(self, engine: Any, *, files: _Files, model: str, **settings: Any) -> None:
        super().__init__(engine, **settings)
        self._files, self.model = files, model

    def paused(self) -> bool:
        return bool(super().paused())

    def report(self) -> Info:
        """Return the engine's state for `torchrl_ext.rpc.makes.vllm`; what workers of another backend hold is left
        out."""
        sleeps = bool(self._do(self._llm.is_sleeping))
        try:
            gauge = asleep_by(_metrics()) if sleeps else {}
        except Exception:  # whatever another release raises: the trainer asks for the metrics itself
            log.debug("this vLLM's metrics cannot be read here", exc_info=True)
            return {"is_sleeping": sleeps}
        workers = self.handle(State()) if self._files.made_with_ours else {}
        return {
            "is_sleeping": sleeps,
            "is_paused": self.paused(),
            "tags": sorted(gauge.get("asleep", ())),
            "dropped": gauge.get("dropped", False),
            **{name: workers[name] for name in ("empty", "whole") if name in workers},
        }

    def pause(self) -> None:
        self.hold(EngineState(paused=None))

    def resume(self) -> None:
        self.release()

    def label(self) -> str | None:
        found: str | None = self._done(self._llm.get_weight_version())
        return found

    def finish(self, message: Finish, label: str | None) -> None:
        self.handle(message)
        self._name(label)
        self.drop_cached()

    def reload(self, path: str, label: str | None) -> None:
        self._files.reload(path)
        if self._files.made_with_ours:
            self.handle(Reset(weights="reloaded"))
        self._name(label)
        self.drop_cached()

    def undo(self, landing: bool) -> bool:
        if not landing:
            with suppress(Exception):  # the engine is gone
                self.abandon()
        return not landing  # nobody can tell what workers hold then

    def _name(self, label: str | None) -> None:
        if label is not None:
            self._done(self._llm.update_weight_version(label))


def _metrics() -> str:
    """Return what the server answers to ``GET /metrics``."""
    exposition = importlib.import_module("prometheus_client")  # by name: it comes with vLLM
    return str(exposition.generate_latest(internals.get_prometheus_registry()).decode())


async def _answered(request: Request, call: Callable[[Mapping[str, Any]], str]) -> JSONResponse:
    """Answer a request by a call in a thread of its own, whose waits have deadlines; it ends whoever hangs up."""
    try:
        body = await request.json()
        if not isinstance(body, Mapping):
            raise ConfigError(f"the body is {body!r:.200}", expected="an object")
        return _answer(True, await asyncio.wrap_future(in_thread(lambda: call(body), "torchrl_ext")))
    except Exception as error:  # noqa: BLE001 - told to the caller, whatever it is
        return _answer(False, str(error) if isinstance(error, WeightSyncError) else f"{error or type(error)}")


def _answer(success: bool, message: str) -> JSONResponse:
    status = 200 if success else 400
    return JSONResponse({"success": success, "message": message, "num_paused_requests": 0}, status_code=status)
