"""An engine's ``POST /update_weights_from_disk``, by which a caller names weights in a directory; over any engine.

The body is ``{"model_path", "load_format", "weight_version", "flush_cache"}``, of which only the first is needed. With
load format ``"delta"``, ``model_path`` is a version directory ``weight_v000007`` or the root that holds it (then the
newest version is taken): the version is staged while the engine serves, and committed in a short pause. Otherwise it is
a checkpoint directory. ``weight_version`` labels the weights, and ``flush_cache``: false keeps what was cached with
older weights.

The answer is ``{"success": bool, "message": str, "num_paused_requests": 0}``, with status 400 where ``success`` is
false. The message says whether the engine still serves its previous weights, or is paused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

from torchrl_ext.deadline import in_thread
from torchrl_ext.errors import ConfigError, DeadlineError, StoreError, WeightSyncError, why
from torchrl_ext.messages import Finish, Join, Load, Message, Prefetch, Start
from torchrl_ext.stores import Chain, open_store, version_number
from torchrl_ext.stores.opening import admit
from torchrl_ext.transports.shared_root import SharedRoot
from torchrl_ext.types import Info, decoded
from torchrl_ext.versions.open_delta import needs_old

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import JSONResponse

__all__ = ["PATH", "DiskLoads", "ReloadableEngine", "answered", "handler"]

log = logging.getLogger("torchrl_ext")

PATH = "/update_weights_from_disk"
_FORMATS = (None, "auto", "safetensors", "delta")
_BUSY_S = 600.0  # how long a call waits for the previous one
_UNCHANGED = "nothing was loaded"


class ReloadableEngine(Protocol):
    """The engine that `DiskLoads` drives. Each call returns when it is done; every wait has a deadline."""

    @property
    def model(self) -> str:
        """The checkpoint that the engine was started with."""

    def paused(self) -> bool:
        """Return whether the engine has stopped generating."""

    def pause(self) -> None:
        """Freeze running requests; a paused engine stays paused."""

    def resume(self) -> None:
        """Resume generation."""

    def label(self) -> str | None:
        """Return the label of the weights in service."""

    def handle(self, message: Message) -> Any:
        """Handle a message."""

    def finish(self, message: Finish, label: str | None) -> None:
        """End a complete update, and set the label, if there is one."""

    def reload(self, path: str, label: str | None) -> None:
        """Load a checkpoint directory, and set the label, if there is one."""

    def drop_cached(self) -> None:
        """Drop everything cached with older weights."""

    def undo(self, landing: bool) -> bool:
        """End a failed update, and return whether the engine still has its old weights.

        Args:
            landing: whether weights or a checkpoint had begun to load.
        """


class _Joined(NamedTuple):
    """What workers joined: a root, for versions with these parameters (JSON), under a connection."""

    root: str
    params: list[Any]
    connection: str


@final
class DiskLoads:
    """Handles the route's calls, one at a time, and never ends a caller's pause.

    If a failed load left the engine paused, the next successful one resumes it.

    Args:
        engine: the engine that loads the weights.
    """

    def __init__(self, engine: ReloadableEngine) -> None:
        self._engine = engine
        self._one_at_a_time = threading.Lock()
        self._joined: _Joined | None = None
        self._labels: set[str | None] = set()  # label of the weights while a pause of our own lasts, otherwise empty

    def load(self, body: Info) -> str:
        """Load what a body names.

        Returns:
            A sentence that says which weights are in service.

        Raises:
            ConfigError: a field is invalid, or the engine may not open the path.
            DeadlineError: another call is still running.
            WeightSyncError: the weights were not loaded; the message says whether the engine serves.
        """
        path, load_format, label = body.get("model_path"), body.get("load_format"), body.get("weight_version")
        if label is not None:
            label = str(label) if isinstance(label, int) else decoded(label, str, "weight_version")
        flush = decoded(body.get("flush_cache", True), bool, "flush_cache")
        if not isinstance(path, str) or load_format not in _FORMATS:
            raise ConfigError(
                f"the body has model_path {path!r:.200} and load_format {load_format!r:.80}",
                expected='{"model_path": "...", "load_format": "delta", "auto" or null, "weight_version": "..."}',
            )
        if not self._one_at_a_time.acquire(timeout=_BUSY_S):
            raise DeadlineError(f"another load has been running for {_BUSY_S:g} s", hint="wait for its answer")
        try:
            serves = not self._engine.paused()
            if self._labels and (serves or self._engine.label() not in self._labels):
                self._labels = set()  # another caller resumed the engine or loaded other weights
            if load_format == "delta":
                return f"{self._land(path, label, serves, flush)} is in service"
            folder = Path(admit(path))
            if not folder.is_dir() or not any(folder.glob("*.safetensors")):
                raise StoreError(f"{path} is not a checkpoint directory", state=_UNCHANGED)
            self._joined = None
            self._replace(path, serves, flush, lambda: self._engine.reload(str(folder), label))
            return f"{path} is in service"
        finally:
            self._one_at_a_time.release()

    def _land(self, path: str, label: str | None, serves: bool, flush: bool) -> str:
        """Stage a version while the engine serves, put it in service, and return its name."""
        engine = self._engine
        chain, version = _located(path)
        root, name = chain.store.url, f"version {version} of {chain.store.url}"
        try:
            params = [meta.to_json() for meta in chain.version(version).params]
        except FileNotFoundError as error:
            raise StoreError(
                f"{root} holds no version {version}",
                state=_UNCHANGED,
                hint="publish every file of a version before you ask an engine to load it",
            ) from error
        joined, self._joined = self._joined, None
        if joined is not None and joined[:2] == (root, params):
            try:
                engine.handle(Prefetch(connection=joined.connection, version=version))
            except Exception:  # the workers may have joined another trainer since
                log.debug("the workers join %s again", root, exc_info=True)
                joined = None
        else:
            joined = None
        if joined is None:
            joined = _Joined(root, params, self._join(chain, params))
            engine.handle(Prefetch(connection=joined.connection, version=version))
        connection = joined.connection

        def land() -> None:
            engine.handle(Load(connection=connection, version=version, handoff={"params": params}))
            engine.finish(Finish(connection=connection, version=version), label)

        self._replace(name, serves, flush, land, lambda: engine.handle(Start(connection=connection)))
        self._joined = joined
        return name

    def _join(self, chain: Chain, params: list[Any]) -> str:
        """Have the workers join a root, as that of a delta transport, and return their connection."""
        model, connection, shared = self._engine.model, uuid.uuid4().hex, SharedRoot(chain.store, uuid.uuid4().hex)
        try:
            info = {
                **shared.invite(),
                "transport": "delta",
                "base": model if os.path.isdir(model) else None,
                "needs_base": _needs_base(chain),
                "params": params,
                "connection": connection,
                "sender": f"the client that named a version of {chain.store.url} to the engine itself",
            }
            self._engine.handle(Join.of(info))
        finally:
            shared.clear()
        return connection

    def _replace(
        self,
        what: str,
        serves: bool,
        flush: bool,
        land: Callable[[], None],
        begin: Callable[[], Any] = lambda: None,
    ) -> None:
        """Replace the weights in a pause; resume the engine if it served before or an earlier load left it paused."""
        if serves:
            self._labels = {self._engine.label()}
        landing = False
        try:
            self._engine.pause()
            begin()
            landing = True
            land()
            if flush:
                self._engine.drop_cached()
        except Exception as error:
            if self._labels:
                with suppress(Exception):  # the engine may not answer
                    self._labels = {self._engine.label()}
            state, hint = "the engine is paused and holds its previous weights", None
            if not self._engine.undo(landing):
                state = "the engine is paused and holds part of an update, or a cache of older weights"
                hint = "send it again as a full version; a successful one resumes an engine that was serving"
            elif serves:
                with suppress(Exception):  # then it stays paused
                    self._engine.resume()
                    self._labels, state = set(), "the engine still serves its previous weights"
            raise StoreError(
                f"{why(error)}; {what} {'was not loaded' if landing else 'was not started'}",
                expected=error.expected if isinstance(error, WeightSyncError) else None,
                state=state,
                hint=hint,
            ) from error
        if self._labels:
            self._engine.resume()
            self._labels = set()


def _located(path: str) -> tuple[Chain, int]:
    """Return the chain and the version that a call names: ``ROOT/weight_v000007``, or ``ROOT`` for its newest.

    Raises:
        ConfigError: this engine may not open the path.
        StoreError: there is no version.
    """
    given = Path(admit(path))
    version = version_number(given.name)
    if version is None and not given.is_dir():
        raise StoreError(f"{path} is not a directory", state=_UNCHANGED)
    chain = Chain(open_store(given if version is None else Path(admit(str(given.parent)))))
    version = chain.latest() if version is None else version
    if not version:
        raise StoreError(f"{path} holds no version", state=_UNCHANGED)
    return chain, version


def _needs_base(chain: Chain) -> bool:
    """Return whether a delta since the last full version is decoded with all old bytes, which workers then keep."""
    with suppress(WeightSyncError, FileNotFoundError):  # who reads the version gets the error
        for number in reversed(chain.numbers()):
            delta = chain.version(number).delta
            if delta is None:
                break
            if needs_old(delta):
                return True
    return False


def handler(
    load: Callable[[Info], str], read: Callable[[Request], Awaitable[Any]]
) -> Callable[[Request], Awaitable[JSONResponse]]:
    """Return the route's handler.

    Args:
        load: as `DiskLoads.load`.
        read: returns the body of a request.
    """
    from starlette.responses import JSONResponse  # of the servers that have such routes

    async def handle(request: Request) -> JSONResponse:
        answer = await answered(load, read(request))
        return JSONResponse(answer, status_code=200 if answer["success"] else 400)

    return handle


async def answered(load: Callable[[Info], str], reading: Awaitable[Any]) -> Info:
    """Load in a thread of its own, whose waits have deadlines, and return the answer. Never raises.

    Args:
        load: as `DiskLoads.load`.
        reading: returns the body.
    """
    try:
        body = await reading
        if not isinstance(body, Mapping):
            raise ConfigError(f"the body is {body!r:.200}", expected="an object")
        said = await asyncio.wrap_future(in_thread(lambda: load(dict(body)), "torchrl_ext"))
        return {"success": True, "message": said, "num_paused_requests": 0}
    except Exception as error:  # the caller gets it, whatever it is
        log.error("a caller's load failed", exc_info=error)
        message = str(error) if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"
        # half of a surrogate pair, which JSON can name, could not be encoded
        message = message.encode("utf-8", "replace").decode()
        return {"success": False, "message": message, "num_paused_requests": 0}
