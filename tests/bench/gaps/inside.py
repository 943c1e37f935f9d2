"""What runs in the embedded engine, which does not stream by itself: a route that does, and `timed_commits`."""

from __future__ import annotations

import asyncio
import pkgutil
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from torchrl_ext.engines.embedded.engine import EmbeddedEngine
from torchrl_ext.engines.embedded.sampling import GenerateRequest
from torchrl_ext.engines.embedded.scheduler import RunningSequence
from torchrl_ext.engines.embedded.server import read_json


def routes(engine: EmbeddedEngine) -> list[Route]:
    """Return the route ``POST /stream``, which takes what ``/inference/v1/generate`` takes."""
    pkgutil.resolve_name("timed_commits:register")()
    watching: dict[str, Callable[[bool], Any]] = {}
    extend = RunningSequence.extend

    def watched(sequence: RunningSequence, *args: Any) -> None:
        extend(sequence, *args)
        watching[sequence.job.request.request_id](sequence.finish_reason is None)

    RunningSequence.extend = watched  # type: ignore[assignment, method-assign]

    async def stream(request: Request) -> Response:
        asked = GenerateRequest.from_json(await read_json(request), default_id=uuid.uuid4().hex)
        loop, came = asyncio.get_running_loop(), asyncio.Queue[bool]()
        watching[asked.request_id] = lambda more: loop.call_soon_threadsafe(came.put_nowait, more)
        job = engine.scheduler.submit(asked)

        async def lines() -> AsyncIterator[bytes]:
            try:
                more = True
                while more:
                    more = await came.get()
                    yield b"data: {}\n\n"
            finally:
                job.cancelled = True

        return StreamingResponse(lines(), media_type="text/event-stream")

    return [Route("/stream", stream, methods=["POST"])]
