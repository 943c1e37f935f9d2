"""slime's first encodings of deltas, beside a manifest of ours: `torchrl_ext.compat.slime.first` has the files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import final

from torchrl_ext.base.errors import IntegrityError
from torchrl_ext.compat.slime import first
from torchrl_ext.data.deltas.streams import StreamPatch
from torchrl_ext.data.stores.manifest import DeltaManifest
from torchrl_ext.data.versions.payloads import FileEncoding, Files

__all__ = ["Flushes", "deltas", "deltas_zstd", "indices"]


@final
class Flushes(FileEncoding):
    """Lays many parameters' positions and values into each file, one dtype per file.

    Args:
        name: ``"indices"``, ``"deltas"`` or ``"deltas_zstd"``.
    """

    def files(self, version: int, patches: Iterable[StreamPatch]) -> Iterator[tuple[str, bytes, list[str]]]:
        for number, bucket in enumerate(first.flush_buckets(patches, self.name)):
            data = first.build_flush(bucket, self.name, current_version=str(version))
            yield first.flush_name(0, number), data, [patch.meta.name for patch in bucket]

    def read(self, manifest: DeltaManifest, files: Files, where: str) -> Iterable[StreamPatch]:
        found: dict[str, StreamPatch] = {}
        for name, data in files.items():
            file = first.parse_flush(data, f"{where}/{name}", manifest.table)
            if not file.current_version.isdigit() or int(file.current_version) != manifest.version:
                raise IntegrityError(
                    f"{where}/{name} belongs to version {file.current_version!r}", expected=str(manifest.version)
                )
            for patch in file.patches:
                of = patch.meta.name
                counted = manifest.changed[manifest.table.number[of]] == patch.positions.size
                if manifest.placed.get(of) != name or not counted:
                    raise IntegrityError(f"{where}/{name} changes {of!r} otherwise than its manifest says")
                found[of] = patch
        lost = min(manifest.placed.keys() - found.keys(), default=None)
        if lost is not None:
            raise IntegrityError(f"{where}/{manifest.placed[lost]} does not hold tensor {lost!r}, as the manifest says")
        return found.values()


indices, deltas, deltas_zstd = (partial(Flushes, name) for name in ("indices", "deltas", "deltas_zstd"))
