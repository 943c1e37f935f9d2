"""Deltas in slime's current files, ``model-00000-of-00002.safetensors`` and an index (`codecs.slime.shards`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, final

import xxhash

from torchrl_ext.codecs.base import Encoded, codec_from_json
from torchrl_ext.codecs.slime.shards import (
    INDEX_NAME,
    DeltaIndex,
    build_shard,
    checksum,
    parse_shard,
    shard_name,
    split_shards,
)
from torchrl_ext.errors import IntegrityError
from torchrl_ext.stores.delta_manifest import DeltaManifest, DeltaParam
from torchrl_ext.versions.delta_files import Container, Decode, Get, Heading, Put, Written, checked_files, named
from torchrl_ext.weights.digests import byte_view

__all__ = ["Whole"]

_CHECKSUM = "xxh3-128"


@final
class Whole(Container):
    """One payload per changed tensor in files of at most ``FILE_BYTES``, and the index last.

    File names say how many there are, so payloads wait in memory until the last tensor is coded.
    """

    name: ClassVar[str] = "whole"
    FILE_BYTES: ClassVar[int] = 1 << 30

    def write(self, heading: Heading, encoded: Iterable[Encoded], put: Put) -> Written:
        written = Written()
        changes: dict[str, Encoded] = {}
        checksums: dict[str, str] = {}
        for change in encoded:
            if change.changed:
                name = change.meta.name
                changes[name] = change
                checksums[name] = checksum(_CHECKSUM, byte_view(heading.tensor(name)).cpu().numpy())
        shards = split_shards(((name, len(change.payload)) for name, change in changes.items()), self.FILE_BYTES)
        weight_map = {}
        for number, names in enumerate(shards):
            file = shard_name(number, len(shards))
            data = build_shard(
                {name: changes[name].payload for name in names}, {name: checksums[name] for name in names}
            )
            put(file, data)
            written.files[file] = len(data)
            for name in names:
                weight_map[name] = file
                change = changes.pop(name)
                written.params[name] = DeltaParam(
                    meta=change.meta,
                    digest="",
                    changed=change.changed,
                    codec=written.codec(change.codec),
                    file=file,
                    checksum=xxhash.xxh3_64_hexdigest(change.payload),
                )
        index = DeltaIndex(
            version=heading.version,
            base_version=heading.base_version,
            delta_encoding=heading.codec.name,
            checksum_format=_CHECKSUM,
            weight_map=weight_map,
        ).to_bytes()
        put(INDEX_NAME, index)
        written.files[INDEX_NAME] = len(index)
        return written

    def read(self, manifest: DeltaManifest, get: Get, where: str) -> Mapping[str, Decode]:
        codecs = [codec_from_json(info) for info in manifest.codecs]
        files = checked_files(manifest, get, where)
        shards = {name: parse_shard(data, f"{where}/{name}") for name, data in files.items() if name != INDEX_NAME}

        def decoder(param: DeltaParam) -> Decode:
            name, file = param.meta.name, f"{where}/{param.file}"
            if param.file not in shards or name not in shards[param.file].payloads:
                raise IntegrityError(f"{file} does not hold tensor {name!r}, as the manifest says")
            payload = shards[param.file].payloads[name]
            if xxhash.xxh3_64_hexdigest(payload) != param.checksum:
                raise IntegrityError(
                    f"tensor {name!r} in {file} is damaged",
                    expected=f"xxh3-64 {param.checksum}",
                    state=f"nothing of version {manifest.version} was used",
                    hint="let the trainer publish again, and check the disk",
                )
            return named(file, lambda base: codecs[param.codec].decode(payload, param.meta, base), param)

        return {param.meta.name: decoder(param) for param in manifest.params if param.changed}
