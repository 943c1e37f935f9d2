"""The embedded engine as `torchrl_ext.engines.update_from_disk` drives it."""

from __future__ import annotations

from typing import Any, final

from torchrl_ext.base.messages import Finish, Message, State
from torchrl_ext.engines.embedded.engine import EmbeddedEngine

__all__ = ["Reloadable"]


@final
class Reloadable:
    """An `EmbeddedEngine` that refuses to serve incomplete weights; see
    `torchrl_ext.engines.update_from_disk.ReloadableEngine`.

    Weights that are loaded drop the keys and values of running requests; there is no other cache.
    """

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine, self.model, self.resume = engine, engine.model_dir, engine.resume

    def paused(self) -> bool:
        return self._engine.scheduler.paused

    def pause(self) -> None:
        self._engine.pause("keep", 0.0)

    def handle(self, message: Message) -> Any:
        return self._engine.handle(message)

    def finish(self, message: Finish, label: str | None) -> None:
        self._engine.handle(message)
        if label is not None:
            self._engine.label(label)

    def reload(self, path: str, label: str | None) -> None:
        self._engine.reload(path, label)

    def drop_cached(self) -> None:
        self._engine.scheduler.forget()

    def undo(self, landing: bool) -> bool:
        return not landing or bool(self._engine.handle(State())["whole"])
