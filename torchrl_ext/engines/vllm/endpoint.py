"""Entry point of group ``vllm.endpoint_plugins``: ``/update_weights_from_disk``
(`torchrl_ext.engines.update_from_disk`).

vLLM loads the plugin only where ``VLLM_PLUGINS`` names it (`torchrl_ext`, the name of our general plugin too).

Where the server has an API key, the route wants it too; vLLM's own check knows only the prefixes of its own
(`vllm.entrypoints.serve.middleware.authenticate`). Web pages may not call it (`torchrl_ext.base.routes.Guard`).
"""

from __future__ import annotations

import asyncio
import os
from typing import Any, ClassVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route, request_response

from torchrl_ext.base.messages import Finish
from torchrl_ext.base.routes import Guard
from torchrl_ext.engines.update_from_disk import PATH, DiskLoads, handler
from torchrl_ext.sync.local.module import VLLMObjectPort

__all__ = ["UpdateFromDisk"]


class UpdateFromDisk:
    """Adds the route to a vLLM server, in the form of vLLM's `EndpointPlugin`."""

    name: ClassVar[str] = "torchrl_ext"
    required_tasks: ClassVar[tuple[str, ...]] = ("generate",)

    def __init__(self) -> None:
        self._keys: list[str] = []

    def attach_router(self, app: Starlette) -> None:
        """Add the route to the application, before its own."""
        load = handler(lambda body: self._loads.load(body), Request.json)
        app.router.routes.insert(0, Route(PATH, Guard(request_response(load), self._keys), methods=["POST"]))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Remember the engine, and the checkpoint that it was started with."""
        self._loads = DiskLoads(_Reloadable(engine_client, args.model, asyncio.get_running_loop()))
        self._keys += [key for key in (args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]  # as vLLM finds them


class _Reloadable(VLLMObjectPort):
    """The engine behind the route, driven from threads beside the server's loop."""

    def __init__(self, engine: Any, model: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(engine, pause_mode="keep", loop=loop)
        self.model = model

    def paused(self) -> bool:
        return bool(super().paused())

    def finish(self, message: Finish, label: str | None) -> None:
        self.call(message)
        if label is not None:
            self.set_name(label)

    def undo(self, landing: bool) -> bool:
        return not landing  # nobody can tell what workers hold then
