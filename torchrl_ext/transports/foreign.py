"""Chains that slime wrote, in either of its formats: no manifest of ours, and no digest of what a delta leaves alone.

`torchrl_ext.codecs.shards` and `torchrl_ext.codecs.flush` have the formats. What can be checked is checked: current
files carry a checksum of each new tensor; the first ones only one of their own bytes, and nothing names their base but
the number before them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, final

from torch import Tensor

from torchrl_ext.codecs.base import Codec, Encoded, codec_from_json, make_codec
from torchrl_ext.codecs.flush import parse_flush
from torchrl_ext.codecs.patch import Patch, apply_patch, fold
from torchrl_ext.codecs.shards import CHECKSUMS, INDEX_NAME, DeltaIndex, checksum, parse_shard
from torchrl_ext.errors import ConfigError, IntegrityError, ManifestError
from torchrl_ext.stores import Manifest, Placed, Root, version_name
from torchrl_ext.stores.deltas import DeltaManifest, DeltaParam
from torchrl_ext.stores.manifest import MANIFEST
from torchrl_ext.stores.routes import Found
from torchrl_ext.transports.containers import Container, Decode, Get, Heading, Put, Written, named
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.digest import byte_view
from torchrl_ext.weights.tensorfile import TensorFile

__all__ = ["ForeignFlushes", "ForeignVersions", "ForeignWhole"]

_RUN = "foreign"
_FLUSH = re.compile(r"rank\d+_flush\d+\.safetensors")
_FULL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.safetensors")


@final
class ForeignVersions:
    """`torchrl_ext.stores.chain.Foreign`.

    Args:
        store: where they are.
        base: the checkpoint directory that everything began with, if there is one.
    """

    def __init__(self, store: Root, base: str | None = None) -> None:
        self._store, self._base = store, base

    def start(self) -> tuple[ParamMeta, ...]:
        if self._base is None:
            raise ConfigError(
                f"the versions in {self._store.url} lead back to a checkpoint that is not among them",
                hint="pass base=, the directory of the checkpoint with which their trainer started",
            )
        return CheckpointSource(self._base).params()

    def base(self, number: int) -> int | None:
        folder = version_name(number)
        names = self._store.list(folder)
        if MANIFEST not in names:
            if INDEX_NAME in names:
                index = self._index(folder)
                return None if index is None else index.base_version
            if any(_FLUSH.fullmatch(name) for name in names) and not any(name.endswith(".tmp") for name in names):
                return number - 1
            if "model.safetensors" in names:
                return None
        raise FileNotFoundError(f"{self._store.url}/{folder}")

    def read(self, number: int, params: tuple[ParamMeta, ...]) -> Found:
        folder = version_name(number)
        names = self._store.list(folder)
        if INDEX_NAME not in names and any(_FLUSH.fullmatch(name) for name in names):
            files = {name: 0 for name in names if _FLUSH.fullmatch(name)}
            rows = tuple(DeltaParam(meta=meta, digest="") for meta in params)
            return None, (folder, _delta(number, number - 1, "foreign flushes", (), rows, files))
        index = self._index(folder) if INDEX_NAME in names else None
        if index is None:
            return self._full(number, folder, [name for name in names if _FULL.fullmatch(name)]), None
        return None, (folder, self._changes(number, folder, index, params))

    def _index(self, folder: str) -> DeltaIndex | None:
        """None for a full version's."""
        data, where = self._store.get(f"{folder}/{INDEX_NAME}"), f"{self._store.url}/{folder}/{INDEX_NAME}"
        try:
            full = "delta_encoding" not in (json.loads(data).get("metadata") or {})
        except (ValueError, AttributeError, RecursionError) as error:
            raise IntegrityError(f"{where} is damaged: {error}", state="nothing was read") from None
        return None if full else DeltaIndex.from_bytes(data, where)

    def _full(self, number: int, folder: str, names: list[str]) -> Manifest:
        placed: dict[str, Placed] = {}
        sizes = {}
        with self._store.local(folder, names) as path:
            for name in names:
                file = TensorFile(os.path.join(path, name))
                try:
                    sizes[name] = file.nbytes
                    placed |= {meta.name: Placed(meta=meta, file=name, checksum="") for meta in file.params()}
                finally:
                    file.close()
        return Manifest(version=number, run_id=_RUN, params=tuple(placed.values()), files=sizes)

    def _changes(self, number: int, folder: str, index: DeltaIndex, params: tuple[ParamMeta, ...]) -> DeltaManifest:
        where = f"{self._store.url}/{folder}/{INDEX_NAME}"
        if index.version != number:
            raise IntegrityError(f"{where} says that it is version {index.version}")
        if index.delta_encoding not in ("xor", "overwrite") or index.compression_format != "zstd":
            raise ManifestError(
                f"{where} is coded as {index.delta_encoding!r} in {index.compression_format!r}",
                expected="'xor' or 'overwrite' in 'zstd'",
            )
        if index.checksum_format not in CHECKSUMS:
            raise ManifestError(f"{where} has checksums {index.checksum_format!r}", expected=", ".join(CHECKSUMS))
        lost = min(index.weight_map.keys() - {meta.name for meta in params}, default=None)
        if lost is not None:
            raise ManifestError(f"{where} changes tensor {lost!r}, which its base has not", state="nothing was read")
        where_is = index.weight_map
        rows = tuple(
            DeltaParam(meta=meta, digest="", changed=1, file=where_is[meta.name], checksum=index.checksum_format)
            if meta.name in where_is
            else DeltaParam(meta=meta, digest="")
            for meta in params
        )
        codecs = (make_codec(index.delta_encoding).to_json(),)
        files = dict.fromkeys(index.files(), 0)
        return _delta(number, index.base_version, "foreign whole", codecs, rows, files)


