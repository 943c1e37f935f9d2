"""slime's files as containers of deltas: `Flushes` in its first format, `Whole` in its current one.

Both write them beside a manifest of ours, and read them so. Files that slime itself wrote have none: they are read with
a manifest that `torchrl_ext.compat.slime.foreign` makes, which has no digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import ClassVar, final

import numpy as np
import xxhash
from torch import Tensor

from torchrl_ext.codecs.base import Encoded, codec_from_json
from torchrl_ext.codecs.patch import Patch, SparsePatch, apply_patch
from torchrl_ext.compat.slime import current, first
from torchrl_ext.compat.slime.container import build_payloads
from torchrl_ext.errors import IntegrityError, ManifestError
from torchrl_ext.stores.delta_manifest import DeltaManifest, Placing
from torchrl_ext.versions.containers import Container, Decode, Files, OtherDelta, damaged
from torchrl_ext.weights.digests import byte_view

__all__ = ["Flushes", "Whole"]


@final
class Flushes(Container):
    """Lays many parameters' positions and values into each file, one dtype per file, as slime's first format does.

    What files of slime's own change is known when they are read, and one parameter may be in several.
    """

    def files(self, delta: OtherDelta, changes: Iterable[Encoded]) -> Iterator[tuple[str, bytes, Mapping[str, str]]]:
        encoding = delta.encoding

        def patches() -> Iterator[SparsePatch]:
            for change in changes:
                first.check_dtype(change.meta)
                patch = change.codec.decode(change.payload, change.meta)
                if patch.changed and isinstance(patch, SparsePatch):
                    yield patch

        for number, bucket in enumerate(first.flush_buckets(patches(), encoding)):
            data = first.build_flush(bucket, encoding, current_version=str(delta.version))
            yield first.flush_name(0, number), data, {patch.meta.name: "" for patch in bucket}

    def read(self, manifest: DeltaManifest, files: Files, where: str) -> Mapping[str, Decode]:
        metas = {meta.name: meta for meta in manifest.params}
        found: dict[str, list[SparsePatch]] = {}
        for name, data in files.items():
            file = first.parse_flush(data, f"{where}/{name}", metas)
            if not file.current_version.isdigit() or int(file.current_version) != manifest.version:
                raise IntegrityError(
                    f"{where}/{name} belongs to version {file.current_version!r}", expected=str(manifest.version)
                )
            for patch in file.patches:
                of = patch.meta.name
                stated = of in manifest.placed and manifest.placed[of].file == name
                stated = stated and manifest.changed[manifest.table.number[of]] == patch.changed
                if manifest.digests.size and not stated:
                    raise IntegrityError(f"{where}/{name} changes {of!r} otherwise than its manifest says")
                patch = SparsePatch(patch.meta, patch.indices, patch.values.copy())  # of its own: the file may go
                found.setdefault(of, []).append(patch)
        lost = min(manifest.placed.keys() - found.keys(), default=None)
        if lost is not None:
            raise IntegrityError(
                f"{where}/{manifest.placed[lost].file} does not hold tensor {lost!r}, as the manifest says"
            )
        return {name: partial(_folded, patches) for name, patches in found.items()}


def _folded(patches: list[SparsePatch], base: Tensor | None) -> Patch:
    """Return one patch that does what all do, one after the other."""
    if len(patches) == 1:
        return patches[0]
    indices, last = np.unique(np.concatenate([patch.indices for patch in patches])[::-1], return_index=True)
    return SparsePatch(patches[0].meta, indices, np.concatenate([patch.values for patch in patches])[::-1][last])


@final
class Whole(Container):
    """Lays one payload per changed tensor into files of at most ``FILE_BYTES``, and writes the index last.

    File names say how many there are, so payloads wait in memory until the last tensor is coded. Files of slime's own
    have a checksum of each new tensor only, which is compared when its change is decoded.
    """

    FILE_BYTES: ClassVar[int] = 1 << 30

    def files(self, delta: OtherDelta, changes: Iterable[Encoded]) -> Iterator[tuple[str, bytes, Mapping[str, str]]]:
        waiting, sums = dict[str, bytes](), dict[str, str]()
        for change in changes:
            if change.changed:
                name = change.meta.name
                waiting[name] = change.payload
                sums[name] = current.checksum(delta.checksum, byte_view(delta.tensors[name]).cpu().numpy())
        shards = current.split_shards(((name, len(payload)) for name, payload in waiting.items()), self.FILE_BYTES)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(shards):
            file, own = current.shard_name(number, len(shards)), {name: waiting.pop(name) for name in names}
            weight_map |= dict.fromkeys(names, file)
            data = build_payloads(own, {name: sums[name] for name in names})
            yield file, data, {name: xxhash.xxh3_64_hexdigest(payload) for name, payload in own.items()}
        index = current.DeltaIndex(
            version=delta.version,
            base_version=delta.base_version,
            delta_encoding=delta.encoding,
            checksum_format=delta.checksum,
            weight_map=weight_map,
        )
        yield current.INDEX_NAME, index.to_bytes(), {}

    def read(self, manifest: DeltaManifest, files: Files, where: str) -> Mapping[str, Decode]:
        codec, found, ours = (
            codec_from_json(next(iter(manifest.codecs), {})),
            dict[str, Decode](),
            manifest.digests.size,
        )
        if codec.container != manifest.container:
            raise ManifestError(f"{where} is coded as {codec.name!r}", expected="'xor' or 'overwrite'")
        says = "the manifest says" if ours else "the index says"
        shards = {
            name: current.parse_shard(data, f"{where}/{name}")
            for name, data in files.items()
            if name != current.INDEX_NAME
        }
        more = {(file, name) for file, shard in shards.items() for name in shard.payloads}
        for name, placed in manifest.placed.items():
            shard = shards.get(placed.file)
            if shard is None or name not in shard.payloads:
                raise IntegrityError(f"{where}/{placed.file} does not hold tensor {name!r}, as {says}")
            more.discard((placed.file, name))
            payload, meta = shard.payloads[name], manifest.params[manifest.table.number[name]]
            decode = found[name] = partial(codec.decode, payload, meta)
            if not ours:
                found[name] = partial(_checked, decode, placed, shard.checksums[name])
            elif (checksum := xxhash.xxh3_64_hexdigest(payload)) != placed.checksum:
                raise damaged(name, f"{where}/{placed.file}", placed.checksum, checksum, manifest.version)
        if more:
            file, name = min(more)
            raise IntegrityError(
                f"{where}/{file} changes tensor {name!r}, and the index does not say so",
                state=f"nothing of version {manifest.version} was used",
                hint="the index is damaged; let the trainer publish again",
            )
        return found


def _checked(decode: Decode, placed: Placing, expected: str, base: Tensor | None) -> Patch:
    patch = decode(base)
    new = base.clone()  # type: ignore[union-attr]
    apply_patch(patch, new)
    found = current.checksum(placed.checksum, byte_view(new).numpy())
    if found != expected:
        raise IntegrityError(
            "the result differs from the trainer's tensor",
            expected=f"{placed.checksum} {expected}, found {found}",
            state="nothing of it was used",
            hint="the delta was taken against another base, or is damaged",
        )
    return patch
