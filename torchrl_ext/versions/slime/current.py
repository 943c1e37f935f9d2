"""Deltas in slime's current files, ``model-00000-of-00002.safetensors`` and an index (`codecs.slime.current`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import ClassVar, final

import xxhash
from torch import Tensor

from torchrl_ext.codecs.base import Codec, Encoded, codec_from_json
from torchrl_ext.codecs.patch import Patch, apply_patch
from torchrl_ext.codecs.slime.current import (
    INDEX_NAME,
    DeltaIndex,
    build_shard,
    checksum,
    parse_shard,
    shard_name,
    split_shards,
)
from torchrl_ext.errors import ConfigError, IntegrityError
from torchrl_ext.stores.delta_manifest import DeltaManifest
from torchrl_ext.types import ParamMeta
from torchrl_ext.versions.delta_files import Container, Decode, DeltaFiles, Files, damaged
from torchrl_ext.weights.digests import byte_view

__all__ = ["ForeignWhole", "Whole"]

_CHECKSUM = "xxh3-128"


@final
class Whole(Container):
    """One payload per changed tensor in files of at most ``FILE_BYTES``, and the index last.

    File names say how many there are, so payloads wait in memory until the last tensor is coded.
    """

    name: ClassVar[str] = "whole"
    FILE_BYTES: ClassVar[int] = 1 << 30

    def write(self, files: DeltaFiles, changes: Iterable[Encoded]) -> None:
        waiting: dict[str, Encoded] = {}
        checksums: dict[str, str] = {}
        for change in changes:
            if change.changed:
                name = change.meta.name
                waiting[name] = change
                checksums[name] = checksum(_CHECKSUM, byte_view(files.tensors[name]).cpu().numpy())
        shards = split_shards(((name, len(change.payload)) for name, change in waiting.items()), self.FILE_BYTES)
        weight_map = {}
        for number, names in enumerate(shards):
            file, payloads = shard_name(number, len(shards)), {name: waiting[name].payload for name in names}
            files.put(file, build_shard(payloads, {name: checksums[name] for name in names}))
            for name in names:
                weight_map[name], change = file, waiting.pop(name)
                payload_sum = xxhash.xxh3_64_hexdigest(change.payload)
                files.changed(change.meta, change.changed, change.codec, file, checksum=payload_sum)
        index = DeltaIndex(
            version=files.version,
            base_version=files.base_version,
            delta_encoding=files.codec.name,
            checksum_format=_CHECKSUM,
            weight_map=weight_map,
        )
        files.put(INDEX_NAME, index.to_bytes())

    def read(self, manifest: DeltaManifest, files: Files, where: str) -> Mapping[str, Decode]:
        codecs, found = [codec_from_json(info) for info in manifest.codecs], dict[str, Decode]()
        shards = {name: parse_shard(data, f"{where}/{name}") for name, data in files.items() if name != INDEX_NAME}
        for param in manifest.params:
            if not param.changed:
                continue
            name, file = param.meta.name, f"{where}/{param.file}"
            if param.file not in shards or name not in shards[param.file].payloads:
                raise IntegrityError(f"{file} does not hold tensor {name!r}, as the manifest says")
            payload = shards[param.file].payloads[name]
            checksum_found = xxhash.xxh3_64_hexdigest(payload)
            if checksum_found != param.checksum:
                raise damaged(name, file, param.checksum, checksum_found, manifest.version)
            found[name] = partial(codecs[param.codec].decode, payload, param.meta)
        return found


@final
class ForeignWhole(Container):
    """Shards whose metadata has a checksum of each new tensor."""

    name: ClassVar[str] = "foreign whole"

    def write(self, files: DeltaFiles, changes: Iterable[Encoded]) -> None:
        raise ConfigError(f"container {self.name!r} is only read")

    def read(self, manifest: DeltaManifest, files: Files, where: str) -> Mapping[str, Decode]:
        codec = codec_from_json(manifest.codecs[0])
        shards = {name: parse_shard(data, f"{where}/{name}") for name, data in files.items()}
        said = {(param.file, param.meta.name) for param in manifest.params if param.changed}
        for file, shard in shards.items():
            more = next((name for name in shard.payloads if (file, name) not in said), None)
            if more is not None:
                raise IntegrityError(
                    f"{where}/{file} changes tensor {more!r}, and the index does not say so",
                    state=f"nothing of version {manifest.version} was used",
                    hint="the index is damaged; let the trainer publish again",
                )

        found: dict[str, Decode] = {}
        for param in manifest.params:
            if not param.changed:
                continue
            name, shard = param.meta.name, shards[param.file]
            if name not in shard.payloads:
                raise IntegrityError(f"{where}/{param.file} does not hold tensor {name!r}, as the index says")
            found[name] = _checked(codec, shard.payloads[name], param.meta, param.checksum, shard.checksums[name])
        return found


def _checked(codec: Codec, payload: memoryview, meta: ParamMeta, algorithm: str, expected: str) -> Decode:
    def decode(base: Tensor | None) -> Patch:
        patch = codec.decode(payload, meta, base)
        new = base.clone()  # type: ignore[union-attr]
        apply_patch(patch, new)
        found = checksum(algorithm, byte_view(new).numpy())
        if found != expected:
            raise IntegrityError(
                f"{meta.name!r} does not become what the trainer had",
                expected=f"{algorithm} {expected}, found {found}",
                state="nothing of it was used",
                hint="the delta was taken against another base, or is damaged",
            )
        return patch

    return decode
