"""Entry point of group ``vllm.endpoint_plugins``: ``POST /update_weights_from_disk``, as slime's trainers call it.

The routes of `torchrl_ext.plugins.vllm.adapters` come with it.

vLLM loads the plugin only where ``VLLM_PLUGINS`` names it (`torchrl_ext`, the name of our general plugin too). The
server needs ``--weight-transfer-config '{"backend": "torchrl_ext"}'``: the route drives that backend, no other trainer
process is involved.

Request: ``{"model_path", "load_format", "weight_version", "files", "flush_cache", "abort_all_requests"}``, of which
only the first is needed. With load format ``"delta"``, ``model_path`` is a version directory ``weight_v000007`` or the
root that holds it (then the newest version is taken): the version is fetched, verified and staged while the engine
serves, and committed in a short pause. Without, it is a checkpoint directory, loaded whole.

Where the server has an API key, this route and those of adapters want it too; vLLM's own check knows only the prefixes
of its own (`vllm.entrypoints.serve.middleware.authenticate`).

Answer: ``{"success": bool, "message": str, "num_paused_requests": 0}``, with status 400 where ``success`` is false. The
message says whether the engine serves what it served, or is paused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

from torchrl_ext.errors import ConfigError, DeadlineError, StoreError, WeightSyncError
from torchrl_ext.messages import Join, Load, Message, Poll, Prefetch, Reset, Seal, answers_in, merged
from torchrl_ext.messages.routes import bears_key
from torchrl_ext.plugins.roots import locate, parameters
from torchrl_ext.plugins.vllm.adapters import AdapterRoutes
from torchrl_ext.plugins.vllm.caches import drop_cached
from torchrl_ext.stores import open_store
from torchrl_ext.stores.opening import admit
from torchrl_ext.transports.shared_root import SharedRoot

__all__ = ["UpdateFromDisk"]

log = logging.getLogger("torchrl_ext")

ROUTE = "/update_weights_from_disk"
_STAGING_S = 600.0
_LONGEST_S = 0.5  # between two questions whether staging is over


class UpdateFromDisk:
    """The plugin, as vLLM's `EndpointPlugin` wants it."""

    name: ClassVar[str] = "torchrl_ext"
    required_tasks: ClassVar[tuple[str, ...]] = ("generate",)

    def __init__(self) -> None:
        self._engine: Any = None
        self._model = ""
        self._joined: tuple[str, Any] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._adapters = AdapterRoutes()
        self._keys: list[str] = []

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        guarded = APIRouter(dependencies=[Depends(self.require_key)])
        self._adapters.attach(guarded)
        guarded.add_api_route(ROUTE, self.update, methods=["POST"])
        app.include_router(guarded)

    async def require_key(self, request: Request) -> None:
        """Refuse who has not the server's key, where it has one."""
        if not bears_key(request.headers.get("authorization"), self._keys):
            raise HTTPException(401, "this route wants the server's API key")

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Remember the engine, and the checkpoint that it was started with."""
        self._adapters.init(engine_client, state)
        self._engine, self._model = engine_client, args.model
        self._keys = [key for key in (args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]  # as vLLM finds them

    async def update(self, request: Request) -> JSONResponse:
        """Serve one call."""
        try:
            body = await request.json()
            if not isinstance(body, Mapping) or not isinstance(body.get("model_path"), str):
                raise ConfigError("the body names no model_path", expected='{"model_path": "...", ...}')
            async with self._one_at_a_time:
                message = await self._update(body)
        except Exception as error:  # noqa: BLE001 - told to the caller, whatever it is
            return _answer(False, str(error) if isinstance(error, WeightSyncError) else f"{error or type(error)}")
        return _answer(True, message)

    async def _update(self, body: Mapping[str, Any]) -> str:
        load_format = body.get("load_format")
        if load_format not in (None, "auto", "safetensors", "delta"):
            raise ConfigError(f"there is no load_format {load_format!r}", expected='"delta", "auto" or null')
        label = body.get("weight_version")
        if load_format == "delta":
            return await self._land(body["model_path"], None if label is None else str(label), body.get("files"))
        return await self._reload(body["model_path"], None if label is None else str(label))

    async def _land(self, path: str, label: str | None, files: Any) -> str:
        root, version = await asyncio.to_thread(locate, path)
        params = await asyncio.to_thread(parameters, root, version, self._model, files)
        target = (root, params)
        known = self._joined == target
        if not known:
            await self._join(root, params)
        try:
            await self._stage(version)
        except Exception:
            self._joined = None
            if not known:
                raise
            await self._join(root, params)  # a trainer had the workers join something else meanwhile
            await self._stage(version)
        self._joined = target
        await self._commit(Load(version=version, handoff={"params": params}), label or str(version))
        return f"version {version} of {root} is in service"

    async def _join(self, root: str, params: list[Any]) -> None:
        probe = SharedRoot(open_store(root), f"reader-{os.getpid()}")
        base = self._model if os.path.isdir(self._model) else None
        try:
            info = {"transport": "delta", "base": base, "needs_base": False, "params": params}
            await self._begin(Join.of({**info, **await asyncio.to_thread(probe.invite)}), f"join {root}")
        finally:
            await asyncio.to_thread(probe.clear)

    async def _stage(self, version: int) -> None:
        await self._begin(Prefetch(version=version), f"stage version {version}")

    async def _begin(self, message: Message, what: str) -> None:
        """Let the workers begin something, and wait until it is over."""
        until, pause_s = time.monotonic() + _STAGING_S, 0.01
        await self._init(message)
        while True:
            try:
                return await self._init(Poll())
            except Exception as error:
                if not merged(answers_in(str(error))).get("working"):
                    raise
            if time.monotonic() > until:
                raise DeadlineError(f"to {what} takes longer than {_STAGING_S:g} s")
            pause_s = min(_LONGEST_S, 1.5 * pause_s)
            await asyncio.sleep(pause_s)

    async def _commit(self, message: Load, label: str) -> None:
        engine, version = self._engine, message.version
        served = await self._pause()
        try:
            await engine.start_weight_update()
        except Exception as error:
            self._joined = None
            raise StoreError(f"version {version} was not begun: {error}", state=await self._undone(served)) from error
        held = "part of an update"
        try:
            for step in (message, Seal()):
                await engine.update_weights(WeightTransferUpdateRequest(update_info=step.to_json()))
            await engine.finish_weight_update(label)
            held = f"version {version}, and what was cached of older weights"
            await drop_cached(engine)
        except Exception as error:
            self._joined = None
            raise StoreError(
                f"version {version} did not land: {error}",
                state=f"the engine is paused, and holds {held}",
                hint="send a full version; the next good update resumes it",
            ) from error
        await engine.resume_generation()

    async def _pause(self) -> bool:
        """Pause; returns whether the engine served before."""
        served = not await self._engine.is_paused()
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        return served

    async def _undone(self, served: bool) -> str:
        """No weight was changed: an engine that served before serves again. Returns what holds then."""
        try:
            await self._engine.finish_weight_update()  # on workers that had begun
        except Exception:  # the others have nothing to end, and say so
            log.debug("an update that was not begun everywhere is ended", exc_info=True)
        if not served:
            return "the engine is paused, and holds what it held before"
        await self._engine.resume_generation()
        paused = await self._engine.is_paused()
        return "the engine is paused: it did not resume" if paused else "the engine serves what it served"

    async def _reload(self, path: str, label: str | None) -> str:
        admit(path)
        folder = Path(path)
        if not folder.is_dir() or not any(folder.glob("*.safetensors")):
            raise StoreError(f"{path} is no checkpoint directory", state="the engine serves what it served")
        await self._pause()
        self._joined = None
        held = "part of an update"
        try:
            await self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder.absolute())})
            await self._init(Reset(weights="reloaded"))
            if label is not None:
                await self._engine.update_weight_version(label)
            held = "these weights, and what was cached of older ones"
            await drop_cached(self._engine)
        except Exception as error:
            raise StoreError(
                f"{path} did not land: {error}",
                state=f"the engine is paused, and holds {held}",
                hint="send it again; the next good update resumes the engine",
            ) from error
        await self._engine.resume_generation()
        return f"{path} is in service"

    async def _init(self, message: Message) -> None:
        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=message.to_json()))


def _answer(success: bool, message: str) -> JSONResponse:
    status = 200 if success else 400
    return JSONResponse({"success": success, "message": message, "num_paused_requests": 0}, status_code=status)
