"""Full versions that are kept in memory, in place of files, for trainers and workers that share none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import final

from torch import Tensor

from torchrl_ext.base.errors import IntegrityError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.stores.manifest import Manifest

__all__ = ["KeptTensors"]


@final
class KeptTensors:
    """The tensors of the newest keyframe, until they are dropped.

    A manifest of such a keyframe has digests in the place of checksums.

    Attributes:
        tensors: by name. They must not change before they are sent.
        digests: of tensors that came over a group, by name.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.digests: dict[str, str] = {}
        self._metas: tuple[ParamMeta, ...] = ()

    def open(self, manifest: Manifest) -> KeptTensors:
        """Verify a keyframe, and return it open for reading, as `PublishedVersion`.

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
                    f"tensor {meta.name!r} of version {manifest.version} {fault}",
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
