"""Routes that other trainers call and a stock SGLang lacks: ``POST /pull_weights`` and ``GET /get_weight_version``.

They are added where SGLang makes the object that its routes call (`TokenizerManager`), in the process of its HTTP
server. Servers with ``--tokenizer-worker-num`` above 1 load no plugin there, and have not got them.

SGLang's own ``/update_weights_from_disk`` passes over fields that it does not know. With ``load_format="delta"`` its
workers are told here which ``files`` the call names, in a field of the request that no load from disk uses.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable
from typing import Any, Final

from torchrl_ext.errors import DeadlineError, EngineError, WeightSyncError
from torchrl_ext.messages import Message, Poll, Pull
from torchrl_ext.routes import CHANNEL, answers_in, merged
from torchrl_ext.types import Text

__all__ = ["HOOKS", "Land", "announced", "load"]

log = logging.getLogger("torchrl_ext")

_SERVER: Final = "sglang.srt.entrypoints.http_server"
_PULL_S: Final = 7200.0


class Land(Message, frozen=True, kw_only=True):
    """Says what a server's workers need to know of a call that has them land a version directory.

    Attributes:
        files: the names of files that the call has; None for all of the version.
        paused: whether the server is paused.
        label: what the weights in service are called.
    """

    files: list[Any] | None = None
    paused: bool = False
    label: Text | None = None


_OURS: Final = "torchrl_ext"
_manifests: list[Any] = []
"""In a scheduler, while it loads from disk: the call's manifest, from whoever sent the call; see `announced`."""


def announced() -> Land:
    """Return, in a scheduler, what the server's process said of the call that loads from disk.

    Raises:
        ConfigError: a caller put something else in its place.
    """
    for manifest in _manifests:
        if isinstance(manifest, dict) and _OURS in manifest:
            return Land.from_json(manifest[_OURS])
    return Land()


async def update(original: Callable[..., Any], manager: Any, told: Any, request: Any = None) -> Any:
    """Wrap the server's part of ``/update_weights_from_disk``: tell workers of a delta's files, and whether it pauses.

    A delta is no checkpoint that the server could go by: what it says of its model stays as it was.
    """
    if told.load_format != "delta":
        return await original(manager, told, request)
    body = {} if request is None else await request.json()
    label = manager.config_value("weight_version")
    label = None if label is None else str(label)
    told.manifest = {_OURS: Land(files=body.get("files"), paused=bool(manager.is_pause), label=label).to_json()}
    before = manager.served_model_name, manager.model_path, manager.config_value("load_format")
    try:
        return await original(manager, told, request)
    finally:
        manager.served_model_name, manager.model_path = before[:2]
        manager.record_config_updates(_OURS, load_format=before[2])


def load(original: Callable[..., Any], manager: Any, told: Any) -> Any:
    """Wrap a scheduler's part of it: keep what `update` said for the worker that lands the delta.

    Nothing is read here, where an exception would end the server.
    """
    _manifests.append(getattr(told, "manifest", None))
    try:
        return original(manager, told)
    finally:
        _manifests.clear()


def init(original: Callable[..., Any], manager: Any, *args: Any, **settings: Any) -> None:
    """Wrap the making of the object that routes call: add ours to the application, once, where a release has one."""
    original(manager, *args, **settings)
    server = sys.modules.get(_SERVER)
    if server is not None:
        try:
            _add(server.app, manager)
        except Exception as error:  # noqa: BLE001 - it would end the server at its start
            log.warning("this SGLang gets no routes of ours, so that no trainer can have it pull: %r", error)


def _add(app: Any, manager: Any) -> None:
    from sglang.srt.utils.auth import AuthLevel, auth_level
    from starlette.responses import JSONResponse

    async def pull_weights(request: Any) -> Any:
        try:
            message = Pull.of(json.loads(await request.body()))
            await _told(manager, message)
            success, words = True, "Success."
        except Exception as error:  # noqa: BLE001 - told to the caller, whatever it is
            success, words = False, str(error) if isinstance(error, WeightSyncError) else f"{error or type(error)}"
        return JSONResponse({"success": success, "message": words}, status_code=200 if success else 400)

    async def get_weight_version(request: Any) -> Any:
        return JSONResponse({"weight_version": manager.config_value("weight_version")})

    level = auth_level(AuthLevel.ADMIN_OPTIONAL)
    there = {getattr(route, "path", None) for route in app.routes}
    for path, endpoint, method in (
        ("/pull_weights", pull_weights, "POST"),
        ("/get_weight_version", get_weight_version, "GET"),
    ):
        if path not in there:
            app.add_route(path, level(endpoint), methods=[method])


async def _told(manager: Any, message: Message) -> None:
    """Tell every worker what to begin, and wait until all are done; others' messages pass in between."""
    await _ask(manager, message)
    loop = asyncio.get_running_loop()
    until, pause_s = loop.time() + _PULL_S, 0.02
    while (await _ask(manager, Poll(pull=True))).get("working"):
        if loop.time() > until:
            raise DeadlineError(f"the workers are still pulling after {_PULL_S:g} s")
        await asyncio.sleep(pause_s)
        pause_s = min(1.0, 1.5 * pause_s)


async def _ask(manager: Any, message: Message) -> dict[str, Any]:
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    success, words, *_ = await manager.check_weights(
        CheckWeightsReqInput(action=CHANNEL + json.dumps(message.to_json()))
    )
    if not success:
        raise EngineError(words)
    return merged(answers_in({"message": words}))


async def state(original: Callable[..., Any], manager: Any, told: Any, request: Any = None) -> Any:
    """Wrap the server's part of ``/weights_checker``: add to the workers' answer to `State` whether the server itself
    is paused, which its schedulers do not know of every pause."""
    success, words, *rest = await original(manager, told, request)
    action = str(told.action)
    if success and action.startswith(CHANNEL) and json.loads(action.removeprefix(CHANNEL)).get("kind") == "state":
        words += " | " + json.dumps({"server": True, "paused": bool(manager.is_pause)})
    return (success, words, *rest)


_MANAGER: Final = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
HOOKS: dict[str, Callable[..., Any]] = {
    f"{_MANAGER}.__init__": init,
    f"{_MANAGER}.check_weights": state,
    f"{_MANAGER}.update_weights_from_disk": update,
}
