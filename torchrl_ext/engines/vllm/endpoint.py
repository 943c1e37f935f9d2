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
        port = VLLMObjectPort(engine_client, pause_mode="keep", loop=asyncio.get_running_loop())
        self._loads = DiskLoads(port, args.model)
        self._keys += [key for key in (args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]  # as vLLM finds them
