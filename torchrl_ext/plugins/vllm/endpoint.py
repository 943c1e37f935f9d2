"""Entry point of group ``vllm.endpoint_plugins``: slime's ``/update_weights_from_disk`` and ``/pull_weights``.

The routes of `torchrl_ext.plugins.vllm.adapters` come with it.

vLLM loads the plugin only where ``VLLM_PLUGINS`` names it (`torchrl_ext`, the name of our general plugin too).

``POST /update_weights_from_disk`` takes ``{"model_path", "load_format", "weight_version", "files", "flush_cache",
"abort_all_requests"}``, of which only the first is needed. With load format ``"delta"``, ``model_path`` is a version
directory ``weight_v000007`` or the root that holds it (then the newest version is taken): the version is fetched,
verified and staged while the engine serves, and committed in a short pause. The server needs
``--weight-transfer-config '{"backend": "torchrl_ext"}'`` for it: the route drives that backend, no other trainer
process is involved. Without, it is a checkpoint directory, loaded whole, beside any backend or none.

``POST /pull_weights`` with ``{"local_checkpoint_dir", "source_dir", "target_version"}`` brings a checkpoint directory
on each worker's host to a version (`torchrl_ext.versions.local_checkpoint`) while the engine serves; nothing is loaded.

Where the server has an API key, these routes and those of adapters want it too; vLLM's own check knows only the
prefixes of its own (`vllm.entrypoints.serve.middleware.authenticate`).

Answer: ``{"success": bool, "message": str, "num_paused_requests": 0}``, with status 400 where ``success`` is false. The
message says whether the engine serves what it served, or is paused.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse

from torchrl_ext.errors import ConfigError, StoreError, WeightSyncError
from torchrl_ext.messages import BACKEND, Finish, Load, Message, Prefetch, Pull, Reset, Start
from torchrl_ext.messages.routes import bears_key
from torchrl_ext.plugins.vllm.adapters import AdapterRoutes
from torchrl_ext.stores.opening import admit
from torchrl_ext.sync.engines.hosts import VLLMHost
from torchrl_ext.sync.roots import invited, locate, parameters, part

__all__ = ["UpdateFromDisk"]

log = logging.getLogger("torchrl_ext")

ROUTE = "/update_weights_from_disk"
PULL = "/pull_weights"
_STEP_S = 600.0
_PULL_S = 7200.0  # a large model may be copied to the host first


class UpdateFromDisk:
    """Adds the routes to a vLLM server, in the form of vLLM's `EndpointPlugin`."""

    name: ClassVar[str] = "torchrl_ext"
    required_tasks: ClassVar[tuple[str, ...]] = ("generate",)

    def __init__(self) -> None:
        self._engine: Any = None
        self._host: Any = None
        self._puller: Any = None
        self._ours = self._stuck = False
        self._model = ""
        self._joined: tuple[str, Any] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._adapters = AdapterRoutes()
        self._keys: list[str] = []

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes to the application, all of them behind `require_key`."""
        guarded = APIRouter(dependencies=[Depends(self.require_key)])
        self._adapters.attach(guarded)
        guarded.add_api_route(ROUTE, self.update, methods=["POST"])
        guarded.add_api_route(PULL, self.pull, methods=["POST"])
        app.include_router(guarded)

    async def require_key(self, request: Request) -> None:
        """Refuse a request without the server's key, where it has one, with status 401."""
        if not bears_key(request.headers.get("authorization"), self._keys):
            raise HTTPException(401, "this route wants the server's API key")

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Remember the engine, and the checkpoint that it was started with."""
        self._adapters.init(engine_client, state)
        self._engine, self._model = engine_client, args.model
        loop, transfer = asyncio.get_running_loop(), engine_client.vllm_config.weight_transfer_config
        self._host = VLLMHost(engine_client, pause_mode="keep", loop=loop, timeout_s=_STEP_S)
        self._puller = VLLMHost(engine_client, pause_mode="keep", loop=loop, timeout_s=_PULL_S)
        self._ours = transfer is not None and transfer.backend == BACKEND
        self._keys = [key for key in (args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]  # as vLLM finds them

    async def update(self, request: Request) -> JSONResponse:
        """Answer one call of ``/update_weights_from_disk``."""
        try:
            body = await request.json()
            if not isinstance(body, Mapping) or not isinstance(body.get("model_path"), str):
                raise ConfigError("the body names no model_path", expected='{"model_path": "...", ...}')
            path, load_format, label = body["model_path"], body.get("load_format"), body.get("weight_version")
            if load_format not in (None, "auto", "safetensors", "delta"):
                raise ConfigError(f"there is no load_format {load_format!r}", expected='"delta", "auto" or null')
            label = None if label is None else str(label)
            async with self._one_at_a_time:
                if load_format == "delta":
                    return _answer(True, await self._land(path, label, body.get("files")))
                return _answer(True, await self._reload(path, label))
        except Exception as error:  # noqa: BLE001 - told to the caller, whatever it is
            return _answer(False, str(error) if isinstance(error, WeightSyncError) else f"{error or type(error)}")

    async def pull(self, request: Request) -> JSONResponse:
        """Answer one call of ``/pull_weights``."""
        try:
            body = await request.json()
            message = Pull.asked(body)
            async with self._one_at_a_time:
                if self._ours:
                    await asyncio.to_thread(self._puller.handle, message)
                else:  # in the workers' loop: nothing is generated meanwhile
                    told = {name: body[name] for name in ("local_checkpoint_dir", "source_dir", "target_version")}
                    await self._engine.collective_rpc("pull_weights", kwargs=told)
            return _answer(True, "Success.")
        except Exception as error:  # noqa: BLE001 - as for `update`
            return _answer(False, str(error) if isinstance(error, WeightSyncError) else f"{error or type(error)}")

    async def _land(self, path: str, label: str | None, files: Any) -> str:
        root, version = await asyncio.to_thread(locate, path)
        served = not await self._engine.is_paused()
        params = await asyncio.to_thread(parameters, root, version, self._model, files, parts=not served)
        own, called = await asyncio.to_thread(part, root, version, files), await self._engine.get_weight_version()
        prefetch = Prefetch(version=version, files=own, label=called)
        known = self._joined == (root, params)
        try:
            if not known:
                await asyncio.to_thread(self._join, root, params)
            await self._tell(prefetch)
        except Exception:
            self._joined = None
            if not known:
                raise
            await asyncio.to_thread(self._join, root, params)  # the workers have joined another trainer meanwhile
            await self._tell(prefetch)
        self._joined = (root, params)
        await asyncio.to_thread(self._host.pause)
        try:
            await self._tell(Start())
        except Exception as error:
            self._joined = None
            raise StoreError(f"version {version} was not begun: {error}", state=await self._undone(served)) from error
        with self._landing(f"version {version}", served):
            await self._tell(Load(version=version, handoff={"params": params}))
            await self._tell(Finish(version=version))
            if label is not None:
                await self._engine.update_weight_version(label)
        await self._resume(served)
        return f"version {version} of {root} is in service"

    def _join(self, root: str, params: list[Any]) -> None:
        base = self._model if os.path.isdir(self._model) else None
        with invited(root, f"reader-{os.getpid()}", base, params) as message:
            self._host.handle(message)

    async def _undone(self, served: bool) -> str:
        """End an update that changed no weight, let an engine that served before serve again, and return its state."""
        try:
            await self._engine.finish_weight_update()  # on workers that had begun
        except Exception:  # the others have nothing to end, and raise
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
        served = not await self._engine.is_paused()
        await asyncio.to_thread(self._host.pause)
        self._joined = None
        with self._landing(path, served):
            await self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder.absolute())})
            if self._ours:
                await self._tell(Reset(weights="reloaded"))
            if label is not None:
                await self._engine.update_weight_version(label)
            await asyncio.to_thread(self._host.drop_cached)
        await self._resume(served)
        return f"{path} is in service"

    async def _resume(self, served: bool) -> None:
        """Let an engine serve that served before, or that an update of ours left paused; no caller's pause ends."""
        if served or self._stuck:
            await asyncio.to_thread(self._host.resume)
        self._stuck = False

    @contextmanager
    def _landing(self, what: str, served: bool) -> Iterator[None]:
        """Turn a failure into an error that says that the engine stays paused."""
        try:
            yield
        except Exception as error:
            self._joined, self._stuck = None, self._stuck or served
            raise StoreError(
                f"{what} did not land: {error}",
                state="the engine is paused, and holds part of an update, or what was cached of older weights",
                hint="send it again, as a full version; the next good update resumes the engine",
            ) from error

    async def _tell(self, message: Message) -> None:
        await asyncio.to_thread(self._host.handle, message)


def _answer(success: bool, message: str) -> JSONResponse:
    status = 200 if success else 400
    return JSONResponse({"success": success, "message": message, "num_paused_requests": 0}, status_code=status)
