"""Deltas in slime's first files: ``rank0000_flush000000.safetensors``, ... (`torchrl_ext.codecs.slime.first`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, final

from torchrl_ext.codecs.base import Encoded
from torchrl_ext.codecs.patch import Patch, SparsePatch, fold
from torchrl_ext.codecs.slime.first import build_flush, check_dtype, flush_buckets, flush_name, parse_flush
from torchrl_ext.errors import ConfigError, IntegrityError
from torchrl_ext.stores.delta_manifest import DeltaManifest
from torchrl_ext.versions.delta_files import Container, Decode, DeltaFiles, Files

__all__ = ["Flushes", "ForeignFlushes"]


@final
class Flushes(Container):
    """Many parameters' positions and values per file, one dtype each."""

    name: ClassVar[str] = "flushes"

    def write(self, files: DeltaFiles, changes: Iterable[Encoded]) -> None:
        encoding = files.codec.name

        def patches() -> Iterator[SparsePatch]:
            for change in changes:
                check_dtype(change.meta)
                patch = change.codec.decode(change.payload, change.meta)
                if patch.changed and isinstance(patch, SparsePatch):
                    yield patch

        for number, bucket in enumerate(flush_buckets(patches(), encoding)):
            file = flush_name(0, number)
            files.put(file, build_flush(bucket, encoding, current_version=str(files.version)))
            for patch in bucket:
                files.changed(patch.meta, patch.changed, files.codec, file)

    def read(self, manifest: DeltaManifest, files: Files, where: str) -> Mapping[str, Decode]:
        found: dict[str, Decode] = {}
        expected = {param.meta.name: param for param in manifest.params if param.changed}
        metas = {param.meta.name: param.meta for param in manifest.params}
        for name, data in files.items():
            file = parse_flush(data, f"{where}/{name}", metas)
            if file.current_version != str(manifest.version):
                raise IntegrityError(
                    f"{where}/{name} belongs to version {file.current_version}", expected=str(manifest.version)
                )
            for patch in file.patches:
                param = expected.get(patch.meta.name)
                if param is None or param.file != name or param.changed != patch.changed:
                    raise IntegrityError(f"{where}/{name} changes {patch.meta.name!r} otherwise than its manifest says")
                patch = SparsePatch(patch.meta, patch.indices, patch.values.copy())  # of its own: the file may go
                found[patch.meta.name] = _known(patch)
        lost = min(expected.keys() - found.keys(), default=None)
        if lost is not None:
            raise IntegrityError(f"{where}/{expected[lost].file} does not hold tensor {lost!r}, as the manifest says")
        return found


@final
class ForeignFlushes(Container):
    """Every flush file of a folder; what they change is known when they are read."""

    name: ClassVar[str] = "foreign flushes"

    def write(self, files: DeltaFiles, changes: Iterable[Encoded]) -> None:
        raise ConfigError(f"container {self.name!r} is only read")

    def read(self, manifest: DeltaManifest, files: Files, where: str) -> Mapping[str, Decode]:
        metas = {param.meta.name: param.meta for param in manifest.params}
        found: dict[str, list[Patch]] = {}
        for name, data in files.items():
            file = parse_flush(data, f"{where}/{name}", metas)
            if not file.current_version.isdigit() or int(file.current_version) != manifest.version:
                raise IntegrityError(
                    f"{where}/{name} belongs to version {file.current_version!r}", expected=f"{manifest.version}"
                )
            for patch in file.patches:
                found.setdefault(patch.meta.name, []).append(patch)
        return {name: _folded(patches) for name, patches in found.items()}


def _known(patch: Patch) -> Decode:
    return lambda base: patch


def _folded(patches: Sequence[Patch]) -> Decode:
    return lambda base: fold(patches)
