"""Versions of a delta transport that are broadcast in a group, and written to no filesystem.

A keyframe travels as its tensors (`KeptTensors`). The other files of a version, which are all that a delta is, travel
behind them as one tensor of bytes, so that whatever reads a version from a directory reads it here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import IntegrityError, ManifestError
from torchrl_ext.base.types import VERSIONS, Count, ParamMeta, Wire
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.manifest import MANIFEST, FilePlace, Manifest, version_name
from torchrl_ext.data.stores.store import Draft, Store
from torchrl_ext.data.transports.base import Arrival, Update
from torchrl_ext.data.transports.collective import CollectiveWorker, VLLMCollectiveTransport
from torchrl_ext.data.versions.full import FullWriter
from torchrl_ext.data.weights.digests import Digests
from torchrl_ext.data.weights.source import MappingSource, WeightSource

__all__ = ["FILES", "Broadcast", "KeptTensors", "announce"]

FILES = "/files"
"""The name under which the files of a version are sent beside its tensors; no parameter may have it."""

_PLACE = "tensors"  # stands where a manifest names a file


@final
class KeptTensors(FullWriter):
    """Keeps keyframes as tensors in memory, in place of files: those of the newest one, until they are dropped.

    A manifest of such a keyframe has digests in the place of checksums.

    Attributes:
        tensors: by name. They must not change before they are sent.
        digests: of tensors that came over a group, by name.
    """

    def __init__(self) -> None:
        super().__init__(shard_bytes=1)
        self.tensors: dict[str, Tensor] = {}
        self.digests: dict[str, str] = {}

    def needed_bytes(self, source: WeightSource) -> int:
        """Return 0: nothing is written anywhere."""
        return 0

    def write_tensors(
        self, draft: Draft, owned: Sequence[Sequence[ParamMeta]], rank: int, pairs: Iterator[tuple[ParamMeta, Tensor]]
    ) -> tuple[dict[str, FilePlace], dict[str, int]]:
        """Keep the tensors themselves; whoever calls this knows their digests.

        Raises:
            ManifestError: the source does not yield what it declares, or a name is taken.
        """
        if any(meta.name == FILES for meta in owned[rank]):
            raise ManifestError(
                f"a parameter is called {FILES!r}, a name that the broadcast reserves for the files of a version",
                state="nothing was sent",
                hint="rename it with WeightSender(mapper=...), or take carrier='disk'",
            )
        self.tensors = {meta.name: tensor for meta, tensor in pairs}
        return dict.fromkeys(self.tensors, (_PLACE, "")), {_PLACE: sum(meta.nbytes for meta in owned[rank])}

    def finish(
        self,
        draft: Draft,
        files: Mapping[str, bytes],
        version: int,
        params: Sequence[ParamMeta],
        placed: Mapping[str, FilePlace],
        sizes: Mapping[str, int],
    ) -> dict[str, int]:
        """Return the sizes: nothing stands beside the tensors."""
        return dict(sizes)

    def open(self, number: int, manifest: Manifest) -> _Keyframe:
        """Verify a keyframe, and open it for reading.

        Raises:
            IntegrityError: a tensor is damaged, or not here (any more); names it.
        """
        for meta, (_, digest) in zip(manifest.params, manifest.full or (), strict=True):
            tensor = self.tensors.get(meta.name)
            if tensor is None or ParamMeta.of(meta.name, tensor) != meta or self.digests.get(meta.name) != digest:
                fault = "is not in memory any more" if tensor is None else "came damaged over the group"
                raise IntegrityError(
                    f"tensor {meta.name!r} of version {number} {fault}",
                    expected=f"{meta} with digest {digest}",
                    state="nothing of the version was used",
                    hint="send again: after an update that failed, the next version is sent in full",
                )
        return _Keyframe(manifest.params, self.tensors)


class _Keyframe:
    """A keyframe in memory, open for reading; as `torchrl_ext.data.versions.open_route.FullVersion`."""

    def __init__(self, params: tuple[ParamMeta, ...], tensors: Mapping[str, Tensor]) -> None:
        self._params, self._tensors = params, tensors

    def params(self) -> tuple[ParamMeta, ...]:
        return self._params

    def pairs(self, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for meta in self._params:
            tensor, target = self._tensors[meta.name], into.get(meta.name)
            fits = target is not None and ParamMeta.of(meta.name, target) == meta
            yield meta.name, target.copy_(tensor) if target is not None and fits else tensor.clone()

    def close(self) -> None:
        self._tensors = {}


class Coming(Wire, frozen=True, kw_only=True):
    """Describes a version that is broadcast.

    Attributes:
        files: bytes of each of its files, which are packed in order of their names.
    """

    files: dict[str, Count]


def announce(group: VLLMCollectiveTransport, store: Store, full: KeptTensors, version: int, within: Deadline) -> None:
    """Broadcast a version that was published.

    Raises:
        TransportError, DeadlineError: a worker is gone or does not answer; names its rank.
    """
    folder = version_name(version)
    files = {name: store.get(f"{folder}/{name}") for name in store.list(folder)}
    packed = torch.frombuffer(bytearray(b"".join(files.values())), dtype=torch.uint8)
    source = MappingSource({**full.tensors, FILES: packed})
    handoff = group.prepare(Update(source=source, version=version), within)
    coming = Coming(files={name: len(data) for name, data in files.items()})
    info = {**handoff.info, **coming.to_json()}
    group.announce(Arrival(version=version, params=source.params(), info=info), within)
    handoff.transfer(within)
    full.tensors = {}  # they are those of the baseline, which the next delta changes


@final
class Broadcast:
    """Receives versions from a group into a worker's store.

    Args:
        worker: this worker's end of the group.
        store: in memory.
        versions: of the store.

    Attributes:
        full: the tensors of a keyframe, until it landed.
    """

    def __init__(self, worker: CollectiveWorker, store: Store, versions: Chain) -> None:
        self._worker, self._store, self._versions, self.full = worker, store, versions, KeptTensors()

    def fetch(self, within: Deadline) -> bool:
        """Receive the next version, and return whether one was announced by the deadline.

        Raises:
            TransportError, DeadlineError: the trainer is gone, or stopped half-way.
            IntegrityError, ConfigError: what came is no version.
        """
        arrival = self._worker.next(within)
        if arrival is None:
            return False
        coming = Coming.from_json(arrival.info, "what the trainer announces")
        version = arrival.version
        if not 0 <= version < VERSIONS or MANIFEST not in coming.files:
            raise IntegrityError(
                f"the trainer announces version {version} with {', '.join(coming.files)}",
                expected=f"a number of at most 18 digits, and a file {MANIFEST}",
                state="nothing was read",
            )
        tensors, taken = dict[str, Tensor](), Digests()
        for name, tensor in self._worker.receive(arrival, {}, within):
            if name != FILES:
                taken.add(name, tensor)
            tensors[name] = tensor.cpu()  # beside the model in use there is no room on an accelerator for another one
        packed, count = tensors.pop(FILES, None), sum(coming.files.values())
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
            for name, size in sorted(coming.files.items()):
                draft.write(name, content[:size])
                content = content[size:]
        if version < self._versions.latest():
            self._store.delete("latest")
        self._versions.advance(version)
        self.full.tensors, self.full.digests = tensors, taken.hex()
        return True

    def landed(self) -> None:
        """Drop tensors and older files: what the next delta builds on is in the model or in host copies."""
        self._versions.prune(before=self._versions.latest())
        self.full.tensors = {}

    def close(self) -> None:
        """Leave the group, and drop everything."""
        self._worker.close()
        self.full.tensors = {}
