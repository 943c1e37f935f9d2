"""What slime's and vime's trainers ask of an engine, over an `Engine`: pull, load from disk, label.

Bodies and answers are those of slime's SGLang (``/pull_weights``, ``/update_weights_from_disk``) and of vime's vLLM
(``/collective_rpc`` with ``pull_weights`` or ``reload_weights``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torchrl_ext.embedded.engine import Engine
from torchrl_ext.errors import ConfigError
from torchrl_ext.messages import Finish, Message, Pull, State
from torchrl_ext.sync.published import DiskLoads
from torchrl_ext.sync.worker_end import pull
from torchrl_ext.types import Info

__all__ = ["Dialects"]


@final
class Dialects:
    """Answers the calls of other trainers, one at a time; a pull goes on beside generation and beside other calls.

    Args:
        engine: the one that they drive.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loads = DiskLoads(_Reloadable(engine))

    def pull(self, body: Info) -> None:
        """Bring a checkpoint on this host to a version (`torchrl_ext.versions.local_checkpoint`).

        Raises:
            WeightSyncError: see there.
        """
        pull(Pull.of(body), self._engine.model_dir)

    def update(self, body: Info) -> None:
        """Load a checkpoint directory or a version; see `DiskLoads.load`.

        Raises:
            ConfigError: a field that cannot be.
            WeightSyncError: it was not loaded.
        """
        label = body.get("weight_version")
        if not isinstance(label, str | None):
            raise ConfigError(f"weight_version is {label!r:.80}", expected="text")
        self._loads.load(body.get("model_path"), body.get("load_format"), label, body.get("files"))

    def rename(self, body: Info) -> Info:
        """Label the weights in service.

        Raises:
            ConfigError: there is no label.
        """
        label = body.get("new_version")
        if not isinstance(label, str):
            raise ConfigError(f"new_version is {label!r:.80}", expected="text")
        self._engine.scheduler.version = label
        return {"new_version": label}

    def call(self, body: Info) -> Info:
        """Do what a method of vLLM's workers does.

        Raises:
            ConfigError: there is no such method here.
            WeightSyncError: it failed.
        """
        method, told = body.get("method"), body.get("kwargs")
        told = told if isinstance(told, Mapping) else {}
        if method == "pull_weights":
            self.pull({**told})
            return {"results": [{"success": True, "weight_version": str(told["target_version"])}]}
        if method == "reload_weights":
            self._loads.load(told.get("weights_path"), None, None, None)
            return {"results": [None]}
        raise ConfigError(f"there is no method {method!r:.80} here", expected="pull_weights or reload_weights")


class _Reloadable:
    """The engine as `DiskLoads` drives it, which refuses to serve weights that are not whole."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.model, self.resume = engine.model_dir, engine.resume

    def paused(self) -> bool:
        return self._engine.scheduler.paused

    def pause(self) -> None:
        self._engine.pause("keep", 0.0)

    def label(self) -> str:
        return self._engine.scheduler.version

    def handle(self, message: Message) -> Any:
        return self._engine.handle(message)

    def finish(self, message: Finish, label: str | None) -> None:
        self._engine.finish(label)
        self._engine.scheduler.forget()  # old weights made those keys and values

    def reload(self, path: str, label: str | None) -> None:
        self._engine.reload(path, label)
        self._engine.scheduler.forget()

    def undo(self, landing: bool) -> bool:
        return not landing or bool(self._engine.handle(State())["whole"])
