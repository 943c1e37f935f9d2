"""How a version that the trainer published gets to its workers; here: through files that all of them see."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Protocol, final

from torchrl_ext.stores import Store
from torchrl_ext.transports.shared_root import VISIBLE_S, SharedRoot
from torchrl_ext.types import Handoff, Info, ParamMeta
from torchrl_ext.versions.checkpoint_reader import PublishedVersion
from torchrl_ext.versions.open_route import OpenFull
from torchrl_ext.versions.writer import WritesFull

__all__ = ["Carrier", "Link", "SharedFiles"]

_PAUSE_S = 0.005  # between two looks at a version


class Link(Protocol):
    """Connects the ends of a carrier; its methods are as those of a transport."""

    def init_all_workers_group(self, model_metadata: Mapping[str, Any]) -> None:
        """Connect ends that no control layer connects."""

    def open(self, workers: int, params: tuple[ParamMeta, ...]) -> Handoff:
        """Make ready for workers."""

    def join(self, info: Info) -> None:
        """Connect to the trainer that made ``info``."""

    def check_connection(self) -> bool:
        """Return whether this end is connected, once it was."""

    def abort(self) -> None:
        """End waits of other threads."""

    def shutdown(self) -> None:
        """Leave. May be called twice."""


class Carrier(ABC):
    """Both ends of one route between stores.

    Attributes:
        store: where this end has the versions.
        link: connects the ends.
        full: writes keyframes into the store.
        open_full: opens a keyframe of the store.
        wait_s: how long a worker waits for a version that it was told of, in seconds.
    """

    keeps_versions: ClassVar[bool]
    """Whether workers that come in again find the versions that they built on."""

    told: ClassVar[Info]
    """What a worker has to know to build its end, beside what the link says."""

    wait_s: float
    store: Store
    link: Link
    full: WritesFull
    open_full: OpenFull

    @abstractmethod
    def send(self, version: int, base: int | None) -> None:
        """Return when the workers have a version, as far as that is the trainer's to do.

        Args:
            version: it is complete in the store.
            base: what it is a delta on, if it is one.
        """

    @abstractmethod
    def fetch(self, until: float) -> None:
        """Wait for something new in the store of a worker, at most until a monotonic moment."""

    @abstractmethod
    def landed(self) -> None:
        """Let go of what was only kept until the newest version was read."""


@final
class SharedFiles(Carrier):
    """A directory, or an object store, that both ends reach.

    Args:
        store: that.
        run_id: names the trainer's run.
        full: writes keyframes.
        aborted: ends waits.
        timeout_s: deadline of every wait, in seconds.
    """

    keeps_versions: ClassVar[bool] = True
    told: ClassVar[Info] = {}

    def __init__(self, store: Store, run_id: str, full: WritesFull, aborted: threading.Event, timeout_s: float) -> None:
        self.store, self.full, self.open_full = store, full, partial(PublishedVersion, store)
        self._aborted, self.wait_s = aborted, min(VISIBLE_S, timeout_s)
        self._shared = SharedRoot(store, run_id)
        self.link = _Probed(self._shared, store, aborted, timeout_s)

    def send(self, version: int, base: int | None) -> None:
        self._shared.clear()  # whoever came has found it

    def fetch(self, until: float) -> None:
        self._aborted.wait(min(_PAUSE_S, max(0.0, until - time.monotonic())))

    def landed(self) -> None:
        """Do nothing: the trainer collects."""


@final
class _Probed:
    """A link by a probe that the trainer leaves and workers find."""

    def __init__(self, shared: SharedRoot, store: Store, aborted: threading.Event, timeout_s: float) -> None:
        self._shared, self._store, self._aborted, self._timeout_s = shared, store, aborted, timeout_s

    def init_all_workers_group(self, model_metadata: Mapping[str, Any]) -> None:
        """Do nothing: files need no group."""

    def open(self, workers: int, params: tuple[ParamMeta, ...]) -> Handoff:
        return Handoff(info=self._shared.invite())

    def join(self, info: Info) -> None:
        self._shared.find(info, self._timeout_s, self._aborted)

    def check_connection(self) -> bool:
        return self._store.available()

    def abort(self) -> None:
        self._aborted.set()

    def shutdown(self) -> None:
        if self._store.owned:
            self._shared.clear()