def _delta(
    number: int,
    base: int,
    container: str,
    codecs: tuple[Any, ...],
    params: tuple[DeltaParam, ...],
    files: Mapping[str, int],
) -> DeltaManifest:
    return DeltaManifest(
        version=number,
        base_version=base,
        run_id=_RUN,
        base_run_id="",  # whatever has the number
        container=container,
        codecs=codecs,
        params=params,
        files=files,
    )


class _ReadOnly(Container):
    def write(self, heading: Heading, encoded: Iterable[Encoded], put: Put) -> Written:
        raise ConfigError(f"container {self.name!r} is only read")


@final
class ForeignFlushes(_ReadOnly):
    """Every flush file of a folder; what they change is known when they are read."""

    name: ClassVar[str] = "foreign flushes"

    def read(self, manifest: DeltaManifest, get: Get, where: str) -> Mapping[str, Decode]:
        metas = {param.meta.name: param.meta for param in manifest.params}
        found: dict[str, list[Patch]] = {}
        for name in manifest.files:
            file = parse_flush(get(name), f"{where}/{name}", metas)
            if not file.current_version.isdigit() or int(file.current_version) != manifest.version:
                raise IntegrityError(
                    f"{where}/{name} belongs to version {file.current_version!r}", expected=f"{manifest.version}"
                )
            for patch in file.patches:
                found.setdefault(patch.meta.name, []).append(patch)
        return {name: lambda base, patches=patches: fold(patches) for name, patches in found.items()}


@final
class ForeignWhole(_ReadOnly):
    """Shards whose metadata has a checksum of each new tensor."""

    name: ClassVar[str] = "foreign whole"

    def read(self, manifest: DeltaManifest, get: Get, where: str) -> Mapping[str, Decode]:
        codec = codec_from_json(manifest.codecs[0])
        shards = {name: parse_shard(get(name), f"{where}/{name}") for name in manifest.files}

        def decoder(param: DeltaParam) -> Decode:
            name, file = param.meta.name, f"{where}/{param.file}"
            if name not in shards[param.file].payloads:
                raise IntegrityError(f"{file} does not hold tensor {name!r}, as the index says")
            shard = shards[param.file]
            return named(
                file, _checked(codec, shard.payloads[name], param.meta, param.checksum, shard.checksums[name]), param
            )

        return {param.meta.name: decoder(param) for param in manifest.params if param.changed}


def _checked(codec: Codec, payload: memoryview, meta: ParamMeta, algorithm: str, expected: str) -> Decode:
    def decode(base: Tensor | None) -> Patch:
        patch = codec.decode(payload, meta, base)
        new = base.clone()  # type: ignore[union-attr] - these codecs refuse to decode without
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
