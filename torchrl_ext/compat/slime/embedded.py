"""Engine routes that the trainers of slime and vime call: pull, load from disk, label.

Bodies and answers are those of slime's SGLang (`torchrl_ext.compat.slime.routes`) and of vime's vLLM
(``/collective_rpc`` with ``pull_weights`` or ``reload_weights``). An embedded engine serves them if started with::

    python -m torchrl_ext.embedded --model DIR --port P --routes torchrl_ext.compat.slime.embedded:routes
"""

from __future__ import annotations

from typing import Any, final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from torchrl_ext.compat.slime.routes import Step, handler, pull_for_vime, steps_of
from torchrl_ext.embedded.engine import Engine
from torchrl_ext.embedded.server import DRAIN_TIMEOUT_S, read_json
from torchrl_ext.errors import ConfigError
from torchrl_ext.messages import Finish, Message, Pull, State
from torchrl_ext.sync.worker_end import pull
from torchrl_ext.types import Info, decoded

__all__ = ["routes"]


def routes(engine: Engine) -> list[Route]:
    """Return the routes of slime's SGLang and vime's vLLM for an engine.

    ``/flush_cache``, which slime calls by GET, does nothing: requests share no cache here, and weights loaded by these
    routes drop the keys and values of running requests.
    """
    steps, scheduler = steps_of(_SlimeEngine(engine)), engine.scheduler

    def update_version(body: Info) -> Info:
        scheduler.version = decoded(body.get("new_version"), str, "new_version")
        return {"new_version": scheduler.version}

    def collective_rpc(body: Info) -> Info:
        method, given = body.get("method"), decoded(body.get("kwargs") or {}, Info, "kwargs")
        if method == "pull_weights":
            pull_for_vime(given, engine.model_dir)
            return {"results": [{"success": True, "weight_version": str(given["target_version"])}]}
        if method == "reload_weights":
            steps["/update_weights_from_disk"]({"model_path": given.get("weights_path")})
            return {"results": [None]}
        raise ConfigError(f"there is no method {method!r:.80} here", expected="pull_weights or reload_weights")

    async def version(request: Request) -> Response:
        return JSONResponse({"weight_version": scheduler.version})

    more: dict[str, Step] = {
        "/update_weight_version": update_version,
        "/collective_rpc": collective_rpc,
        "/pause_generation": lambda body: engine.pause(body.get("mode", "abort"), DRAIN_TIMEOUT_S),
        "/continue_generation": lambda body: engine.resume(),
    }
    return [
        *(Route(path, handler(step, read_json), methods=["POST"]) for path, step in {**steps, **more}.items()),
        Route("/flush_cache", handler(lambda body: None, read_json), methods=["GET", "POST"]),
        Route("/get_weight_version", version, methods=["GET"]),
    ]


@final
class _SlimeEngine:
    """The embedded engine behind slime's routes; it refuses to serve incomplete weights."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.model, self.resume = engine, engine.model_dir, engine.resume

    def pull(self, message: Pull) -> None:
        pull(message, self.model)

    def paused(self) -> bool:
        return self._engine.scheduler.paused

    def pause(self) -> None:
        self._engine.pause("keep", 0.0)

    def label(self) -> str:
        return self._engine.scheduler.version

    def handle(self, message: Message) -> Any:
        return self._engine.handle(message)

    def finish(self, message: Finish, label: str | None) -> None:
        self._engine.handle(message)
        self._engine.finish(label)

    def reload(self, path: str, label: str | None) -> None:
        self._engine.reload(path, label)

    def drop_cached(self) -> None:
        self._engine.scheduler.forget()

    def undo(self, landing: bool) -> bool:
        return not landing or bool(self._engine.handle(State())["whole"])
