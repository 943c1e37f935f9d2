"""vLLM's routes over an `Engine`: `/inference/v1/generate` and those of `vllm.entrypoints.rl.online`."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, final

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import torchrl_ext
from torchrl_ext.embedded.engine import Engine
from torchrl_ext.embedded.protocol import GenerateRequest, answer, is_token
from torchrl_ext.errors import ConfigError, DeadlineError, EngineRefusedError, ManifestError, WeightSyncError
from torchrl_ext.messages import read
from torchrl_ext.messages.routes import bears_key, refusal

__all__ = ["make_app"]

log = logging.getLogger("torchrl_ext")

_STATUS = {ConfigError: 400, ManifestError: 400, EngineRefusedError: 409, DeadlineError: 504}
_DRAIN_TIMEOUT_S = 600.0
_MAX_BODY_BYTES = 64 << 20  # a hundred thousand parameters with long names fit many times
_OPEN_ROUTE = "/health"  # probes of a cluster have no key, and learn only that the process lives


def make_app(engine: Engine, *, api_key: str | None = None) -> Starlette:
    """The server's application; whatever blocks runs in threads, so that health is answered at any time.

    Args:
        engine: what the routes call.
        api_key: wanted by every route but ``/health``, as a bearer token; None lets everybody in.
    """
    routes = _Routes(engine)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    table: dict[tuple[str, str], Callable[[Request], Awaitable[Response]]] = {
        ("GET", "/health"): routes.health,
        ("GET", "/load"): routes.load_now,
        ("GET", "/server_info"): routes.server_info,
        ("GET", "/get_world_size"): routes.world_size,
        ("GET", "/weight_info"): routes.weight_info,
        ("GET", "/weights_digest"): routes.weights_digest,
        ("POST", "/prompt_logprobs"): routes.prompt_logprobs,
        ("GET", "/is_paused"): routes.is_paused,
        ("POST", "/pause"): routes.pause,
        ("POST", "/resume"): routes.resume,
        ("POST", "/sleep"): routes.sleep,
        ("POST", "/wake_up"): routes.wake_up,
        ("POST", "/release_kv_cache_memory"): routes.release_kv_cache,
        ("GET", "/is_sleeping"): routes.is_sleeping,
        ("POST", "/init_weight_transfer_engine"): routes.connect,
        ("POST", "/start_weight_update"): routes.start,
        ("POST", "/update_weights"): routes.load,
        ("POST", "/finish_weight_update"): routes.finish,
        ("POST", "/reset_prefix_cache"): routes.reset_prefix_cache,
        ("POST", "/inference/v1/generate"): routes.generate,
    }
    return Starlette(
        routes=[Route(path, handler, methods=[method]) for (method, path), handler in table.items()],
        exception_handlers={WeightSyncError: _refuse, Exception: _refuse},
        middleware=[Middleware(_Guard, api_key=api_key)],
        lifespan=lifespan,
    )


@final
class _Guard:
    """ASGI middleware: who has no key is told so, and no body is larger than what is allowed."""

    def __init__(self, app: ASGIApp, *, api_key: str | None) -> None:
        self._app, self._keys = app, [api_key] if api_key else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            passes = scope["path"] == _OPEN_ROUTE or bears_key(Headers(scope=scope).get("authorization"), self._keys)
            if not passes:
                await JSONResponse(refusal(), status_code=401)(scope, receive, send)
                return
            receive = _Bounded(receive)
        await self._app(scope, receive, send)


@final
class _Bounded:
    """Counts the bytes of a body, and gives up before they are all in memory."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._seen = receive, 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._seen += len(message.get("body", b""))
        if self._seen > _MAX_BODY_BYTES:
            raise ConfigError(f"the body has more than {_MAX_BODY_BYTES} bytes", state="unchanged")
        return message


