"""Put versions in service that another process published: from outside of the engines, and from inside of one.

A `PublishedFollower` drives engines through a root by their clients. `DiskLoads` is an engine's own end: it answers
``/update_weights_from_disk``. `torchrl_ext.transports.published` reads the versions for both.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final

from msgspec import structs

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, DeadlineError, StoreError, UpdateError, WeightSyncError, why
from torchrl_ext.messages import CheckAdapter, Finish, Join, Load, Message, Prefetch, Start
from torchrl_ext.stores import open_store
from torchrl_ext.stores.opening import admit
from torchrl_ext.transports.base import Handoff
from torchrl_ext.transports.disk import DiskTransport
from torchrl_ext.transports.published import PublishedRoot
from torchrl_ext.transports.shared_root import VISIBLE_S, Invitation
from torchrl_ext.types import Info, ParamMeta
from torchrl_ext.weights.adapter import adapter_rank
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.digests import tensor_digest

if TYPE_CHECKING:
    from torchrl_ext.rpc.client import EngineClient

__all__ = ["DiskLoads", "PublishedFollower", "ReloadableEngine", "check_adapter"]

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

    def __init__(self, root: DiskTransport | PublishedRoot, engine: EngineClient) -> None:
        # here, since they bring HTTP clients, which an engine may lack
        from torchrl_ext.sync.connection import Connection, Spans, parts_of

        self._root, self._engine, self._spans, self._parts_of = root, engine, Spans(), parts_of
        self._connection = Connection(
            engine, lambda workers, params, within: Handoff(info=root.invite()), transport=root.name
        )

    def take(self, info: Info) -> None:
        """Put one published version in service.

        Args:
            info: from `DiskTransport.newest` or `PublishedRoot.newest`. With a ``path``, engines compare digests of all
                tensors there with their own.

        Raises:
            UpdateError: an engine does not serve it; the same version can be taken again.
        """
        version = info["version"]
        try:
            params = tuple(ParamMeta.from_json(row) for row in info["params"])
            with self._connection.turn():
                self._connection.ensure(params, self._spans)
                self._engine.prefetch(version)
                source = CheckpointSource(Path(info["path"])) if "path" in info and self._engine.verifies else ()
                digests = {name: tensor_digest(tensor) for name, tensor in source}
                with self._engine.updating(version):
                    self._engine.load(info)
                    self._engine.verify(digests)
        except Exception as error:
            self._connection.drop()  # a half-made update is not built upon
            rows = self._engine.rows()
            raise UpdateError(
                f"{why(error)}; weights version {version} of {self._root.root} did not reach every engine",
                rows=rows,
                **self._parts_of(error, rows),
            ) from error

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

    def undo(self) -> None:
        """End an update that changed no weight."""

    def reload(self, path: str, label: str | None) -> None:
        """Load a checkpoint directory; the rest as for `finish`."""

    def recover(self) -> bool:
        """Serve again after a load that failed, where that changed no weight; return whether it does."""


@final
class DiskLoads:
    """Answers an engine's ``/update_weights_from_disk``, one call at a time; no caller's pause ends here.

    Args:
        engine: the engine that loads.

    An engine that a failed load left paused resumes with the next good one. Until then no part of a version is taken:
    with more of it to come, nobody could tell that pause from one of the caller's own.
    """

    def __init__(self, engine: ReloadableEngine) -> None:
        self._engine = engine
        self._one_at_a_time = threading.Lock()
        self._joined: tuple[str, Any] | None = None
        self._connection = ""
        self._stuck: tuple[str | None] | None = None  # a failed load left it paused, with weights of this label

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
            if serves or (self._stuck is not None and self._stuck[0] != self._engine.label()):
                self._stuck = None  # somebody let it serve, or loaded other weights
            what = (self._land if load_format == "delta" else self._reload)(path, label, files, serves)
            return f"{what} is in service"
        finally:
            self._one_at_a_time.release()

    def _land(self, path: str, label: str | None, files: Any, serves: bool) -> str:
        engine, in_parts = self._engine, not serves and self._stuck is None
        base = engine.model if os.path.isdir(engine.model) else None
        root, version = PublishedRoot.of_path(path, base)
        try:
            params, own = root.contents(version, files, parts=in_parts)
        except ConfigError as error:
            if serves or in_parts:
                raise
            expected = "all of its files in one call, since a load failed before"
            raise ConfigError(error.what, expected=expected, state="the engine is still paused") from error
        prefetch = Prefetch(version=version, files=own, label=engine.label())
        self._stage(root, params, prefetch, again=in_parts and own is not None)

        def land() -> None:
            engine.handle(Load(connection=self._connection, version=version, handoff={"params": params}))
            engine.finish(Finish(connection=self._connection, version=version), label)

        begin = Start(connection=self._connection)
        self._replace(f"version {version} of {root.root}", serves, land, lambda: engine.handle(begin))
        self._joined = root.root, params
        return f"version {version} of {root.root}"

    def _stage(self, root: PublishedRoot, params: list[Any], prefetch: Prefetch, *, again: bool) -> None:
        """Have the workers stage a version; they join its root first, unless they did so for the last one.

        Args:
            root, params: of the version.
            prefetch: names it; its connection is filled in here.
            again: the version came in part before, and a worker that joins anew would not know of that.
        """
        engine, known, self._joined = self._engine, self._joined == (root.root, params), None
        if known:
            try:
                engine.handle(structs.replace(prefetch, connection=self._connection))
                return
            except Exception:
                if again:
                    raise
                log.debug("the workers join anew", exc_info=True)  # they may have joined another trainer
        with root.invited(params) as info:
            self._connection = info["connection"]
            engine.handle(Join.of(info))
        engine.handle(structs.replace(prefetch, connection=self._connection))

    def _reload(self, path: str, label: str | None, files: Any, serves: bool) -> str:
        admit(path)
        folder = Path(path).absolute()
        if not folder.is_dir() or not any(folder.glob("*.safetensors")):
            state = "the engine serves what it served" if serves else "the engine is as it was"
            raise StoreError(f"{path} is no checkpoint directory", state=state)
        self._joined = None
        self._replace(path, serves, lambda: self._engine.reload(str(folder), label))
        return path

    def _replace(
        self, what: str, serves: bool, land: Callable[[], None], begin: Callable[[], Any] = lambda: None
    ) -> None:
        """Replace the weights in a pause, and let an engine serve that served before, or that a load left paused.

        Raises:
            StoreError: a step failed; the state says whether the engine serves.
        """
        try:
            self._engine.pause()
            begin()
        except Exception as error:
            raise _failed(f"{what} was not begun", error, self._undone(serves)) from error
        try:
            land()
        except Exception as error:
            state = "the engine is paused, and holds part of an update, or what was cached of older weights"
            hint: str | None = "send it again, as a full version; the next good update resumes the engine"
            if serves and self._engine.recover():
                state, hint = "the engine serves what it served", None
            elif serves:
                self._left_paused()
            raise _failed(f"{what} did not land", error, state, hint) from error
        if serves or self._stuck is not None:
            self._stuck = (self._engine.label(),)
            self._engine.resume()
        self._stuck = None

    def _undone(self, serves: bool) -> str:
        """End an update that changed no weight, let an engine that served before serve again, and return its state."""
        try:
            self._engine.undo()  # on workers that had begun
        except Exception:  # the others have nothing to end, and raise
            log.debug("an update that was not begun everywhere is ended", exc_info=True)
        if not serves:
            return "the engine is paused, and holds what it held before"
        self._left_paused()
        with suppress(Exception):
            self._engine.resume()
            if not self._engine.paused():
                self._stuck = None
                return "the engine serves what it served"
        return "the engine is paused: it did not resume"

    def _left_paused(self) -> None:
        self._stuck = (None,)
        with suppress(Exception):  # an engine that no longer answers
            self._stuck = (self._engine.label(),)


def _failed(what: str, error: Exception, state: str, hint: str | None = None) -> StoreError:
    """Return the error of a load, which begins with its cause."""
    expected = error.expected if isinstance(error, WeightSyncError) else None
    return StoreError(f"{why(error)}; {what}", expected=expected, state=state, hint=hint)


def check_adapter(message: CheckAdapter, *, enabled: bool, max_rank: int | None) -> None:
    """Refuse a LoRA adapter that an engine of these settings cannot take.

    Raises:
        ConfigError: the server was started without LoRA, or for smaller ranks, or may not open the adapters' root.
        StoreError: the root cannot be seen from here.
    """
    if not enabled:
        raise ConfigError("LoRA is not enabled", hint="start the server with --enable-lora")
    rank = adapter_rank(message.params)
    if max_rank is not None and rank > max_rank:
        raise ConfigError(
            f"LoRA rank {rank} is greater than max_lora_rank {max_rank}",
            hint=f"start the server with --max-lora-rank {rank} or more",
        )
    if message.root is not None:
        admit(message.root.get("root"))
        offer = Invitation.from_json(message.root, "the root of an adapter")
        offer.find(open_store(offer.root), Deadline(VISIBLE_S))
