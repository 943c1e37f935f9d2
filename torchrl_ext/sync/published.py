"""Put versions in service that another process published: from outside of the engines, and from inside of one.

A `PublishedFollower` drives engines through a root by their clients. `DiskLoads` is an engine's own end: it answers
``/update_weights_from_disk``. `torchrl_ext.transports.published` reads the versions for both.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Protocol, final

from msgspec import structs

from torchrl_ext.errors import ConfigError, DeadlineError, StoreError, WeightSyncError, why
from torchrl_ext.messages import Finish, Join, Load, Message, Prefetch, Start
from torchrl_ext.rpc.client import EngineClient
from torchrl_ext.stores.opening import admit
from torchrl_ext.sync.connection import Connection, Spans, update_error
from torchrl_ext.transports.base import Handoff
from torchrl_ext.transports.published import PublishedRoot
from torchrl_ext.types import Info, ParamMeta
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.digests import tensor_digest

__all__ = ["DiskLoads", "PublishedFollower", "ReloadableEngine"]

log = logging.getLogger("torchrl_ext")

_FORMATS = (None, "auto", "safetensors", "delta")
_BUSY_S = 600.0  # that a call waits for the one before it


@final
class PublishedFollower:
    """Drives engines through versions that another process publishes under a root.

    A `WeightSender` would write them a second time, under version numbers of its own.

    Args:
        root: reads the versions; the engines reach them under the same path.
        engine: a client, or a fleet.
    """

    def __init__(self, root: PublishedRoot, engine: EngineClient) -> None:
        self._root, self._engine = root, engine
        self._connection = Connection(engine, lambda *_: Handoff(info=root.invite()), transport=root.transport)

    def take(self, info: Info) -> None:
        """Put one published version in service.

        Args:
            info: from `PublishedRoot.newest`. With a ``path``, engines compare digests of all tensors there with their
                own.

        Raises:
            UpdateError: an engine does not serve it; the same version can be taken again.
        """
        version = info["version"]
        try:
            params = tuple(ParamMeta.from_json(row) for row in info["params"])
            with self._connection.turn():
                self._connection.ensure(params, Spans())
                self._engine.prefetch(version)
                source = CheckpointSource(Path(info["path"])) if "path" in info and self._engine.verifies else ()
                digests = {name: tensor_digest(tensor) for name, tensor in source}
                with self._engine.updating(version):
                    self._engine.load(info)
                    self._engine.verify(digests)
        except Exception as error:
            self._connection.drop()  # a half-made update is not built upon
            raise update_error(error, f"weights version {version} of {self._root.root}", self._engine.rows()) from error

    def close(self) -> None:
        """Close the engine's client; the engine keeps serving what it has."""
        self._connection.close()


class ReloadableEngine(Protocol):
    """The engine that `DiskLoads` drives. Each call returns when it is done, and none waits without a deadline."""

    @property
    def model(self) -> str:
        """The checkpoint that it was started with."""

    def paused(self) -> bool:
        """Return whether it makes no tokens."""

    def pause(self) -> None:
        """Freeze what runs. May be called while it is paused."""

    def resume(self) -> None:
        """Let it serve."""

    def label(self) -> str | None:
        """Return what the weights in service are called."""

    def handle(self, message: Message) -> Any:
        """Do what a message says."""

    def finish(self, message: Finish, label: str | None) -> None:
        """End an update that arrived, drop what was cached of older weights, and label it, if there is a label."""

    def reload(self, path: str, label: str | None) -> None:
        """Load a checkpoint directory; the rest as for `finish`."""

    def undo(self, landing: bool) -> bool:
        """End an update that failed, and return whether the weights are what they were.

        Args:
            landing: weights had begun to land, or a checkpoint to load.
        """


