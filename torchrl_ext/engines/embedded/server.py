"""Serves vLLM's routes over an `EmbeddedEngine`: `/inference/v1/generate` and those of `vllm.entrypoints.rl.online`.

``POST /update_weights_from_disk`` is that of `torchrl_ext.engines.update_from_disk`;
``POST /collective_rpc`` has one method, by which the engine handles messages (`torchrl_ext.base.routes.called`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

import torchrl_ext
from torchrl_ext.base.deadline import in_thread
from torchrl_ext.base.errors import (
    ConfigError,
    DeadlineError,
    EngineRefusedError,
    ManifestError,
    WeightSyncError,
)
from torchrl_ext.base.messages import answered
from torchrl_ext.base.routes import CALL, Guard
from torchrl_ext.base.types import Info, decoded
from torchrl_ext.engines.embedded.engine import EmbeddedEngine, followed
from torchrl_ext.engines.embedded.sampling import GenerateRequest, Token
from torchrl_ext.engines.update_from_disk import PATH, DiskLoads, handler

__all__ = ["make_app", "read_json"]

log = logging.getLogger("torchrl_ext")

_STATUS = {ConfigError: 400, ManifestError: 400, EngineRefusedError: 409, DeadlineError: 504}
DRAIN_TIMEOUT_S = 600.0  # of ``pause?mode=wait``
BODY_TIMEOUT_S = 60.0
_OPEN_ROUTE = "/health"  # cluster probes have no key; they learn only that the process lives


def make_app(engine: EmbeddedEngine, *, api_key: str | None = None, routes: Sequence[BaseRoute] = ()) -> Starlette:
    """Return the server's application; blocking calls run in threads, so ``/health`` is answered at any time.

    Args:
        api_key: bearer token that every route but ``/health`` requires; None requires none.
        routes: additional routes.
    """
    scheduler, keys = engine.scheduler, [api_key] if api_key else []

    async def health(request: Request) -> Response:
        return Response(status_code=200 if scheduler.alive else 503)

    async def generate(request: Request) -> Response:
        job = scheduler.submit(GenerateRequest.from_json(await read_json(request), default_id=uuid.uuid4().hex))
        outputs = asyncio.wrap_future(job.future)
        gone = asyncio.ensure_future(_disconnect(request))
        try:
            either: set[asyncio.Future[Any]] = {outputs, gone}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not outputs.done():
                return Response(status_code=499)  # the client has disconnected
            outputs.result()  # raises the error that ended generation
            return JSONResponse(job.to_json(engine.model))
        finally:
            job.cancelled = True
            gone.cancel()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(engine.close)

    handlers = {
        "GET /health": health,
        "POST /inference/v1/generate": generate,
        "GET /load": _run(lambda asked: {"server_load": scheduler.running}),
        "GET /server_info": _run(lambda asked: _server_info(engine)),
        "GET /get_world_size": _run(lambda asked: {"world_size": 1}),
        "GET /weight_info": _run(lambda asked: {"weight_version": scheduler.version, "paused": scheduler.paused}),
        "GET /is_paused": _run(lambda asked: {"is_paused": scheduler.paused}),
        "GET /is_sleeping": _run(lambda asked: {"is_sleeping": bool(engine.asleep)}),
        "GET /weights_digest": _run(lambda asked: {"digests": engine.digests(), "weight_version": scheduler.version}),
        "POST /prompt_logprobs": _run(lambda asked: _logprobs(engine, asked.body)),
        "POST /pause": _run(lambda asked: engine.pause(_mode(asked), DRAIN_TIMEOUT_S), waits=True, status="paused"),
        "POST /resume": _run(lambda asked: engine.resume(), status="resumed"),
        "POST /sleep": _run(lambda asked: _sleep(engine, asked), waits=True, status="sleeping"),
        "POST /wake_up": _run(lambda asked: _wake_up(engine, asked.query.getlist("tags") or None)),
        "POST /release_kv_cache_memory": _run(lambda asked: engine.release_kv_cache(), status="kv_cache_released"),
        "POST /reset_prefix_cache": _run(lambda asked: _reset(engine, asked), success=True),
        "POST /update_weight_version": _run(
            lambda asked: engine.set_name(_field(asked.body, "new_version", str)), success=True
        ),
        "POST /collective_rpc": _run(lambda asked: _call(engine, asked.body)),
    }
    handlers[f"POST {PATH}"] = handler(DiskLoads(engine, engine.model).load, read_json)
    own = [Route(route.split()[1], handler, methods=route.split()[:1]) for route, handler in handlers.items()]
    return Starlette(
        routes=[*own, *routes],
        exception_handlers={WeightSyncError: _refuse, Exception: _refuse},
        middleware=[Middleware(Guard, keys=keys, open_routes=(_OPEN_ROUTE,))],
        lifespan=lifespan,
    )


async def read_json(request: Request) -> Any:
    """Return the JSON of a request's body; an empty object if there is no body.

    Raises:
        ConfigError: the body is not JSON, or is too large (`Guard`).
        DeadlineError: it did not come in time.
    """
    body = bytearray()

    async def read() -> None:
        async for chunk in request.stream():
            body.extend(chunk)

    try:
        await asyncio.wait_for(read(), BODY_TIMEOUT_S)
    except asyncio.TimeoutError:
        what = f"only {len(body)} bytes of the body came within {BODY_TIMEOUT_S:g} s"
        raise DeadlineError(what, state="unchanged") from None
    try:
        return json.loads(body) if body else {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body is not JSON: {error}") from None


class _Asked(NamedTuple):
    query: QueryParams
    body: Info


def _run(step: Callable[[_Asked], Info | None], *, waits: bool = False, **fields: Any) -> Callable[[Request], Any]:
    """Return a handler that runs ``step`` in a thread and responds with ``fields`` and the result of ``step``.

    A step that ``waits`` for minutes has a thread of its own, and takes none of those that all others share.
    """

    async def handler(request: Request) -> Response:
        body = decoded(await read_json(request), Info, "the body")
        call = partial(step, _Asked(request.query_params, body))
        returned = await (
            asyncio.wrap_future(in_thread(call, "torchrl-ext-wait")) if waits else run_in_threadpool(call)
        )
        return JSONResponse({**fields, **(returned or {})})

    return handler


def _mode(asked: _Asked) -> str:
    return asked.query.get("mode", "abort")


def _server_info(engine: EmbeddedEngine) -> Info:
    return {
        "engine": "embedded",
        "version": torchrl_ext.__version__,
        "worker_type": "regular",
        "model": engine.model,
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


def _field(body: Info, name: str, kind: Any) -> Any:
    """Return a field of a body, of type ``kind``; None if it is missing and ``kind`` allows None."""
    return decoded(body.get(name), kind, name)


def _logprobs(engine: EmbeddedEngine, body: Info) -> Info:
    rows = engine.logprobs(_field(body, "prompts", list[list[Token]]))
    return {"logprobs": [[value if math.isfinite(value) else None for value in row] for row in rows]}


def _sleep(engine: EmbeddedEngine, asked: _Asked) -> Info:
    level = {"0": 0, "1": 1, "2": 2}.get(asked.query.get("level", "1"))
    if level is None:
        raise ConfigError(f"there is no sleep level {asked.query['level']!r}", expected="0, 1 or 2")
    engine.sleep(level, _mode(asked), DRAIN_TIMEOUT_S)
    return {"level": level}


def _wake_up(engine: EmbeddedEngine, tags: list[str] | None) -> Info:
    return {"status": "awake" if engine.wake_up(tags) else "sleeping", "tags": tags}


def _call(engine: EmbeddedEngine, body: Info) -> Info:
    """Call the method that the engine's one worker has, with its one argument."""
    method, args = _field(body, "method", str), _field(body, "args", list[str])
    if method != CALL or len(args) != 1:
        raise ConfigError(f"there is no method {method!r} with {len(args)} argument(s)", expected=f"{CALL!r} with one")
    return {"results": [answered(engine.handle, args[0])]}


def _reset(engine: EmbeddedEngine, asked: _Asked) -> None:
    if asked.query.get("reset_running_requests", "").lower() in ("true", "1"):
        engine.scheduler.forget()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer with an error in vLLM's form; only the log shows the text of errors that are not ours."""
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
    known = isinstance(error, WeightSyncError)
    log.error("%s %s: %s", request.method, request.url.path, error, exc_info=None if known else error)
    words = str(error) if known else "the engine failed on this request; its log has the reason"
    fields = {"message": words, "type": type(error).__name__, "param": None, "code": status}
    return JSONResponse({"error": fields}, status_code=status)
