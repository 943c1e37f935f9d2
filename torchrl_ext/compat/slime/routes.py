"""Routes that the trainers of slime call, over any engine: ``/pull_weights`` and ``/update_weights_from_disk``.

=================================  ====================================================================================
``POST /pull_weights``             ``{"local_checkpoint_dir", "source_dir", "target_version"}``: bring a checkpoint
                                   directory on each worker's host to a version while the engine serves; load nothing
``POST /update_weights_from_disk`` ``{"model_path", "load_format", "weight_version", "files", "flush_cache"}``, of
                                   which only the first is needed. With load format ``"delta"``, ``model_path`` is a
                                   version directory ``weight_v000007`` or the root that holds it (then the newest
                                   version is taken): the version is staged while the engine serves, and committed in a
                                   short pause. ``flush_cache``: false keeps what was cached with older weights
=================================  ====================================================================================

Answer: ``{"success": bool, "message": str, "num_paused_requests": 0}``, with status 400 where ``success`` is false. The
message says whether the engine still serves its previous weights, or is paused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse

from torchrl_ext.deadline import in_thread
from torchrl_ext.errors import ConfigError, WeightSyncError
from torchrl_ext.messages import Pull
from torchrl_ext.sync.published import DiskLoads, ReloadableEngine
from torchrl_ext.sync.worker_end import pull
from torchrl_ext.types import Info, decoded

__all__ = ["PATHS", "VIMES_ARGUMENTS", "SlimeEngine", "Step", "answered", "handler", "pull_for_vime", "steps_of"]

log = logging.getLogger("torchrl_ext")

Step = Callable[[Info], Info | None]
PATHS = ("/pull_weights", "/update_weights_from_disk")
VIMES_ARGUMENTS = ("local_checkpoint_dir", "source_dir", "target_version")
"""Arguments of the worker's method ``pull_weights`` of vime's vLLM, in order."""


class SlimeEngine(ReloadableEngine, Protocol):
    """An engine behind slime's routes, which call it from threads."""

    def pull(self, message: Pull) -> None:
        """Bring a checkpoint on each worker's host to a version."""


def steps_of(engine: SlimeEngine) -> dict[str, Step]:
    """Return what each route does with a request's body; it returns more fields of the answer."""
    loads = DiskLoads(engine)

    def update(body: Info) -> Info:
        label = body.get("weight_version")
        if label is not None:
            label = str(label) if isinstance(label, int) else decoded(label, str, "weight_version")
        flush = decoded(body.get("flush_cache", True), bool, "flush_cache")
        path, load_format = body.get("model_path"), body.get("load_format")
        return {"message": loads.load(path, load_format, label, body.get("files"), flush=flush)}

    return dict(zip(PATHS, (lambda body: engine.pull(Pull.of(body)), update), strict=True))


def handler(
    step: Step, read: Callable[[Request], Awaitable[Any]] = Request.json
) -> Callable[[Request], Awaitable[JSONResponse]]:
    """Return the handler of a route.

    Args:
        step: as for `answered`.
        read: returns the body of a request.
    """

    async def handle(request: Request) -> JSONResponse:
        answer = await answered(step, read(request))
        return JSONResponse(answer, status_code=200 if answer["success"] else 400)

    return handle


async def answered(step: Step, reading: Awaitable[Any]) -> Info:
    """Take a step in a thread of its own, whose waits have deadlines, and return the answer. Never raises.

    Args:
        step: takes the body.
        reading: returns the body.
    """
    try:
        body = await reading
        if not isinstance(body, Mapping):
            raise ConfigError(f"the body is {body!r:.200}", expected="an object")
        more = await asyncio.wrap_future(in_thread(lambda: step(dict(body)), "torchrl_ext"))
        return {"success": True, "message": "Success.", "num_paused_requests": 0, **(more or {})}
    except Exception as error:  # the caller gets it, whatever it is
        log.error("a trainer's call failed", exc_info=error)
        message = str(error) if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"
        # half of a surrogate pair, which JSON can name, could not be encoded
        message = message.encode("utf-8", "replace").decode()
        return {"success": False, "message": message, "num_paused_requests": 0}


def pull_for_vime(told: Info, base: str | None) -> None:
    """Bring the checkpoint on this host to a version, by the arguments of vime's ``pull_weights``.

    Args:
        told: arguments by name.
        base: the checkpoint that the engine was started with.

    Raises:
        WeightSyncError: see `torchrl_ext.sync.worker_end.pull`.
    """
    pull(Pull.of(told), base)