@final
class DiskLoads:
    """Answers an engine's ``/update_weights_from_disk``, one call at a time; no caller's pause ends here.

    Args:
        engine: the engine that loads.

    An engine that a failed load left paused resumes with the next good one. Until then it takes no part of a version:
    with more to come, nobody could tell that pause from one of the caller's own.
    """

    def __init__(self, engine: ReloadableEngine) -> None:
        self._engine = engine
        self._one_at_a_time = threading.Lock()
        self._joined: tuple[str, Any, str] | None = None  # the root, its parameters, and the connection
        self._labels: set[str | None] = set()  # the one of the weights, while a pause of ours lasts

    def load(self, path: Any, load_format: Any, label: str | None, files: Any) -> str:
        """Load a checkpoint directory, or with load format ``"delta"`` land a version, or the part that ``files`` name.

        Returns:
            A sentence that names what is in service now.

        Raises:
            ConfigError: a field that cannot be, or a path that the engine may not open.
            DeadlineError: another call goes on.
            WeightSyncError: it was not loaded; the message says whether the engine serves.
        """
        if not isinstance(path, str) or load_format not in _FORMATS:
            raise ConfigError(
                f"the body has model_path {path!r:.200} and load_format {load_format!r:.80}",
                expected='{"model_path": "...", "load_format": "delta", "auto" or null, "weight_version": "..."}',
            )
        if not self._one_at_a_time.acquire(timeout=_BUSY_S):
            raise DeadlineError(f"another load has been under way for {_BUSY_S:g} s", hint="wait for its answer")
        try:
            serves = not self._engine.paused()
            if self._labels and (serves or self._engine.label() not in self._labels):
                self._labels = set()  # somebody let it serve, or loaded other weights
            if load_format == "delta":
                return f"{self._land(path, label, files, serves)} is in service"
            admit(path)
            folder = Path(path).absolute()
            if not folder.is_dir() or not any(folder.glob("*.safetensors")):
                raise StoreError(f"{path} is no checkpoint directory", state="nothing was loaded")
            self._joined = None
            self._replace(path, serves, lambda: self._engine.reload(str(folder), label))
            return f"{path} is in service"
        finally:
            self._one_at_a_time.release()

    def _land(self, path: str, label: str | None, files: Any, serves: bool) -> str:
        """Stage a version while the engine serves, put it in service, and return its name."""
        engine, in_parts = self._engine, not serves and not self._labels
        root, version = PublishedRoot.of_path(path, engine.model)
        params, own = root.contents(version, files, parts=in_parts)
        connection = self._stage(root, params, Prefetch(version=version, files=own, label=engine.label()), in_parts)

        def land() -> None:
            engine.handle(Load(connection=connection, version=version, handoff={"params": params}))
            engine.finish(Finish(connection=connection, version=version), label)

        name = f"version {version} of {root.root}"
        self._replace(name, serves, land, lambda: engine.handle(Start(connection=connection)))
        self._joined = root.root, params, connection
        return name

    def _stage(self, root: PublishedRoot, params: list[Any], prefetch: Prefetch, in_parts: bool) -> str:
        """Have the workers stage a version, and return the connection by which they joined its root, now or before."""
        joined, self._joined = self._joined, None
        if joined is not None and joined[:2] == (root.root, params):
            try:
                self._engine.handle(structs.replace(prefetch, connection=joined[2]))
                return joined[2]
            except Exception:  # they may have joined another trainer
                if in_parts and prefetch.files is not None:
                    raise  # workers that join anew would not know of the parts that came before
                log.debug("the workers join anew", exc_info=True)
        with closing(root):
            info = root.invite(params)
            self._engine.handle(Join.of(info))
        self._engine.handle(structs.replace(prefetch, connection=info["connection"]))
        return str(info["connection"])

    def _replace(
        self, what: str, serves: bool, land: Callable[[], None], begin: Callable[[], Any] = lambda: None
    ) -> None:
        """Replace the weights in a pause, and let an engine serve that served before, or that a load left paused.

        Raises:
            StoreError: a step failed; the state says whether the engine serves.
        """
        if serves:
            self._labels = {self._engine.label()}
        landing = False
        try:
            self._engine.pause()
            begin()
            landing = True
            land()
        except Exception as error:
            if self._labels:
                with suppress(Exception):  # it no longer answers
                    self._labels = {self._engine.label()}
            state, hint = "the engine is paused, and holds what it held before", None
            if not self._engine.undo(landing):
                state = "the engine is paused, and holds part of an update, or what was cached of older weights"
                hint = "send it again, as a full version: a good one resumes an engine that served"
            elif serves:
                with suppress(Exception):  # it stays paused
                    self._engine.resume()
                    self._labels, state = set(), "the engine serves what it served"
            raise StoreError(
                f"{why(error)}; {what} {'did not land' if landing else 'was not begun'}",
                expected=error.expected if isinstance(error, WeightSyncError) else None,
                state=state,
                hint=hint,
            ) from error
        if self._labels:
            self._engine.resume()
            self._labels = set()
