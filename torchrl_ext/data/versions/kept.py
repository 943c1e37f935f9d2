"""Full versions that are kept in memory, in place of files, for trainers and workers that share none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import final

from torch import Tensor

from torchrl_ext.base.errors import IntegrityError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.stores.manifest import FilePlace, Manifest
from torchrl_ext.data.stores.store import Draft
from torchrl_ext.data.versions.full import FullWriter
from torchrl_ext.data.weights.source import WeightSource

__all__ = ["KeptTensors"]

_PLACE = "tensors"  # stands where a manifest names a file


@final
class KeptTensors(FullWriter):
    """Keeps the tensors of the newest keyframe, until they are dropped.

    A manifest of such a keyframe has digests in the place of checksums.

    Attributes:
        tensors: by name. They must not change before they are sent.
        digests: of tensors that came over a group, by name.
    """

    def __init__(self) -> None:
        super().__init__(shard_bytes=1)
        self.tensors: dict[str, Tensor] = {}
        self.digests: dict[str, str] = {}
        self._metas: tuple[ParamMeta, ...] = ()

    def needed_bytes(self, source: WeightSource) -> int:
        """Return 0: nothing is written anywhere."""
        return 0

    def write_tensors(
        self, draft: Draft, owned: Sequence[Sequence[ParamMeta]], rank: int, pairs: Iterator[tuple[ParamMeta, Tensor]]
    ) -> tuple[dict[str, FilePlace], dict[str, int]]:
        """Keep the tensors themselves; whoever calls this knows their digests.

        Raises:
            ManifestError: the source does not yield what it declares.
        """
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

    def open(self, number: int, manifest: Manifest) -> KeptTensors:
        """Verify a keyframe, and return it open for reading (`torchrl_ext.data.versions.open_route.FullVersion`).

        Raises:
            IntegrityError: a tensor is damaged, or not here (any more); names it.
        """
        self._metas = manifest.params
        for meta, (_, digest) in zip(manifest.params, manifest.full or (), strict=True):
            tensor = self.tensors.get(meta.name)
            sound = tensor is not None and ParamMeta.of(meta.name, tensor) == meta
            if not sound or self.digests.get(meta.name) != digest:
                fault = "is not in memory any more" if tensor is None else "came damaged over the group"
                raise IntegrityError(
                    f"tensor {meta.name!r} of version {number} {fault}",
                    expected=f"{meta} with digest {digest}",
                    state="nothing of the version was used",
                    hint="send again: after an update that failed, the next version is sent in full",
                )
        return self

    def params(self) -> tuple[ParamMeta, ...]:
        """Return the parameters of the keyframe that was opened."""
        return self._metas

    def pairs(self, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield copies of its tensors, or those of ``into`` where they fit, filled."""
        for meta in self._metas:
            tensor, target = self.tensors[meta.name], into.get(meta.name)
            fits = target is not None and ParamMeta.of(meta.name, target) == meta
            yield meta.name, target.copy_(tensor) if target is not None and fits else tensor.clone()

    def close(self) -> None:
        """Leave the tensors as they are."""
