"""Serve vLLM's routes over an `Engine`: `/inference/v1/generate` and those of `vllm.entrypoints.rl.online`."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, final

from starlette.applications import Starlette
from starlette.datastructures import Headers, QueryParams
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import torchrl_ext
from torchrl_ext.compat.slime.embedded import Dialects
from torchrl_ext.embedded.engine import Engine
from torchrl_ext.embedded.protocol import GenerateRequest, is_token
from torchrl_ext.embedded.sequences import answer
from torchrl_ext.errors import ConfigError, DeadlineError, EngineRefusedError, ManifestError, WeightSyncError
from torchrl_ext.messages import read
from torchrl_ext.routes import bears_key, refusal
from torchrl_ext.sync.inspection import followed
from torchrl_ext.types import Info

__all__ = ["make_app"]

log = logging.getLogger("torchrl_ext")

_STATUS = {ConfigError: 400, ManifestError: 400, EngineRefusedError: 409, DeadlineError: 504}
_DRAIN_TIMEOUT_S = 600.0
_MAX_BODY_BYTES = 64 << 20  # a hundred thousand parameters with long names fit many times
_OPEN_ROUTE = "/health"  # probes of a cluster have no key, and learn only that the process lives


def make_app(engine: Engine, *, api_key: str | None = None) -> Starlette:
    """Return the server's application; whatever blocks runs in threads, so that health is answered at any time.

    Args:
        engine: what the routes call.
        api_key: wanted by every route but ``/health``, as a bearer token; None lets everybody in.
    """
    scheduler, dialects = engine.scheduler, Dialects(engine)

    async def health(request: Request) -> Response:
        return Response(status_code=200 if scheduler.alive else 503)

    async def generate(request: Request) -> Response:
        asked = GenerateRequest.from_json(_parsed(await request.body()), default_id=uuid.uuid4().hex)
        job = await asyncio.to_thread(scheduler.submit, asked)
        outputs = asyncio.wrap_future(job.future)
        gone = asyncio.ensure_future(_disconnect(request))
        try:
            either: set[asyncio.Future[Any]] = {outputs, gone}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not outputs.done():
                return Response(status_code=499)  # nobody is left to read it
            return JSONResponse(answer(asked, outputs.result(), engine.model_dir))
        finally:
            job.cancelled = True
            gone.cancel()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    routes = {
        "GET /health": health,
        "GET /load": _told(lambda: {"server_load": scheduler.running}),
        "GET /server_info": _told(lambda: _server_info(engine)),
        "GET /get_world_size": _told(lambda: {"world_size": 1}),
        "GET /weight_info": _told(lambda: {"weight_version": scheduler.version, "paused": scheduler.paused}),
        "GET /is_paused": _told(lambda: {"is_paused": scheduler.paused}),
        "GET /is_sleeping": _told(lambda: {"is_sleeping": bool(engine.asleep), "tags": sorted(engine.asleep)}),
        "GET /weights_digest": _done(lambda asked: _digests(engine)),
        "POST /prompt_logprobs": _done(lambda asked: _logprobs(engine, asked.field("prompts", list))),
        "POST /pause": _done(lambda asked: engine.pause(asked.mode, _DRAIN_TIMEOUT_S), status="paused"),
        "POST /resume": _done(lambda asked: engine.resume(), status="resumed"),
        "POST /sleep": _done(lambda asked: _sleep(engine, asked), status="sleeping"),
        "POST /wake_up": _done(lambda asked: _wake_up(engine, asked.query.getlist("tags") or None)),
        "POST /release_kv_cache_memory": _done(lambda asked: engine.release_kv_cache(), status="kv_cache_released"),
        "POST /init_weight_transfer_engine": _done(lambda asked: _connect(engine, asked)),
        "POST /start_weight_update": _done(lambda asked: engine.start(), message="Weight update started"),
        "POST /update_weights": _done(
            lambda asked: engine.handle(read(asked.field("update_info", dict))), message="Weights updated"
        ),
        "POST /finish_weight_update": _done(
            lambda asked: engine.finish(asked.field("weight_version", str, optional=True)),
            message="Weight update finished",
        ),
        "POST /reset_prefix_cache": _done(lambda asked: _reset(engine, asked), success=True),
        "POST /inference/v1/generate": generate,
        # slime's SGLang and vime's vLLM
        "POST /pull_weights": _spoken(dialects.pull),
        "POST /update_weights_from_disk": _spoken(dialects.update),
        "POST /update_weight_version": _spoken(dialects.rename),
        "POST /collective_rpc": _spoken(dialects.call),
        "POST /pause_generation": _spoken(lambda body: engine.pause(body.get("mode", "abort"), _DRAIN_TIMEOUT_S)),
        "POST /continue_generation": _spoken(lambda body: engine.resume()),
        "GET /flush_cache": _spoken(lambda body: scheduler.forget()),
        "GET /get_weight_version": _told(lambda: {"weight_version": scheduler.version}),
    }
    return Starlette(
        routes=[Route(route.split()[1], handler, methods=route.split()[:1]) for route, handler in routes.items()],
        exception_handlers={WeightSyncError: _refuse, Exception: _refuse},
        middleware=[Middleware(_Guard, api_key=api_key)],
        lifespan=lifespan,
    )


@final
class _Guard:
    """ASGI middleware that refuses a request without the key, and a body that is too large."""

    def __init__(self, app: ASGIApp, *, api_key: str | None) -> None:
        self._app, self._keys = app, [api_key] if api_key else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            passes = scope["path"] == _OPEN_ROUTE or bears_key(Headers(scope=scope).get("authorization"), self._keys)
            if not passes:
                await JSONResponse(refusal(), status_code=401)(scope, receive, send)
                return
            receive = _bounded(receive)
        await self._app(scope, receive, send)


def _bounded(receive: Receive) -> Receive:
    """Return a ``receive`` that counts the bytes of a body, and refuses a large one before it is all in memory."""
    seen = 0

    async def bounded() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > _MAX_BODY_BYTES:
            raise ConfigError(f"the body has more than {_MAX_BODY_BYTES} bytes", state="unchanged")
        return message

    return bounded


@dataclass(frozen=True)
class _Asked:
    query: QueryParams
    body: bytes

    @property
    def mode(self) -> str:
        """The pause mode that the query names."""
        return self.query.get("mode", "abort")

    def field(self, name: str, kind: type, *, optional: bool = False) -> Any:
        """Return a field of the body.

        Raises:
            ConfigError: it is not there, or of another kind.
        """
        body = _parsed(self.body)
        value = body.get(name) if isinstance(body, dict) else None
        if value is None and optional:
            return None
        if not isinstance(value, kind):
            raise ConfigError(f"{name} is a {type(value).__name__}", expected=f'a body {{"{name}": {kind.__name__}}}')
        return value


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body) if body else {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body is no JSON: {error}") from None


def _told(tell: Callable[[], Info]) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler of a route that is answered at once."""

    async def handler(request: Request) -> Response:
        return JSONResponse(tell())

    return handler