class _Routes:
    """One method per route."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self._engine.scheduler.alive else 503)

    async def load_now(self, request: Request) -> Response:
        return JSONResponse({"server_load": self._engine.scheduler.running})

    async def server_info(self, request: Request) -> Response:
        engine = self._engine
        return JSONResponse(
            {
                "engine": "embedded",
                "version": torchrl_ext.__version__,
                "worker_type": "regular",
                "model": engine.model_dir,
                "dtype": engine.dtype,
                "max_model_len": engine.context,
                "parallel_config": {
                    "tensor_parallel_size": 1,
                    "pipeline_parallel_size": 1,
                    "data_parallel_size": 1,
                    "world_size": 1,
                },
                "transports": list(engine.transports()),
                "weight_version": engine.scheduler.version,
            }
        )

    async def world_size(self, request: Request) -> Response:
        return JSONResponse({"world_size": 1})

    async def weight_info(self, request: Request) -> Response:
        scheduler = self._engine.scheduler
        return JSONResponse({"weight_version": scheduler.version, "paused": scheduler.paused})

    async def weights_digest(self, request: Request) -> Response:
        digests = await asyncio.to_thread(self._engine.digests)
        return JSONResponse({"weight_version": self._engine.scheduler.version, "digests": digests})

    async def prompt_logprobs(self, request: Request) -> Response:
        prompts = await _field(request, "prompts", list)
        if not all(isinstance(row, list) and all(map(is_token, row)) for row in prompts):
            raise ConfigError("prompts are not token ids", expected="a list of lists of token ids")
        found = await asyncio.to_thread(self._engine.logprobs, prompts)
        return JSONResponse({"logprobs": [[value if math.isfinite(value) else None for value in row] for row in found]})

    async def is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": self._engine.scheduler.paused})

    async def pause(self, request: Request) -> Response:
        mode: Any = request.query_params.get("mode", "abort")
        await asyncio.to_thread(self._engine.pause, mode, _DRAIN_TIMEOUT_S)
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        await asyncio.to_thread(self._engine.resume)
        return JSONResponse({"status": "resumed"})

    async def sleep(self, request: Request) -> Response:
        level = request.query_params.get("level", "1")
        mode: Any = request.query_params.get("mode", "abort")
        if level not in ("0", "1", "2"):
            raise ConfigError(f"there is no sleep level {level!r}", expected="0, 1 or 2")
        await asyncio.to_thread(self._engine.sleep, int(level), mode, _DRAIN_TIMEOUT_S)
        return JSONResponse({"status": "sleeping", "level": int(level)})

    async def wake_up(self, request: Request) -> Response:
        tags = request.query_params.getlist("tags") or None
        awake = await asyncio.to_thread(self._engine.wake_up, tags)
        return JSONResponse({"status": "awake" if awake else "sleeping", "tags": tags})

    async def release_kv_cache(self, request: Request) -> Response:
        await asyncio.to_thread(self._engine.release_kv_cache)
        return JSONResponse({"status": "kv_cache_released"})

    async def is_sleeping(self, request: Request) -> Response:
        return JSONResponse({"is_sleeping": bool(self._engine.asleep), "tags": sorted(self._engine.asleep)})

    async def connect(self, request: Request) -> Response:
        message = read(await _field(request, "init_info", dict))
        answer = await asyncio.to_thread(self._engine.handle, message)
        return JSONResponse({"message": "Weight transfer initialized", **({"answer": answer} if answer else {})})

    async def start(self, request: Request) -> Response:
        await asyncio.to_thread(self._engine.start)
        return JSONResponse({"message": "Weight update started"})

    async def load(self, request: Request) -> Response:
        message = read(await _field(request, "update_info", dict))
        await asyncio.to_thread(self._engine.handle, message)
        return JSONResponse({"message": "Weights updated"})

    async def finish(self, request: Request) -> Response:
        label = await _field(request, "weight_version", str, optional=True)
        await asyncio.to_thread(self._engine.finish, label)
        return JSONResponse({"message": "Weight update finished"})

    async def reset_prefix_cache(self, request: Request) -> Response:
        if request.query_params.get("reset_running_requests", "").lower() in ("true", "1"):
            await asyncio.to_thread(self._engine.scheduler.forget)
        return JSONResponse({"success": True})  # requests share no cache, so there is nothing else to drop

    async def generate(self, request: Request) -> Response:
        asked = GenerateRequest.from_json(await _body(request), default_id=uuid.uuid4().hex)
        job = await asyncio.to_thread(self._engine.scheduler.submit, asked)
        outputs = asyncio.wrap_future(job.future)
        gone = asyncio.ensure_future(_disconnect(request))
        try:
            either: set[asyncio.Future[Any]] = {outputs, gone}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not outputs.done():
                return Response(status_code=499)  # nobody is left to read it
            return JSONResponse(answer(asked, outputs.result(), self._engine.model_dir))
        finally:
            job.cancelled = True
            gone.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> Any:
    try:
        return await request.json() if await request.body() else {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body is no JSON: {error}") from None


async def _field(request: Request, name: str, kind: type, *, optional: bool = False) -> Any:
    body = await _body(request)
    value = body.get(name) if isinstance(body, dict) else None
    if value is None and optional:
        return None
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is a {type(value).__name__}", expected=f'a body {{"{name}": {kind.__name__}}}')
    return value


async def _refuse(request: Request, error: Exception) -> Response:
    """vLLM's shape of an error. What is none of ours is told in the log, and only that it happened to the caller."""
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
    known = isinstance(error, WeightSyncError)
    log.error("%s %s: %s", request.method, request.url.path, error, exc_info=None if known else error)
    told = str(error) if known else "the engine failed on this request; its log says why"
    row = {"message": told, "type": type(error).__name__, "param": None, "code": status}
    return JSONResponse({"error": row}, status_code=status)
