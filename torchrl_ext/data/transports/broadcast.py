"""Versions of a delta transport that are broadcast in a group, and written to no filesystem.

A keyframe travels as its tensors (`KeptTensors`). The other files of a version, which are all that a delta is, travel
behind them as one tensor of bytes, so that whatever reads a version from a directory reads it here.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import IntegrityError, ManifestError
from torchrl_ext.base.types import VERSIONS, Count, ParamMeta, Wire
from torchrl_ext.data.group.group import GroupWorker
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.manifest import MANIFEST, version_name
from torchrl_ext.data.stores.store import Store
from torchrl_ext.data.transports.base import Arrival, Update
from torchrl_ext.data.transports.collective import VLLMCollectiveTransport
from torchrl_ext.data.versions.kept import KeptTensors
from torchrl_ext.data.weights.digests import Digests
from torchrl_ext.data.weights.source import MappingSource

__all__ = ["FILES", "Broadcast", "send"]

FILES = "/files"
"""The name under which the files of a version are sent beside its tensors; no parameter may have it."""


class _Coming(Wire, frozen=True, kw_only=True):
    """Describes a version that is broadcast.

    Attributes:
        files: bytes of each of its files, which are packed in order of their names.
    """

    files: dict[str, Count]


def send(group: VLLMCollectiveTransport, store: Store, kept: KeptTensors, version: int, within: Deadline) -> None:
    """Broadcast a version that was published (trainer end), and drop its tensors, which the next delta changes.

    Raises:
        TransportError, DeadlineError: a worker is gone or does not answer; names its rank.
        ManifestError: a parameter has a name that is taken.
    """
    if FILES in kept.tensors:
        raise ManifestError(
            f"a parameter is called {FILES!r}, a name that the broadcast reserves for the files of a version",
            state="nothing was sent",
            hint="rename it with WeightSender(mapper=...), or take carrier='disk'",
        )
    folder = version_name(version)
    files = {name: store.get(f"{folder}/{name}") for name in store.list(folder)}
    packed = torch.frombuffer(bytearray(b"".join(files.values())), dtype=torch.uint8)
    source = MappingSource({**kept.tensors, FILES: packed})
    handoff = group.prepare(Update(source=source, version=version), within)
    info = {**handoff.info, **_Coming(files={name: len(data) for name, data in files.items()}).to_json()}
    group.announce(Arrival(version=version, params=source.params(), info=info), within)
    handoff.transfer(within)
    kept.tensors = {}


@final
class Broadcast:
    """Receives versions from a group into a worker's store.

    Args:
        worker: this worker's end of the group.
        store: in memory.
        chain: its versions.

    Attributes:
        kept: the tensors of a keyframe, until it landed.
    """

    def __init__(self, worker: GroupWorker, store: Store, chain: Chain) -> None:
        self._worker, self._store, self._chain, self.kept = worker, store, chain, KeptTensors()

    def fetch(self, within: Deadline) -> bool:
        """Receive the next version, and return whether one was announced by the deadline.

        Raises:
            TransportError, DeadlineError: the trainer is gone, or stopped half-way.
            IntegrityError, ConfigError: what came is no version.
        """
        arrival = self._worker.next(within)
        if arrival is None:
            return False
        version, files = arrival.version, _Coming.from_json(arrival.info, "what the trainer announces").files
        if not 0 <= version < VERSIONS or MANIFEST not in files:
            raise IntegrityError(
                f"the trainer announces version {version} with {', '.join(files)}",
                expected=f"a number of at most 18 digits, and a file {MANIFEST}",
                state="nothing was read",
            )
        tensors, taken = dict[str, Tensor](), Digests()
        for name, tensor in self._worker.receive(arrival, {}, within):
            if name != FILES:
                taken.add(name, tensor)
            tensors[name] = tensor.cpu()  # beside the model in use there is no room on an accelerator for another one
        packed, count = tensors.pop(FILES, None), sum(files.values())
        if packed is None or ParamMeta.of(FILES, packed) != ParamMeta(FILES, torch.uint8, (count,)):
            raise IntegrityError(
                f"weights version {version} came with files that the trainer did not announce",
                expected=f"a tensor of {count} bytes",
                state="nothing was read",
                hint="use one release of torchrl_ext on both ends",
            )
        content, folder = packed.numpy().tobytes(), version_name(version)
        self._store.delete(folder)  # a trainer that started over counts anew
        with self._store.draft(folder) as draft:
            for name, size in sorted(files.items()):
                draft.write(name, content[:size])
                content = content[size:]
        if version < self._chain.latest():
            self._store.delete("latest")
        self._chain.advance(version)
        self.kept.tensors, self.kept.digests = tensors, taken.hex()
        return True

    def landed(self) -> None:
        """Drop tensors and older files: what the next delta builds on is in the model or in host copies."""
        self._chain.prune(before=self._chain.latest())
        self.kept.tensors = {}

    def close(self) -> None:
        """Leave the group, and drop everything."""
        self._worker.close()
        self.kept.tensors = {}
