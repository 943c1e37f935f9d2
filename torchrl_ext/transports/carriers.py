"""How a version that the trainer published gets to its workers; here: through files that all of them see."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from functools import partial
from typing import final

from torchrl_ext.stores import Store
from torchrl_ext.transports.shared_root import VISIBLE_S, SharedRoot
from torchrl_ext.types import Handoff, Info
from torchrl_ext.versions.checkpoint_reader import PublishedVersion
from torchrl_ext.versions.open_route import OpenFull
from torchrl_ext.versions.writer import WritesFull

__all__ = ["Carrier", "SharedFiles"]

_PAUSE_S = 0.005  # between two looks at a version


class Carrier(ABC):
    """Both ends of one route between stores.

    Attributes:
        store: where this end has the versions.
        full: writes keyframes into the store.
        open_full: opens a keyframe of the store.
        wait_s: how long a worker waits for a version that it was told of, in seconds.
    """

    wait_s: float
    store: Store
    full: WritesFull
    open_full: OpenFull

    @abstractmethod
    def open(self, workers: int) -> Handoff:
        """Make ready for workers; as `Transport.open`."""

    def joined(self) -> None:  # noqa: B027 - most leave nothing behind
        """Let go of what was only there until the workers had joined."""

    @abstractmethod
    def join(self, info: Info) -> None:
        """Connect to the trainer that made ``info``."""

    @abstractmethod
    def fetch(self, until: float) -> None:
        """Wait for something new in the store of a worker, at most until a monotonic moment."""

    @abstractmethod
    def check_connection(self) -> bool:
        """Return whether this end is connected, once it was."""

    @abstractmethod
    def abort(self) -> None:
        """End waits of other threads."""

    @abstractmethod
    def shutdown(self) -> None:
        """Leave. May be called twice."""


@final
class SharedFiles(Carrier):
    """A directory, or an object store, that both ends reach; a probe that the trainer leaves there tells that they do.

    Args:
        store: that.
        run_id: names the trainer's run.
        full: writes keyframes.
        aborted: ends waits.
        timeout_s: deadline of every wait, in seconds.
    """

    def __init__(self, store: Store, run_id: str, full: WritesFull, aborted: threading.Event, timeout_s: float) -> None:
        self.store, self.full, self.open_full = store, full, partial(PublishedVersion, store)
        self._aborted, self._timeout_s, self.wait_s = aborted, timeout_s, min(VISIBLE_S, timeout_s)
        self._shared = SharedRoot(store, run_id)

    def open(self, workers: int) -> Handoff:
        return Handoff(info=self._shared.invite())

    def joined(self) -> None:
        self._shared.clear()

    def join(self, info: Info) -> None:
        self._shared.find(info, self._timeout_s, self._aborted)

    def fetch(self, until: float) -> None:
        self._aborted.wait(min(_PAUSE_S, max(0.0, until - time.monotonic())))

    def check_connection(self) -> bool:
        return self.store.available()

    def abort(self) -> None:
        self._aborted.set()

    def shutdown(self) -> None:
        if self.store.owned:
            self._shared.clear()
