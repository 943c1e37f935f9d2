"""Keyframes as tensors in memory: copies that deltas are taken against, or what a worker received over a group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import final

from torch import Tensor

from torchrl_ext.errors import IntegrityError, ManifestError
from torchrl_ext.stores import Manifest, Placed
from torchrl_ext.stores.base import Draft
from torchrl_ext.stores.manifest import MANIFEST
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.digests import tensor_digest
from torchrl_ext.weights.source import WeightSource, checked

__all__ = ["FILES", "KeptTensors"]

FILES = "/files"
"""The name under which the files of a version are sent beside its tensors; no parameter may have it."""

_PLACE = "tensors"  # stands where a manifest names a file


@final
class KeptTensors:
    """Keeps keyframes as tensors in memory: those of the newest one, until they are dropped.

    Attributes:
        tensors: by name. They must not change before they are sent.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def needed_bytes(self, source: WeightSource) -> int:
        """Return 0: nothing is written anywhere."""
        return 0

    def write(self, draft: Draft, source: WeightSource, version: int, run_id: str) -> Manifest:
        """Keep the tensors of ``source`` themselves, and write a manifest of them.

        Raises:
            ManifestError: the source does not yield what it declares, or a name is taken.
        """
        params, placed, tensors = source.params(), [], {}
        if any(meta.name == FILES for meta in params):
            raise ManifestError(
                f"a parameter is called {FILES!r}, as the files of a version are over a broadcast",
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
    """A keyframe in memory, open for reading; as `torchrl_ext.versions.open_route.FullVersion`."""

    def __init__(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        self._manifest, self._tensors = manifest, tensors
        self._verified: set[str] = set()

    def params(self) -> tuple[ParamMeta, ...]:
        return tuple(one.meta for one in self._manifest.params)

    def pairs(self, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for one in self._manifest.params if into else ():  # everything first, so that damage changes none of them
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
        """Compare a tensor with its checksum when it is read for the first time."""
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
