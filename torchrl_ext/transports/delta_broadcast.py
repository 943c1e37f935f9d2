"""Versions over a broadcast: what a shared directory would hold, sent through a collective group.

Nothing is written to any filesystem. A keyframe is the tensors themselves: the trainer sends the copies that it takes
deltas against, a worker keeps what came in host memory until it is loaded. The other files of a version, all that a
delta is, travel behind them as one tensor of bytes, so that everything that reads or writes one is the same code as for
a directory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, final

import torch
from torch import Tensor

from torchrl_ext.errors import ConfigError, IntegrityError, ManifestError, StoreError
from torchrl_ext.stores import Chain, Manifest, Placed, version_name
from torchrl_ext.stores.base import Draft
from torchrl_ext.stores.manifest import MANIFEST
from torchrl_ext.stores.memory import MemoryStore
from torchrl_ext.stores.versions import version_number
from torchrl_ext.transports.carriers import Carrier
from torchrl_ext.transports.collective.transport import VLLMCollectiveTransport
from torchrl_ext.types import Handoff, Info, ParamMeta
from torchrl_ext.weights.digests import tensor_digest
from torchrl_ext.weights.source import MappingSource, WeightSource, checked

__all__ = ["Broadcast", "KeptTensors"]

_FORMAT = 3
"""Of what is broadcast: 1 sent the files of keyframes, 2 each file as a tensor of its own."""

_FILES = "/files"
"""The tensor of bytes beside a model's; a parameter of this name is refused."""

_PLACE = "tensors"  # stands where a manifest names a file


@final
class KeptTensors:
    """Keyframes as tensors in memory: those of the newest one, until they are let go of.

    Attributes:
        tensors: by name. They must not change before they are sent.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def needed_bytes(self, source: WeightSource) -> int:
        """Return 0: nothing is written anywhere."""
        return 0

    def write(self, draft: Draft, source: WeightSource, version: int, run_id: str) -> Manifest:
        """Keep the very tensors of ``source``, and say what they are.

        Raises:
            ManifestError: the source does not yield what it declares, or a name is taken.
        """
        params, placed, tensors = source.params(), [], {}
        if any(meta.name == _FILES for meta in params):
            raise ManifestError(
                f"a parameter is called {_FILES!r}, as the files of a version are over a broadcast",
                state="nothing was sent",
                hint="rename it with WeightSender(mapper=...), or take carrier='disk'",
            )
        for meta, tensor in checked(source, params):
            tensors[meta.name] = tensor
            placed.append(Placed(meta=meta, file=_PLACE, checksum=tensor_digest(tensor)))
        size = sum(meta.nbytes for meta in params)
        manifest = Manifest(version=version, run_id=run_id, params=tuple(placed), files={_PLACE: size})
        draft.write(MANIFEST, manifest.to_bytes())
        self.tensors = tensors
        return manifest

    def open(self, number: int, manifest: Manifest) -> _KeptVersion:
        """Open a keyframe for reading.

        Raises:
            IntegrityError: its tensors are not here (any more).
        """
        lost = next((one.meta for one in manifest.params if one.meta.name not in self.tensors), None)
        if lost is not None:
            raise IntegrityError(
                f"version {number} came over the group, and {lost.name!r} of it is not in memory any more",
                expected="the worker to hold what it read",
                state="nothing was read",
                hint="send again: after an update that failed, the next version is sent in full",
            )
        return _KeptVersion(manifest, self.tensors)


class _KeptVersion:
    """A keyframe in memory, open for reading."""

    def __init__(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        self._manifest, self._tensors = manifest, tensors
        self._verified: set[str] = set()

    def params(self) -> tuple[ParamMeta, ...]:
        return tuple(one.meta for one in self._manifest.params)

    def pairs(self, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor in order, compared with its checksum when it is read for the first time.

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
        self._tensors = {}

    def _verify(self, one: Placed) -> None:
        if one.meta.name in self._verified:
            return
        tensor, version = self._tensors[one.meta.name], self._manifest.version
        if ParamMeta.of(one.meta.name, tensor) != one.meta or tensor_digest(tensor) != one.checksum:
            raise IntegrityError(
                f"tensor {one.meta.name!r} of version {version} came damaged over the group",
                expected=f"{one.meta} with xxh3-128 {one.checksum}",
                state=f"nothing of version {version} was used beyond the tensors before it",
                hint="send the weights again",
            )
        self._verified.add(one.meta.name)


@final
class Broadcast(Carrier):
    """A collective group; each end keeps versions in its own memory, and who comes in anew holds none of them.

    Args:
        group: of the trainer and its workers.
    """

    told: ClassVar[Info] = {"wire": {"format": _FORMAT}}
    """What a worker has to know beside what the group says."""

    store: MemoryStore
    full: KeptTensors

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

    def check_connection(self) -> bool:
        return self.link.check_connection()

    def abort(self) -> None:
        self.link.abort()

    def shutdown(self) -> None:
        self.link.shutdown()
        self.landed()
        self._versions.prune(before=self._versions.newest() + 1)  # the pointer stays, so that numbers go on

    def send(self, version: int, base: int | None) -> None:
        """Send a version.

        Raises:
            TransportError, DeadlineError: a worker is gone, does not answer or cannot build on what it holds; names its
                rank.
        """
        files = self.store.files(version_name(version))
        packed = torch.frombuffer(bytearray(b"".join(files.values())), dtype=torch.uint8)
        handoff = self.link.prepare(MappingSource({**self.full.tensors, _FILES: packed}), version)
        sizes = {name: len(data) for name, data in files.items()}
        self.link.announce({**handoff.info, "base": None if self.full.tensors else base, "files": sizes})
        handoff.transfer()
        self.full.tensors = {}  # they are those of the baseline, which the next delta changes

    def fetch(self, until: float) -> None:
        """Take in the next version, when one is announced.

        Raises:
            TransportError, DeadlineError: the trainer is gone, or stopped half-way.
            StoreError: it is a delta on a version that this worker does not hold; the trainer is told.
            IntegrityError: what came is no version.
        """
        info = self.link.poll(max(0.0, until - time.monotonic()))
        if info is None:
            return
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
        self._keep(version, tensors.pop(_FILES, None), sizes)
        self.full.tensors = tensors

    def _keep(self, version: int, packed: Tensor | None, sizes: Mapping[str, int]) -> None:
        if packed is None or ParamMeta.of(_FILES, packed) != ParamMeta(_FILES, torch.uint8, (sum(sizes.values()),)):
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

    def landed(self) -> None:
        """Let go of tensors and older files: what the next delta builds on is in the model or in host copies."""
        self._versions.prune(before=self._versions.latest())
        self.full.tensors = {}


def _count(value: object) -> int:
    """Return ``value``, if it is an integer of 0 or more that fits into 8 bytes; else raise a ValueError."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is not a count")
    return value
