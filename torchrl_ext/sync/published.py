"""What an engine reads under the roots of trainers that do not invite it: versions that a call names, and adapters.

`DiskLoads` takes the calls of an engine's ``/update_weights_from_disk``; `torchrl_ext.transports.published` has what their
paths mean.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, final

from torchrl_ext.errors import ConfigError, DeadlineError, StoreError
from torchrl_ext.messages import CheckAdapter, Finish, Join, Load, Message, Prefetch, Start
from torchrl_ext.stores import open_store
from torchrl_ext.stores.opening import admit
from torchrl_ext.transports.published import PublishedRoot, locate, parameters, part
from torchrl_ext.transports.shared_root import VISIBLE_S, SharedRoot
from torchrl_ext.types import adapter_rank

__all__ = ["DiskLoads", "Driven", "check_adapter", "invited"]

log = logging.getLogger("torchrl_ext")

_FORMATS = (None, "auto", "safetensors", "delta")
_BUSY_S = 600.0  # that a call waits for the one before it


class Driven(Protocol):
    """An engine as `DiskLoads` drives it. Each call returns when it is done, and none waits without a deadline."""

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
        engine: what is driven.
        reader: a name for its workers.

    An engine that a load of ours left paused resumes with the next good one. Until then no part of a version is taken:
    with more of it to come, nobody could tell that pause from one of the caller's own.
    """

    def __init__(self, engine: Driven, reader: str) -> None:
        self._engine, self._reader = engine, reader
        self._one_at_a_time = threading.Lock()
        self._joined: tuple[str, Any] | None = None
        self._connection = ""
        self._stuck: tuple[str | None] | None = None  # a failure of ours left it paused, with weights of this label

    def load(self, path: Any, load_format: Any, label: str | None, files: Any) -> str:
        """Load a checkpoint directory, or with load format ``"delta"`` land a version, or the part that ``files`` name.

        Returns:
            What is in service now.

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
            if load_format == "delta":
                return self._land(path, label, files, serves)
            return self._reload(path, label, serves)
        finally:
            self._one_at_a_time.release()

    def _land(self, path: str, label: str | None, files: Any, serves: bool) -> str:
        engine = self._engine
        root, version = locate(path)
        in_parts = not serves and self._stuck is None
        try:
            params = parameters(root, version, engine.model, files, parts=in_parts)
        except ConfigError as error:
            if serves or in_parts:
                raise
            expected = "all of its files in one call, since a load failed before"
            raise ConfigError(error.what, expected=expected, state="the engine is still paused") from error
        own = part(root, version, files)
        prefetch = Prefetch(connection=self._connection, version=version, files=own, label=engine.label())
        known, self._joined = self._joined == (root, params), None
        if known:
            try:
                engine.handle(prefetch)
            except Exception:
                if in_parts and own is not None:  # who joins anew does not know of the parts before
                    raise
                log.debug("the workers are joined anew", exc_info=True)  # they may have joined another trainer
                known = False
        if not known:
            base = engine.model if os.path.isdir(engine.model) else None
            with invited(root, self._reader, base, params) as message:
                self._connection = message.connection
                engine.handle(message)
            engine.handle(replace(prefetch, connection=self._connection))
        with self._beginning(f"version {version}", serves):
            engine.pause()
            engine.handle(Start(connection=self._connection))
        with self._landing(f"version {version}", serves):
            engine.handle(Load(connection=self._connection, version=version, handoff={"params": params}))
            engine.finish(Finish(connection=self._connection, version=version), label)
        self._joined = root, params
        self._resume(serves)
        return f"version {version} of {root} is in service"

    def _reload(self, path: str, label: str | None, serves: bool) -> str:
        admit(path)
        folder = Path(path).absolute()
        if not folder.is_dir() or not any(folder.glob("*.safetensors")):
            state = "the engine serves what it served" if serves else "the engine is as it was"
            raise StoreError(f"{path} is no checkpoint directory", state=state)
        self._joined = None
        with self._beginning(path, serves):
            self._engine.pause()
        with self._landing(path, serves):
            self._engine.reload(str(folder), label)
        self._resume(serves)
        return f"{path} is in service"

    def _resume(self, serves: bool) -> None:
        """Let an engine serve that served before, or that a load of ours left paused."""
        if serves or self._stuck is not None:
            self._stuck = (self._engine.label(),)
            self._engine.resume()
        self._stuck = None

    @contextmanager
    def _beginning(self, what: str, serves: bool) -> Iterator[None]:
        """Turn a failure into an error that says whether the engine serves what it served."""
        try:
            yield
        except Exception as error:
            raise StoreError(f"{what} was not begun: {error}", state=self._undone(serves)) from error

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

    @contextmanager
    def _landing(self, what: str, serves: bool) -> Iterator[None]:
        """Turn a failure into an error that says whether the engine stays paused."""
        try:
            yield
        except Exception as error:
            state = "the engine is paused, and holds part of an update, or what was cached of older weights"
            hint: str | None = "send it again, as a full version; the next good update resumes the engine"
            if serves and self._engine.recover():
                state, hint = "the engine serves what it served", None
            elif serves:
                self._left_paused()
            raise StoreError(f"{what} did not land: {error}", state=state, hint=hint) from error

    def _left_paused(self) -> None:
        self._stuck = (None,)
        with suppress(Exception):  # an engine that no longer answers
            self._stuck = (self._engine.label(),)


@contextmanager
def invited(root: str, reader: str, base: str | None, params: list[Any]) -> Iterator[Join]:
    """Yield the message by which workers join the chain under ``root`` where no trainer invites them.

    Args:
        root: where the versions lie.
        reader: a name for these workers.
        base: the checkpoint that the engine was started with, where it is a local one.
        params: what a version holds, as `parameters` gives it.
    """
    published = PublishedRoot(root, base, reader=reader)
    try:
        own = {"connection": uuid.uuid4().hex, "sender": f"whoever named a version of {root} to the engine itself"}
        yield Join.of({**published.invite(), "params": params, **own})
    finally:
        published.close()


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
        SharedRoot(open_store(message.root["root"]), "").find(message.root, VISIBLE_S, threading.Event())
