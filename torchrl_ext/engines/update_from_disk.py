"""An engine's ``POST /update_weights_from_disk``, by which a caller names weights in a directory; over any engine.

The body is ``{"model_path", "load_format": "delta", "weight_version"}``; the last may be left out.
``model_path`` is a version directory ``weight_v000007`` or the root that holds it (then the newest version is taken).
The version is staged while the engine serves, and committed in a short pause, in which the engine drops what it cached
with older weights. ``weight_version`` labels the weights.

The answer is ``{"success": bool, "message": str, "num_paused_requests": 0}``, with status 400 where ``success`` is
false. The message says whether the engine still serves its previous weights, or is paused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, final

from msgspec import Struct

from torchrl_ext.base.deadline import Deadline, in_thread
from torchrl_ext.base.errors import DeadlineError, StoreError, WeightSyncError, why
from torchrl_ext.base.messages import Finish, Join, Load, Message, Prefetch, Start
from torchrl_ext.base.types import Info, decoded
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.follower import looks, newer, reach
from torchrl_ext.data.stores.manifest import version_number
from torchrl_ext.data.stores.opening import admit, open_store
from torchrl_ext.data.transports.disk import SharedRoot
from torchrl_ext.data.versions.open_route import needs_old

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import JSONResponse

__all__ = ["PATH", "DiskLoads", "ReloadableEngine", "answered", "handler"]

log = logging.getLogger("torchrl_ext")

PATH = "/update_weights_from_disk"
_BUSY_S = 600.0  # how long a call waits for the previous one
_UNCHANGED = "nothing was loaded"


class _Body(Struct, frozen=True, kw_only=True):
    model_path: str
    load_format: Literal["delta"]
    weight_version: str | int | None = None


class ReloadableEngine(Protocol):
    """The engine that `DiskLoads` drives. Each call returns when it is done; every wait has a deadline."""

    def paused(self) -> bool | None:
        """Return whether the engine has stopped generating."""

    def pause(self) -> None:
        """Freeze running requests; a paused engine stays paused."""

    def resume(self) -> None:
        """Resume generation."""

    def call(self, message: Message) -> Any:
        """Have every worker handle a message; with a `Start`, drop what was cached with older weights."""

    def set_name(self, version: str) -> None:
        """Label the weights in service."""


@final
class DiskLoads:
    """Handles the route's calls, one at a time, and never ends a caller's pause.

    Args:
        engine: the engine that loads the weights.
        model: the checkpoint that it was started with.
    """

    def __init__(self, engine: ReloadableEngine, model: str) -> None:
        self._engine, self._base = engine, model if os.path.isdir(model) else None
        self._one_at_a_time = threading.Lock()
        self._joined: tuple[str, list[Any], str] | None = None  # the workers' root, its parameters, their connection

    def load(self, asked: Any) -> str:
        """Load what a body names.

        Returns:
            A sentence that says which weights are in service.

        Raises:
            ConfigError: a field is invalid, or the engine may not open the path.
            DeadlineError: another call is still running.
            WeightSyncError: the weights were not loaded; the message says whether the engine serves.
        """
        body = decoded(asked, _Body, "the body")
        if not self._one_at_a_time.acquire(timeout=_BUSY_S):
            raise DeadlineError(f"another load has been running for {_BUSY_S:g} s", hint="wait for its answer")
        try:
            chain, version = _located(body.model_path)
            name, label = f"version {version} of {chain.store.url}", body.weight_version
            metas = chain.version(version).params
            params = [meta.to_json() for meta in metas]
            connection = self._stage(chain, version, params)
            load = Load(connection=connection, version=version, params=metas, handoff={})
            self._replace(name, load, str(version if label is None else label))
            self._joined = chain.store.url, params, connection
            return f"{name} is in service"
        finally:
            self._one_at_a_time.release()

    def _stage(self, chain: Chain, version: int, params: list[Any]) -> str:
        """Have the workers stage a version of a root that they join, unless they have; return their connection."""
        engine, joined, self._joined = self._engine, self._joined, None
        if joined is not None and joined[:2] == (chain.store.url, params):
            with suppress(Exception):  # the workers may have joined another trainer since
                engine.call(Prefetch(connection=joined[2], version=version))
                return joined[2]
        connection, shared = uuid.uuid4().hex, SharedRoot(chain.store, uuid.uuid4().hex)
        try:
            info = {
                "transport": "delta",
                "params": params,
                "connection": connection,
                "sender": f"the client that named a version of {chain.store.url} to the engine itself",
                "offer": {**shared.invite(), "base": self._base, "needs_base": _needs_base(chain)},
            }
            engine.call(Join.from_json(info))
        finally:
            shared.clear()
        engine.call(Prefetch(connection=connection, version=version))
        return connection

    def _replace(self, what: str, load: Load, label: str) -> None:
        engine, landing = self._engine, False
        serves = not engine.paused()
        try:
            engine.pause()
            engine.call(Start(connection=load.connection))
            landing = True
            engine.call(load)
            engine.call(Finish(connection=load.connection, version=load.version))
            engine.set_name(label)
        except Exception as error:
            state, hint = "the engine is paused and holds its previous weights", None
            if landing:
                state = "the engine is paused and may hold part of an update"
                hint = "send it again as a full version, then resume the engine"
            elif serves:
                with suppress(Exception):  # then it stays paused
                    engine.resume()
                    state = "the engine still serves its previous weights"
            expected = error.expected if isinstance(error, WeightSyncError) else None
            what = f"{why(error)}; {what} was not {'loaded' if landing else 'started'}"
            raise StoreError(what, expected=expected, state=state, hint=hint) from error
        if serves:
            engine.resume()


def _located(path: str) -> tuple[Chain, int]:
    """Return the chain and the version that a call names: ``ROOT/weight_v000007``, or ``ROOT`` for its newest.

    Raises:
        ConfigError: this engine may not open the path.
        StoreError: there is no such version.
    """
    given = Path(admit(path))
    version = version_number(given.name)
    chain = Chain(open_store(given if version is None else Path(admit(str(given.parent)))))
    within = Deadline(0.0)  # who asks has published, and may ask again
    if version is None:
        found = newer(chain, chain.version, looks(within))
    else:
        found = reach(chain, version, chain.version, looks(within), within)
    if found is None:
        raise StoreError(
            f"{chain.store.url} holds no version",
            state=_UNCHANGED,
            hint="publish every file of a version before you ask an engine to load it",
        )
    return chain, found.version


def _needs_base(chain: Chain) -> bool:
    """Return whether a delta since the last full version is decoded with all old bytes, which workers then keep."""
    with suppress(WeightSyncError, FileNotFoundError):  # who reads the version gets the error
        for number in reversed(chain.numbers()):
            delta = chain.version(number).delta
            if delta is None or needs_old(delta):
                return delta is not None
    return False


def handler(
    load: Callable[[Any], str], read: Callable[[Request], Awaitable[Any]]
) -> Callable[[Request], Awaitable[JSONResponse]]:
    """Return the route's handler, which reads a request's body by ``read`` and calls ``load``: see `answered`."""
    from starlette.responses import JSONResponse  # of the servers that have such routes

    async def handle(request: Request) -> JSONResponse:
        answer = await answered(load, read(request))
        return JSONResponse(answer, status_code=200 if answer["success"] else 400)

    return handle


async def answered(load: Callable[[Any], str], reading: Awaitable[Any]) -> Info:
    """Load in a thread of its own, whose waits have deadlines, and return the answer. Never raises.

    Args:
        load: as `DiskLoads.load`.
        reading: returns the body.
    """
    try:
        body = await reading
        message, success = await asyncio.wrap_future(in_thread(lambda: load(body), "torchrl_ext")), True
    except Exception as error:  # the caller gets it, whatever it is
        log.error("a caller's load failed", exc_info=error)
        message, success = str(error if isinstance(error, WeightSyncError) else why(error)), False
        message = message.encode("utf-8", "replace").decode()  # JSON can name half of a surrogate pair
    return {"success": success, "message": message, "num_paused_requests": 0}
