"""Versions over a broadcast: what a shared directory would hold, sent through a collective group.

Nothing is written to any filesystem. A keyframe is the tensors themselves: the trainer sends the copies that it takes
deltas against, a worker keeps what came in host memory until it is loaded. A delta is the same bytes as in a directory,
so that everything that reads or writes one is the same code.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from torchrl_ext.errors import ConfigError, DeadlineError, IntegrityError, StoreError, TransportError
from torchrl_ext.stores import Manifest, Placed, Versions, version_name
from torchrl_ext.stores.manifest import MANIFEST
from torchrl_ext.stores.process import ProcessDraft, ProcessRoot
from torchrl_ext.stores.versions import version_number
from torchrl_ext.transports.base import deadline
from torchrl_ext.transports.carriers import Carrier
from torchrl_ext.transports.collective.transport import VLLMCollectiveTransport
from torchrl_ext.transports.ipc.host_memory import integer
from torchrl_ext.types import Handoff, Info, ParamMeta
from torchrl_ext.weights.digests import tensor_digest
from torchrl_ext.weights.source import MappingSource, WeightSource, checked

__all__ = ["Broadcast", "KeptTensors", "KeptVersion"]

_FORMAT = 2
"""Of what is broadcast: 1 sent the files of keyframes."""
_TENSOR, _FILE = "tensor/", "file/"  # before names on the wire
_PLACE = "tensors"  # stands where a manifest names a file


@final
class KeptTensors:
    """Writes keyframes: keeps the very tensors of its source, which must not change before they are sent."""

    def needed_bytes(self, source: WeightSource) -> int:
        """Nothing is written anywhere."""
        return 0

    def write(self, draft: ProcessDraft, source: WeightSource, version: int, run_id: str) -> Manifest:
        """Keep every tensor, and say what they are.

        Raises:
            ManifestError: the source does not yield what it declares.
        """
        params, placed = source.params(), []
        for meta, tensor in checked(source, params):
            draft.tensors[meta.name] = tensor
            placed.append(Placed(meta=meta, file=_PLACE, checksum=tensor_digest(tensor)))
        size = sum(meta.nbytes for meta in params)
        manifest = Manifest(version=version, run_id=run_id, params=tuple(placed), files={_PLACE: size})
        draft.write(MANIFEST, manifest.to_bytes())
        return manifest


@final
class KeptVersion:
    """A keyframe in memory, open for reading.

    Args:
        root: where it is.
        number: of the version.
        manifest: what it holds.

    Raises:
        IntegrityError: its tensors are not here (any more).
    """

    def __init__(self, root: ProcessRoot, number: int, manifest: Manifest) -> None:
        self._number, self._manifest = number, manifest
        self._tensors = root.tensors(version_name(number))
        self._verified: set[str] = set()
        lost = next((one.meta for one in manifest.params if one.meta.name not in self._tensors), None)
        if lost is not None:
            raise IntegrityError(
                f"version {number} came over the group, and {lost.name!r} of it is not in memory any more",
                expected="the worker to hold what it read",
                state="nothing was read",
                hint="send again: after an update that failed, the next version is sent in full",
            )

    def params(self) -> tuple[ParamMeta, ...]:
        """What the version holds, in order."""
        return tuple(one.meta for one in self._manifest.params)

    def pairs(self, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in order, compared with its checksum when it is read for the first time.

        Args:
            into: tensors to fill directly; everything is compared first then, so that damage changes none of them.

        Raises:
            IntegrityError: names the tensor whose bytes differ.
        """
        for one in self._manifest.params if into else ():
            self._verify(one)
        for one in self._manifest.params:
            self._verify(one)
            tensor, target = self._tensors[one.meta.name], into.get(one.meta.name)
            if target is not None and ParamMeta.of(one.meta.name, target) == one.meta:
                yield one.meta.name, target.copy_(tensor)
            else:
                yield one.meta.name, tensor.clone()

    def close(self) -> None:
        """Let go of the tensors. May be called twice."""
        self._tensors = {}

    def _verify(self, one: Placed) -> None:
        if one.meta.name in self._verified:
            return
        tensor = self._tensors[one.meta.name]
        if ParamMeta.of(one.meta.name, tensor) != one.meta or tensor_digest(tensor) != one.checksum:
            raise IntegrityError(
                f"tensor {one.meta.name!r} of version {self._number} came damaged over the group",
                expected=f"{one.meta} with xxh3-128 {one.checksum}",
                state=f"nothing of version {self._number} was used beyond the tensors before it",
                hint="send the weights again",
            )
        self._verified.add(one.meta.name)