def _done(step: Callable[[_Asked], Info | None], **answer: Any) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler that runs ``step`` in a thread, and responds with ``answer`` and what ``step`` returned."""

    async def handler(request: Request) -> Response:
        found = await asyncio.to_thread(step, _Asked(request.query_params, await request.body()))
        return JSONResponse({**answer, **(found or {})})

    return handler


def _spoken(step: Callable[[Info], Info | None]) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler that runs ``step`` on the body in a thread, and tells success or failure as SGLang does."""

    async def handler(request: Request) -> Response:
        body = _parsed(await request.body())
        try:
            found = await asyncio.to_thread(step, body if isinstance(body, dict) else {})
        except WeightSyncError as error:
            log.error("%s %s: %s", request.method, request.url.path, error)
            return JSONResponse({"success": False, "message": str(error)}, status_code=400)
        return JSONResponse({"success": True, "message": "Success.", **(found or {})})

    return handler


def _server_info(engine: Engine) -> Info:
    return {
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
        "transports": followed(),
        "weight_version": engine.scheduler.version,
    }


def _digests(engine: Engine) -> Info:
    digests = engine.digests()
    return {"weight_version": engine.scheduler.version, "digests": digests}


def _logprobs(engine: Engine, prompts: list[Any]) -> Info:
    if not all(isinstance(row, list) and all(map(is_token, row)) for row in prompts):
        raise ConfigError("prompts are not token ids", expected="a list of lists of token ids")
    found = engine.logprobs(prompts)
    return {"logprobs": [[value if math.isfinite(value) else None for value in row] for row in found]}


def _sleep(engine: Engine, asked: _Asked) -> Info:
    level = asked.query.get("level", "1")
    if level not in ("0", "1", "2"):
        raise ConfigError(f"there is no sleep level {level!r}", expected="0, 1 or 2")
    engine.sleep(int(level), asked.mode, _DRAIN_TIMEOUT_S)
    return {"level": int(level)}


def _wake_up(engine: Engine, tags: list[str] | None) -> Info:
    return {"status": "awake" if engine.wake_up(tags) else "sleeping", "tags": tags}


def _connect(engine: Engine, asked: _Asked) -> Info:
    found = engine.handle(read(asked.field("init_info", dict)))
    return {"message": "Weight transfer initialized", **({"answer": found} if found else {})}


def _reset(engine: Engine, asked: _Asked) -> None:
    """Drop the keys and values of running requests, if asked to: requests share no other cache."""
    if asked.query.get("reset_running_requests", "").lower() in ("true", "1"):
        engine.scheduler.forget()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer with an error in vLLM's form; of one that is not ours the caller learns only that the log has it."""
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
    known = isinstance(error, WeightSyncError)
    log.error("%s %s: %s", request.method, request.url.path, error, exc_info=None if known else error)
    told = str(error) if known else "the engine failed on this request; its log says why"
    row = {"message": told, "type": type(error).__name__, "param": None, "code": status}
    return JSONResponse({"error": row}, status_code=status)
