"""How a version that the trainer published gets to its workers; here: through files that all of them see."""

from __future__ import annotations

import os
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, final

from torchrl_ext.stores import Manifest, open_store, version_name
from torchrl_ext.stores.base import Root
from torchrl_ext.transports.base import deadline
from torchrl_ext.transports.hooks import load_hook
from torchrl_ext.transports.shared_root import SharedRoot
from torchrl_ext.types import Handoff, Info
from torchrl_ext.versions.checkpoint_reader import PublishedVersion
from torchrl_ext.versions.checkpoint_writer import FullWriter
from torchrl_ext.versions.open_route import FullVersion

__all__ = ["Carrier", "SharedFiles"]

_SHORTEST_S, _LONGEST_S = 0.005, 0.1  # between two looks at the pointer


class Carrier(ABC):
    """Both ends of one road.

    Attributes:
        store: where this end has the versions.
        run_id: names the trainer's run.
        keeps_base: whether what workers hold is known when they come in again.
    """

    store: Root
    keeps_base: ClassVar[bool]

    def __init__(self) -> None:
        self.run_id = uuid.uuid4().hex

    @abstractmethod
    def open_full(self, number: int, manifest: Manifest) -> FullVersion:
        """A keyframe, open for reading."""

    def init_group(self) -> None:
        """Enter the group of an address that every end was given, where there is one."""
        return None

    # trainer end

    @abstractmethod
    def open(self, workers: int) -> Handoff:
        """As `Transport.open`; the info is for `join`."""

    @abstractmethod
    def begin(self) -> None:
        """A version is about to be written.

        Raises:
            TransportError: this end does not send.
        """

    @abstractmethod
    def keyframes(self, shard_bytes: int, files: Any) -> Any:
        """Writes keyframes; has the methods of `FullWriter`, whose arguments these are."""

    def written(self, version: int) -> None:
        """A version is complete."""
        return None

    def push(self, version: int) -> None:
        """Return when the workers have a version, as far as that is this end's to do."""
        return None

    # worker end

    @abstractmethod
    def join(self, info: Info, timeout_s: float, aborted: threading.Event) -> None:
        """Be sure that what the trainer publishes will be seen here."""

    @abstractmethod
    def look(self, version: int) -> None:
        """Make visible here what the trainer has published, ``version`` above all."""

    @abstractmethod
    def newer(self, unseen: Callable[[], int], timeout_s: float, aborted: threading.Event) -> int | None:
        """A version that the reader has not, or None when none came within ``timeout_s`` seconds.

        Args:
            unseen: tells the newest one in the store, 0 where there is none or the reader has it.
        """

    def read(self) -> None:
        """The newest version was read and is held."""
        return None

    # both ends

    @abstractmethod
    def alive(self) -> bool:
        """Whether the road is open, once it was used."""

    def abort(self) -> None:
        """End waits of other threads."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Leave. May be called twice."""


@final
class SharedFiles(Carrier):
    """A directory, or an object store, that both ends reach.

    Args:
        root: its path or URL.
        storage_options: of the fsspec filesystem behind a URL.
        post_write_hook, pre_read_hook: as in `DeltaTransport`.
    """

    keeps_base: ClassVar[bool] = True

    def __init__(
        self,
        root: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
        post_write_hook: str | None = None,
        pre_read_hook: str | None = None,
    ) -> None:
        super().__init__()
        self.store = open_store(root, storage_options)
        self._shared = SharedRoot(self.store, self.run_id)
        self._wrote, self._reading = load_hook(post_write_hook), load_hook(pre_read_hook)

    def keyframes(self, shard_bytes: int, files: Any) -> FullWriter:
        return FullWriter(shard_bytes, files)

    def open_full(self, number: int, manifest: Manifest) -> FullVersion:
        return PublishedVersion(self.store, number, manifest)

    def open(self, workers: int) -> Handoff:
        return Handoff(info=self._shared.invite())

    def begin(self) -> None:
        self._shared.clear()

    def written(self, version: int) -> None:
        self._wrote(self.store.url, version_name(version))

    def join(self, info: Info, timeout_s: float, aborted: threading.Event) -> None:
        self._shared.find(info, timeout_s, aborted)

    def look(self, version: int) -> None:
        self._reading(self.store.url)

    def newer(self, unseen: Callable[[], int], timeout_s: float, aborted: threading.Event) -> int | None:
        until, pause = deadline(timeout_s), _SHORTEST_S
        while True:
            self._reading(self.store.url)
            newest = unseen()
            if newest:
                return newest
            if aborted.wait(min(pause, max(0.0, until - time.monotonic()))) or time.monotonic() >= until:
                return None
            pause = min(2 * pause, _LONGEST_S)

    def alive(self) -> bool:
        return self.store.available()

    def close(self) -> None:
        if self.store.owned:
            self._shared.clear()
