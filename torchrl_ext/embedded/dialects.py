"""What slime's and vime's trainers ask of an engine, over an `Engine`: pull, load from disk, label.

Bodies and answers are those of slime's SGLang (``/pull_weights``, ``/update_weights_from_disk``) and of vime's vLLM
(``/collective_rpc`` with ``pull_weights`` or ``reload_weights``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, final

from torchrl_ext.embedded.engine import Engine
from torchrl_ext.errors import ConfigError, EngineRefusedError
from torchrl_ext.messages import Load, Prefetch, Pull, Start
from torchrl_ext.stores.opening import admit
from torchrl_ext.sync.roots import invited, locate, parameters, part
from torchrl_ext.sync.worker_end import pull
from torchrl_ext.types import Info

__all__ = ["Dialects"]

_FORMATS = (None, "auto", "safetensors", "delta")


@final
class Dialects:
    """Answers the calls of other trainers, one at a time; a pull goes on beside generation and beside other calls.

    Args:
        engine: the one that they drive.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._one_at_a_time = threading.Lock()
        self._joined: tuple[str, Any] | None = None

    def pull(self, body: Info) -> None:
        """Bring a checkpoint on this host to a version (`torchrl_ext.versions.local_checkpoint`).

        Raises:
            WeightSyncError: see there.
        """
        pull(Pull.asked(body), self._engine.model_dir)

    def update(self, body: Info) -> None:
        """Load a checkpoint directory, or with load format ``"delta"`` land a version, or the part that ``files`` name.

        An engine that the caller paused stays paused.

        Raises:
            ConfigError: a field that cannot be.
            WeightSyncError: it was not loaded.
        """
        path, kind, label = body.get("model_path"), body.get("load_format"), body.get("weight_version")
        if not isinstance(path, str) or kind not in _FORMATS or not isinstance(label, str | None):
            raise ConfigError(
                f"the body is {body!r:.200}",
                expected='{"model_path": "...", "load_format": "delta", "auto" or null, "weight_version": "..."}',
            )
        with self._one_at_a_time:
            if kind == "delta":
                self._land(path, label, body.get("files"))
            else:
                self._reload(path, label)

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
            with self._one_at_a_time:
                self._reload(str(told.get("weights_path")), None)
            return {"results": [None]}
        raise ConfigError(f"there is no method {method!r:.80} here", expected="pull_weights or reload_weights")

    def _land(self, path: str, label: str | None, files: Any) -> None:
        engine = self._engine
        root, version = locate(path)
        params = parameters(root, version, engine.model_dir, files, parts=engine.scheduler.paused)
        if self._joined != (root, params):
            self._joined = None
            with invited(root, f"reader-{os.getpid()}", engine.model_dir, params) as message:
                engine.handle(message)
        self._joined, joined = None, (root, params)
        engine.handle(Prefetch(version=version, files=part(root, version, files), label=engine.scheduler.version))
        with self._paused():
            engine.handle(Start())
            engine.handle(Load(version=version, handoff={"params": params}))
            engine.finish(label)
        self._joined = joined

    def _reload(self, path: str, label: str | None) -> None:
        admit(path)
        self._joined = None
        with self._paused():
            self._engine.reload(path, label)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Freeze what runs; an engine that served serves again, unless its weights are not whole."""
        engine = self._engine
        serves = not engine.scheduler.paused
        if serves:
            engine.pause("keep", 0.0)
        try:
            yield
        except BaseException:
            if serves:
                with suppress(EngineRefusedError):
                    engine.resume()
            raise
        engine.scheduler.forget()  # old weights made those keys and values
        if serves:
            engine.resume()
