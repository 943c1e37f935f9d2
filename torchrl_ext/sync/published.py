"""Loading of versions that another process published: an engine's ``/update_weights_from_disk``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, final

from msgspec import structs

from torchrl_ext.errors import ConfigError, DeadlineError, StoreError, WeightSyncError, why
from torchrl_ext.messages import Finish, Join, Load, Message, Prefetch, Start
from torchrl_ext.stores.opening import admit
from torchrl_ext.transports.published import Joined, PublishedRoot

__all__ = ["DiskLoads", "ReloadableEngine"]

_FORMATS = (None, "auto", "safetensors", "delta")
_BUSY_S = 600.0  # how long a call waits for the previous one


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


@final
class DiskLoads:
    """Handles an engine's ``/update_weights_from_disk``, one call at a time, and never ends a caller's pause.

    If a failed load left the engine paused, the next successful one resumes it. Until then the engine accepts only full
    versions, because between parts of one it could not tell its own pause from the caller's.

    Args:
        engine: the engine that loads the weights.
    """

    def __init__(self, engine: ReloadableEngine) -> None:
        self._engine = engine
        self._one_at_a_time = threading.Lock()
        self._joined: Joined | None = None
        self._labels: set[str | None] = set()  # label of the weights while a pause of our own lasts, otherwise empty

    def load(self, path: Any, load_format: Any, label: str | None, files: Any, *, flush: bool = True) -> str:
        """Load a checkpoint directory, or with load format ``"delta"`` a published version.

        Args:
            path: the checkpoint directory; for a published version, as in `PublishedRoot.of_path`.
            load_format: None, ``"auto"``, ``"safetensors"`` or ``"delta"``.
            label: label for the new weights, or None.
            files: names of the version's files to load; None for all of them.
            flush: drop what was cached with older weights.

        Returns:
            A sentence that says which weights are in service.

        Raises:
            ConfigError: a field is invalid, or the engine may not open the path.
            DeadlineError: another call is still running.
            WeightSyncError: the weights were not loaded; the message says whether the engine serves.
        """
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
                return f"{self._land(path, label, files, serves, flush)} is in service"
            folder = Path(admit(path))
            if not folder.is_dir() or not any(folder.glob("*.safetensors")):
                raise StoreError(f"{path} is not a checkpoint directory", state="nothing was loaded")
            self._joined = None
            self._replace(path, serves, flush, lambda: self._engine.reload(str(folder), label))
            return f"{path} is in service"
        finally:
            self._one_at_a_time.release()

    def _land(self, path: str, label: str | None, files: Any, serves: bool, flush: bool) -> str:
        """Stage a version while the engine serves, put it in service, and return its name."""
        engine, in_parts = self._engine, not serves and not self._labels
        root, version = PublishedRoot.of_path(path, engine.model)
        params, own = root.contents(version, files, parts=in_parts)
        prefetch = Prefetch(version=version, files=own, label=engine.label())
        before, self._joined = self._joined, None
        joined = root.joined(
            before,
            params,
            join=lambda info: engine.handle(Join.of(info)),
            go_on=lambda connection: engine.handle(structs.replace(prefetch, connection=connection)),
            # after another join, workers would not have the earlier parts
            lost=() if in_parts and own is not None else Exception,
        )
        connection = joined.connection

        def land() -> None:
            engine.handle(Load(connection=connection, version=version, handoff={"params": params}))
            engine.finish(Finish(connection=connection, version=version), label)

        name = f"version {version} of {root.root}"
        self._replace(name, serves, flush, land, lambda: engine.handle(Start(connection=connection)))
        self._joined = joined
        return name

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
