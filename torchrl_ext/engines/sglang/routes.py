"""SGLang's own ``/update_weights_from_disk`` loads checkpoints, and with the plugin versions as well (load format
``"delta"``, `torchrl_ext.engines.update_from_disk`): our messages to the workers travel as those of any trainer.

Servers with ``--tokenizer-worker-num`` above 1 load no plugin in that process, and have none of this.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from typing import Any, Final

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import EngineRefusedError
from torchrl_ext.base.messages import Join, Message, Poll, Prefetch, Start, answers_of
from torchrl_ext.base.routes import CHANNEL, FROM_A_PAGE, Flush, merged
from torchrl_ext.base.types import Info
from torchrl_ext.engines.update_from_disk import DiskLoads, answered

__all__ = ["HOOKS"]

_STEP_S: Final = 600.0
_FLUSH_S: Final = 10.0
_loads: weakref.WeakKeyDictionary[Any, DiskLoads] = weakref.WeakKeyDictionary()


class _Reloadable:
    """The server behind the route, driven from threads beside its loop.

    Args:
        manager: SGLang's `TokenizerManager`.
        loop: the loop that it runs on.
    """

    def __init__(self, manager: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._manager, self._loop = weakref.proxy(manager), loop

    def paused(self) -> bool:
        return bool(self._manager.is_pause)

    def pause(self) -> None:
        if not self.paused():
            pooled = getattr(self._manager.server_args, "disaggregation_mode", "null") != "null"
            # in a pool each engine has one half of a request
            self._call("pause_generation", "PauseGenerationReqInput", mode="abort" if pooled else "retract")

    def resume(self) -> None:
        self._call("continue_generation", "ContinueGenerationReqInput")

    def call(self, message: Message) -> None:
        self._ask(message)
        match message:
            case Join() | Prefetch():
                asked = Poll(connection=message.connection)
                Deadline(_STEP_S).poll(
                    lambda: not self._ask(asked).get("working"), f"SGLang's workers did not {message.kind}"
                )
            case Start():
                Deadline(_FLUSH_S).poll(
                    lambda: self._ask(Flush()).get("flushed"),
                    late=lambda: EngineRefusedError("requests that are paused hold the cache of the old weights"),
                )

    def set_name(self, version: str) -> None:
        fields = {"new_version": version, "abort_all_requests": False}
        self._call("update_weight_version", "UpdateWeightVersionReqInput", **fields)

    def _ask(self, message: Message) -> Info:
        action = CHANNEL + json.dumps(message.to_json())
        _, words, *_ = self._call("check_weights", "CheckWeightsReqInput", action=action)
        return merged(answers_of([json.loads(text) for text in words.split(" | ")], "SGLang"))

    def _call(self, method: str, kind: str, **fields: Any) -> Any:
        request = getattr(importlib.import_module("sglang.srt.managers.io_struct"), kind)(**fields)
        call: Coroutine[Any, Any, Any] = getattr(self._manager, method)(request)
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        within = Deadline(_STEP_S, f"SGLang's {method}")
        if not wait([future], within.left_s).done:
            future.cancel()
            raise within.error()
        return future.result()


async def update(original: Callable[..., Any], manager: Any, order: Any, request: Any = None) -> Any:
    """Wrap the server's part of ``/update_weights_from_disk``: load versions, and let SGLang load anything else."""
    if order.load_format != "delta":
        return await original(manager, order, request)
    if request is not None and "origin" in request.headers:
        return False, FROM_A_PAGE, 0
    if order.abort_all_requests:
        manager.abort_request(abort_all=True)

    if manager not in _loads:
        server = _Reloadable(manager, asyncio.get_running_loop())
        _loads[manager] = DiskLoads(server, str(manager.server_args.model_path))

    async def body() -> Info:
        return {name: getattr(order, name) for name in ("model_path", "load_format", "weight_version")}

    answer = await answered(_loads[manager].load, body())
    return answer["success"], answer["message"], answer["num_paused_requests"]


HOOKS: dict[str, Callable[..., Any]] = {
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_weights_from_disk": update
}
