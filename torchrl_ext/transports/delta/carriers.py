"""Carriers take a published version from the trainer to its workers: through shared files, or by a broadcast.

A broadcast sends through a collective group what a shared directory would hold, and writes nothing to any filesystem. A
keyframe is the tensors themselves (`KeptTensors`). The other files of a version, all that a delta
is, travel behind them as one tensor of bytes, so that everything that reads or writes one is the same code as for a
directory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor

from torchrl_ext.deadline import pauses
from torchrl_ext.errors import ConfigError, DeadlineError, IntegrityError, StoreError
from torchrl_ext.stores import Chain, Store, version_name
from torchrl_ext.stores.base import MemoryStore
from torchrl_ext.stores.manifest import MANIFEST
from torchrl_ext.stores.versions import version_number
from torchrl_ext.transports.base import deadline
from torchrl_ext.transports.collective.transport import VLLMCollectiveTransport
from torchrl_ext.transports.delta.kept_tensors import FILES, KeptTensors
from torchrl_ext.transports.shared_root import VISIBLE_S, SharedRoot
from torchrl_ext.types import Handoff, Info, ParamMeta
from torchrl_ext.versions.checkpoint_reader import PublishedVersion
from torchrl_ext.versions.writer import WritesFull
from torchrl_ext.weights.source import MappingSource

__all__ = ["Broadcast", "SharedFiles"]

_SHORTEST_S, _LONGEST_S = 0.005, 0.1  # between two looks at a version

_FORMAT = 3
"""Number of the broadcast's format: 1 sent the files of keyframes, 2 each file as a tensor of its own."""


@final
class SharedFiles:
    """Carries versions through a directory or object store; a probe shows whether both ends reach it.

    Args:
        store: the directory or object store.
        run_id: names the trainer's run.
        full: writes keyframes.
        aborted: set to end every wait.
        timeout_s: deadline of every wait, in seconds.

    Attributes:
        store: where this end has the versions.
        full: writes keyframes into the store.
        open_full: opens a keyframe of the store.
        wait_s: how long a worker waits for a version that it was told of, in seconds.
    """

    def __init__(self, store: Store, run_id: str, full: WritesFull, aborted: threading.Event, timeout_s: float) -> None:
        self.store, self.full, self.open_full = store, full, partial(PublishedVersion, store)
        self._aborted, self._timeout_s, self.wait_s = aborted, timeout_s, min(VISIBLE_S, timeout_s)
        self._shared = SharedRoot(store, run_id)

    def open(self, workers: int) -> Handoff:
        """Leave a probe for workers, and return what they need to find it; as `Transport.open`."""
        return Handoff(info=self._shared.invite())

    def joined(self) -> None:
        """Remove the probe, which is needed only until the workers have joined."""
        self._shared.clear()

    def join(self, info: Info) -> None:
        """Connect to the trainer that made ``info``."""
        self._shared.find(info, self._timeout_s, self._aborted)

    def looks(self, timeout_s: float) -> Iterator[float]:
        """Yield whenever a worker should look for a version in its store, until an abort or ``timeout_s`` seconds."""
        return pauses(timeout_s, self._aborted, shortest_s=_SHORTEST_S, longest_s=_LONGEST_S)

    def check_connection(self) -> bool:
        """Return whether the store can still be reached."""
        return self.store.available()

    def abort(self) -> None:
        """End every wait, from another thread."""
        self._aborted.set()

    def lost(self, version: int, chain: Chain) -> StoreError:
        """Return the error for a version that is not in the store."""
        return StoreError(
            f"{self.store.url} holds no version {version}, and none came within {self.wait_s:g} s",
            expected=f"{version_name(version)}; the newest here is {chain.latest()}",
            state="nothing was read",
            hint="send the weights again",
        )

    def shutdown(self) -> None:
        """Remove the probe, where this end owns the store. May be called twice."""
        if self.store.owned:
            self._shared.clear()