@final
class Broadcast(Carrier):
    """A collective group; each end keeps versions in its own memory.

    Args:
        group: of the trainer and its workers.
    """

    keeps_base: ClassVar[bool] = False
    store: ProcessRoot

    def __init__(self, group: VLLMCollectiveTransport) -> None:
        super().__init__()
        self.store = ProcessRoot()
        self._group, self._versions = group, Versions(self.store)
        self._pushed = 0

    def init_group(self) -> None:
        self._pushed = 0
        self._group.init_all_workers_group({})  # what travels is versions, whatever the model

    def keyframes(self, shard_bytes: int, files: Any) -> KeptTensors:
        return KeptTensors()

    def open_full(self, number: int, manifest: Manifest) -> KeptVersion:
        return KeptVersion(self.store, number, manifest)

    def open(self, workers: int) -> Handoff:
        self._pushed = 0
        group = self._group.open(workers, ())
        return Handoff(info={"wire": {**group.info, "format": _FORMAT}}, transfer=group.transfer)

    def begin(self) -> None:
        if self._group.rank != 0:
            raise TransportError(
                f"send_weights was called on rank {self._group.rank}",
                expected="rank 0, the trainer; other ranks receive",
                state="nothing was sent",
            )

    def push(self, version: int) -> None:
        """Send a version.

        Raises:
            TransportError, DeadlineError: a worker is gone, does not answer or cannot build on what it holds; names its
                rank.
        """
        folder = version_name(version)
        tensors = {_TENSOR + name: tensor for name, tensor in self.store.tensors(folder).items()}
        files = {_FILE + name: _as_tensor(data) for name, data in self.store.files(folder).items()}
        base = None if tensors else self._pushed
        handoff = self._group.prepare(MappingSource({**tensors, **files}), version)
        self._group.announce({**handoff.info, "base": base})
        handoff.transfer()
        self._pushed = version
        self.store.drop_tensors()  # they are those of the baseline, which the next delta changes

    def join(self, info: Info, timeout_s: float, aborted: threading.Event) -> None:
        wire = info["wire"]
        if wire.get("format") != _FORMAT:
            raise ConfigError(
                f"the trainer broadcasts versions in format {wire.get('format', 1)}",
                expected=f"format {_FORMAT}",
                state="this worker joined nothing",
                hint="use one release of torchrl_ext on both ends",
            )
        told = {**wire, "rank": info["rank"]}
        self._group = VLLMCollectiveTransport.from_info(told)
        self._group.join(told)

    def look(self, version: int) -> None:
        until = deadline(self._group.timeout_s)
        while self._versions.latest() != version:
            if self._pull(max(0.0, until - time.monotonic())) is None:
                raise DeadlineError(
                    f"weights version {version} did not come over the group within {self._group.timeout_s:g} s",
                    state="nothing was changed",
                    hint="check that the trainer lives, and send again",
                )

    def newer(self, unseen: Callable[[], int], timeout_s: float, aborted: threading.Event) -> int | None:
        return self._pull(timeout_s)

    def read(self) -> None:
        """What the next delta builds on is in the model or in host copies: tensors and older files may go."""
        self._versions.prune(before=self._versions.latest())
        self.store.drop_tensors()

    def alive(self) -> bool:
        return self._group.check_connection()

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        self._group.shutdown()
        self._versions.prune(before=self._versions.newest() + 1)  # the pointer stays, so that numbers go on

    def _pull(self, timeout_s: float) -> int | None:
        """Worker end: take in the next version; None when none is announced within ``timeout_s`` seconds.

        Raises:
            TransportError, DeadlineError: the trainer is gone, or stopped half-way.
            StoreError: it is a delta on a version that this worker does not hold; the trainer is told.
            IntegrityError: what came is no version.
        """
        info = self._group.poll(timeout_s)
        if info is None:
            return None
        version = integer(info, "version")
        if version_number(version_name(version)) != version:
            raise IntegrityError(f"the trainer announces version {version}", expected="a number of at most 18 digits")
        base = None if info.get("base") is None else integer(info, "base")
        if base and base not in self._versions.numbers():
            error = StoreError(
                f"weights version {version} is a delta on version {base}, which this worker does not hold",
                expected="every version since it joined",
                state="nothing was read; the trainer was told",
                hint="send again: after an update that failed, the next version is sent in full",
            )
            self._group.decline(info, error)
            raise error
        self._take(info, version)
        return version

    def _take(self, info: Info, version: int) -> None:
        folder = version_name(version)
        self.store.delete(folder)  # a trainer that started over counts anew
        with self.store.draft(folder) as draft:
            for name, tensor in self._group.receive(info, {}):
                _put(draft, name, tensor.cpu())
            if MANIFEST not in draft.files:
                raise IntegrityError(f"weights version {version} came without a manifest", state="nothing was read")
        if version < self._versions.latest():
            self.store.delete("latest")
        self._versions.advance(version)


def _put(draft: ProcessDraft, name: str, tensor: Tensor) -> None:
    if name.startswith(_TENSOR):
        draft.tensors[name.removeprefix(_TENSOR)] = tensor
    elif name.startswith(_FILE) and tensor.dtype == torch.uint8 and tensor.ndim == 1:
        draft.write(name.removeprefix(_FILE), tensor.numpy().tobytes())
    else:
        raise IntegrityError(
            f"{name!r} came over the group",
            expected=f"names that begin with {_TENSOR!r} or {_FILE!r}",
            state="nothing was read",
            hint="use one release of torchrl_ext on both ends",
        )


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
