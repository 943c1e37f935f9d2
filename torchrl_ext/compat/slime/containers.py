"""slime's files as containers of deltas: `Flushes` in its first format, `Whole` in its current one.

With a manifest of ours beside them, a container writes and reads them. Called foreign, they are files that slime itself
wrote, without such a manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

import xxhash
from torch import Tensor

from torchrl_ext.codecs.base import Encoded, codec_from_json
from torchrl_ext.codecs.patch import Patch, SparsePatch, apply_patch, fold
from torchrl_ext.compat.slime import current, first
from torchrl_ext.compat.slime.container import build_payloads
from torchrl_ext.errors import IntegrityError
from torchrl_ext.stores.manifest import DeltaManifest, DeltaParam
from torchrl_ext.versions.containers import Container, Decode, Files, NewDelta, Payload, damaged
from torchrl_ext.weights.digests import byte_view

__all__ = ["Flushes", "Whole", "foreign_flushes", "foreign_whole"]


@final
@dataclass(frozen=True)
class Flushes(Container):
    """Lays many parameters' positions and values into each file, one dtype per file, as slime's first format does.

    Args:
        foreign: slime wrote the files; what they change is known when they are read, a parameter maybe in several.
    """

    foreign: bool = False

    def files(self, delta: NewDelta, changes: Iterable[Encoded]) -> Iterator[tuple[str, bytes, list[Payload]]]:
        encoding, coded = delta.codec.name, dict[str, Encoded]()

        def patches() -> Iterator[SparsePatch]:
            for change in changes:
                first.check_dtype(change.meta)
                patch = change.codec.decode(change.payload, change.meta)
                if patch.changed and isinstance(patch, SparsePatch):
                    coded[change.meta.name] = change
                    yield patch

        for number, bucket in enumerate(first.flush_buckets(patches(), encoding)):
            data = first.build_flush(bucket, encoding, current_version=str(delta.version))
            yield first.flush_name(0, number), data, [Payload(coded.pop(patch.meta.name)) for patch in bucket]

    def read(self, manifest: DeltaManifest, files: Files, where: str) -> Mapping[str, Decode]:
        expected = {param.meta.name: param for param in manifest.params if param.changed}
        metas = {param.meta.name: param.meta for param in manifest.params}
        found: dict[str, list[Patch]] = {}
        for name, data in files.items():
            file = first.parse_flush(data, f"{where}/{name}", metas)
            if not file.current_version.isdigit() or int(file.current_version) != manifest.version:
                raise IntegrityError(
                    f"{where}/{name} belongs to version {file.current_version!r}", expected=str(manifest.version)
                )
            for patch in file.patches:
                param = expected.get(patch.meta.name)
                known = param is not None and param.file == name and param.changed == patch.changed
                if not known and not self.foreign:
                    raise IntegrityError(f"{where}/{name} changes {patch.meta.name!r} otherwise than its manifest says")
                patch = SparsePatch(patch.meta, patch.indices, patch.values.copy())  # of its own: the file may go
                found.setdefault(patch.meta.name, []).append(patch)
        lost = min(expected.keys() - found.keys(), default=None)
        if lost is not None:
            raise IntegrityError(f"{where}/{expected[lost].file} does not hold tensor {lost!r}, as the manifest says")
        return {name: partial(_folded, patches) for name, patches in found.items()}


def _folded(patches: list[Patch], base: Tensor | None) -> Patch:
    return fold(patches)


@final
@dataclass(frozen=True)
class Whole(Container):
    """Lays one payload per changed tensor into files of at most ``FILE_BYTES``, and writes the index last.

    File names say how many there are, so payloads wait in memory until the last tensor is coded.

    Args:
        foreign: slime wrote the files. Their metadata has a checksum of each new tensor, and no other one.
    """

    FILE_BYTES: ClassVar[int] = 1 << 30

    foreign: bool = False

    def files(self, delta: NewDelta, changes: Iterable[Encoded]) -> Iterator[tuple[str, bytes, list[Payload]]]:
        waiting, sums = dict[str, Encoded](), dict[str, str]()
        for change in changes:
            if change.changed:
                name = change.meta.name
                waiting[name] = change
                sums[name] = current.checksum(delta.checksum, byte_view(delta.tensors[name]).cpu().numpy())
        shards = current.split_shards(((name, len(one.payload)) for name, one in waiting.items()), self.FILE_BYTES)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(shards):
            file, own = current.shard_name(number, len(shards)), {name: waiting.pop(name) for name in names}
            weight_map |= dict.fromkeys(names, file)
            data = build_payloads(
                {name: one.payload for name, one in own.items()}, {name: sums[name] for name in names}
            )
            payloads = [Payload(one, checksum=xxhash.xxh3_64_hexdigest(one.payload)) for one in own.values()]
            yield file, data, payloads
        index = current.DeltaIndex(
            version=delta.version,
            base_version=delta.base[1],
            delta_encoding=delta.codec.name,
            checksum_format=delta.checksum,
            weight_map=weight_map,
        )
        yield current.INDEX_NAME, index.to_bytes(), []

    def read(self, manifest: DeltaManifest, files: Files, where: str) -> Mapping[str, Decode]:
        codecs, found = [codec_from_json(info) for info in manifest.codecs], dict[str, Decode]()
        says = "the index says" if self.foreign else "the manifest says"
        shards = {
            name: current.parse_shard(data, f"{where}/{name}")
            for name, data in files.items()
            if name != current.INDEX_NAME
        }
        more = {(file, name) for file, shard in shards.items() for name in shard.payloads}
        for param in manifest.params:
            if not param.changed:
                continue
            name, shard = param.meta.name, shards.get(param.file)
            if shard is None or name not in shard.payloads:
                raise IntegrityError(f"{where}/{param.file} does not hold tensor {name!r}, as {says}")
            more.discard((param.file, name))
            payload = shard.payloads[name]
            decode = found[name] = partial(codecs[param.codec].decode, payload, param.meta)
            if self.foreign:
                found[name] = partial(_checked, decode, param, shard.checksums[name])
            elif (checksum := xxhash.xxh3_64_hexdigest(payload)) != param.checksum:
                raise damaged(name, f"{where}/{param.file}", param.checksum, checksum, manifest.version)
        if more:
            file, name = min(more)
            raise IntegrityError(
                f"{where}/{file} changes tensor {name!r}, and the index does not say so",
                state=f"nothing of version {manifest.version} was used",
                hint="the index is damaged; let the trainer publish again",
            )
        return found


def _checked(decode: Decode, param: DeltaParam, expected: str, base: Tensor | None) -> Patch:
    patch = decode(base)
    new = base.clone()  # type: ignore[union-attr]
    apply_patch(patch, new)
    found = current.checksum(param.checksum, byte_view(new).numpy())
    if found != expected:
        raise IntegrityError(
            f"{param.meta.name!r} does not become what the trainer had",
            expected=f"{param.checksum} {expected}, found {found}",
            state="nothing of it was used",
            hint="the delta was taken against another base, or is damaged",
        )
    return patch


foreign_flushes, foreign_whole = partial(Flushes, foreign=True), partial(Whole, foreign=True)