@final
class Broadcast:
    """Carries versions by broadcasts in a group; each end keeps them in its own memory, where a new worker has none.

    Its methods and attributes are those of `SharedFiles`, and some more.

    Args:
        group: the trainer and its workers.
    """

    told: ClassVar[Info] = {"wire": {"format": _FORMAT}}
    """Fields of the info for workers, beside those of the group."""

    def __init__(self, group: VLLMCollectiveTransport) -> None:
        self.link, self.wait_s = group, group.timeout_s
        self.store, self.full = MemoryStore(), KeptTensors()
        self.open_full = self.full.open
        self._versions = Chain(self.store)

    @staticmethod
    def group(info: Info) -> VLLMCollectiveTransport:
        """Return a worker's end of the group, for a trainer's info.

        Raises:
            ConfigError: the trainer is of a release that broadcasts something else.
        """
        found = info["wire"].get("format", 1)
        if found != _FORMAT:
            raise ConfigError(
                f"the trainer broadcasts versions in format {found}",
                expected=f"format {_FORMAT}",
                state="this worker joined nothing",
                hint="use one release of torchrl_ext on both ends",
            )
        return VLLMCollectiveTransport.from_info(info)

    def open(self, workers: int) -> Handoff:
        opening = self.link.open(workers, ())
        return replace(opening, info={**opening.info, **self.told})

    def join(self, info: Info) -> None:
        self.link.join(info)

    def joined(self) -> None:
        """Do nothing: a broadcast leaves no probe to remove."""

    def check_connection(self) -> bool:
        return self.link.check_connection()

    def abort(self) -> None:
        self.link.abort()

    def shutdown(self) -> None:
        self.link.shutdown()
        self.landed()
        self._versions.prune(before=self._versions.newest() + 1)  # the pointer stays, so that numbers go on

    def send(self, version: int, base: int | None) -> None:
        """Broadcast a version that was published, and say which version ``base`` it builds on, unless it is in full.

        Raises:
            TransportError, DeadlineError: a worker is gone, does not answer or cannot build on what it holds; names its
                rank.
        """
        files = self.store.files(version_name(version))
        packed = torch.frombuffer(bytearray(b"".join(files.values())), dtype=torch.uint8)
        handoff = self.link.prepare(MappingSource({**self.full.tensors, FILES: packed}), version)
        sizes = {name: len(data) for name, data in files.items()}
        self.link.announce({**handoff.info, "base": None if self.full.tensors else base, "files": sizes})
        handoff.transfer()
        self.full.tensors = {}  # they are those of the baseline, which the next delta changes

    def looks(self, timeout_s: float) -> Iterator[float]:
        """As `SharedFiles.looks`: at once, and after each version that came; raises as `fetch`."""
        until = deadline(timeout_s)
        yield timeout_s
        while self.fetch(until):
            yield until - time.monotonic()

    def fetch(self, until: float) -> bool:
        """Receive the next version into this end's store, and return whether one was announced by ``until``.

        Args:
            until: monotonic moment.

        Raises:
            TransportError, DeadlineError: the trainer is gone, or stopped half-way.
            StoreError: it is a delta on a version that this worker does not hold; the trainer is told.
            IntegrityError: what came is no version.
        """
        info = self.link.poll(max(0.0, until - time.monotonic()))
        if info is None:
            return False
        try:
            version, base = _count(info["version"]), _count(info["base"] or 0)
            sizes = {str(name): _count(size) for name, size in info["files"].items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise IntegrityError(f"the trainer announces a version otherwise than it should: {error!r}") from error
        if version_number(version_name(version)) != version or MANIFEST not in sizes:
            raise IntegrityError(
                f"the trainer announces version {version} with {', '.join(sizes)}",
                expected=f"a number of at most 18 digits, and a file {MANIFEST}",
                state="nothing was read",
            )
        if base and base not in self._versions.numbers():
            lacking = StoreError(
                f"weights version {version} is a delta on version {base}, which this worker does not hold",
                expected="every version since it joined",
                state="nothing was read; the trainer was told",
                hint="send again: after an update that failed, the next version is sent in full",
            )
            self.link.decline(info, lacking)
            raise lacking
        tensors = {name: tensor.cpu() for name, tensor in self.link.receive(info, {})}
        self._keep(version, tensors.pop(FILES, None), sizes)
        self.full.tensors = tensors
        return True

    def _keep(self, version: int, packed: Tensor | None, sizes: Mapping[str, int]) -> None:
        if packed is None or ParamMeta.of(FILES, packed) != ParamMeta(FILES, torch.uint8, (sum(sizes.values()),)):
            raise IntegrityError(
                f"weights version {version} came with other files than the trainer announced",
                expected=f"a tensor of {sum(sizes.values())} bytes",
                state="nothing was read",
                hint="use one release of torchrl_ext on both ends",
            )
        content, folder = packed.numpy().tobytes(), version_name(version)
        self.store.delete(folder)  # a trainer that started over counts anew
        with self.store.draft(folder) as draft:
            for name, size in sizes.items():
                draft.write(name, content[:size])
                content = content[size:]
        if version < self._versions.latest():
            self.store.delete("latest")
        self._versions.advance(version)

    def lost(self, version: int, chain: Chain) -> DeadlineError:
        """Return the error for a version that did not come."""
        return DeadlineError(
            f"weights version {version} did not come from the trainer within {self.wait_s:g} s",
            state="nothing was changed",
            hint="check that the trainer lives, and send again",
        )

    def landed(self) -> None:
        """Drop tensors and older files: what the next delta builds on is in the model or in host copies."""
        self._versions.prune(before=self._versions.latest())
        self.full.tensors = {}


def _count(value: object) -> int:
    """Return ``value``, if it is an integer of 0 or more that fits into 8 bytes; else raise a ValueError."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is not a count")
    return value
