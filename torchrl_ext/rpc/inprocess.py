"""`InProcessEngine`: an engine in the trainer's own process, driven by direct calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

from torchrl_ext.rpc.client import EngineClient, Stopwatch, _nothing
from torchrl_ext.types import EngineInfo, EngineRow, Info, Receiver

__all__ = ["InProcessEngine"]


class InProcessEngine(EngineClient):
    """Drives a module, a TensorDict or a `WeightReceiver` of this process.

    Args:
        engine: what takes the weights; anything but a receiver is wrapped in a `WeightReceiver`.
        url: name for reports.

    `serving` is cleared while paused: a loop that generates with the module waits on it between tokens.
    """

    kind: ClassVar[str] = "inprocess"

    def __init__(self, engine: Any, *, url: str = "inprocess") -> None:
        self._receiver: Receiver = _receiver(engine)
        self._url = url
        self._watch = Stopwatch()
        self._row = EngineRow(engine=url, kind=self.kind, state="serving")
        self._version: int | None = None
        self.serving = threading.Event()
        self.serving.set()

    @property
    def url(self) -> str:
        return self._url

    def info(self) -> EngineInfo:
        return EngineInfo(url=self._url, kind=self.kind, weight_version=str(self._version or ""))

    def connect(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        self._receiver.connect(info)

    def prefetch(self, version: int) -> None:
        self._receiver.prefetch(version)

    def begin(self, version: int) -> None:
        self.pause()
        self._receiver.start()

    def load(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        self._receiver.load(info)

    def commit(self, version: int) -> None:
        self._receiver.finish(version)
        self._version = version
        self.resume()

    def pause(self) -> None:
        self.serving.clear()
        self._watch.start()

    def resume(self) -> None:
        self.serving.set()
        self._watch.stop()

    def rows(self) -> tuple[EngineRow, ...]:
        return (
            EngineRow(
                engine=self._url,
                kind=self.kind,
                state="serving" if self.serving.is_set() else "paused",
                version=self._version,
                pause_s=self._watch.seconds,
            ),
        )

    def close(self) -> None:
        return None


def _receiver(engine: Any) -> Receiver:
    from torchrl_ext.registry import receivers

    receiver = receivers.load("default")
    return engine if isinstance(engine, receiver) else receiver(engine)
