"""The layouts of a delta's payloads in the files of its folder, for writing and for reading.

`packed` is ours. `flushes` and `whole` are slime's first and current files (`torchrl_ext.compat.slime`), here with a
manifest of ours beside them. Called `foreign`, they are files that slime itself wrote, without such a manifest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple, final

import xxhash
from torch import Tensor

from torchrl_ext.codecs.base import Codec, Encoded, codec_from_json
from torchrl_ext.codecs.patch import Patch, SparsePatch, apply_patch, fold
from torchrl_ext.compat.slime import current, first
from torchrl_ext.errors import IntegrityError
from torchrl_ext.stores.base import Draft
from torchrl_ext.stores.manifest import MANIFEST, DeltaManifest, DeltaParam, DeltaPart
from torchrl_ext.stores.versions import Held
from torchrl_ext.types import Info, ParamMeta
from torchrl_ext.weights.digests import PositionDigest, byte_view, position_digest

__all__ = [
    "CONTAINERS",
    "Container",
    "Decode",
    "Files",
    "Flushes",
    "NewDelta",
    "Packed",
    "Payload",
    "Whole",
    "compare_payload",
]

Files = Mapping[str, memoryview]
"""The content of every payload file of a delta, by name."""

Decode = Callable[[Tensor | None], Patch]
"""Decodes the change of one parameter; takes the old tensor where the codec needs one."""


class Payload(NamedTuple):
    """The coded change of one parameter, and where it lies in its file, as in `DeltaParam`."""

    change: Encoded
    offset: int = 0
    nbytes: int = 0
    checksum: str = ""


@dataclass(frozen=True, kw_only=True)
class NewDelta:
    """A delta that is being written.

    Attributes:
        version: its number.
        base: run id and number of the version that it is taken against.
        run_id: of the trainer.
        codec: the encoding.
        params: every parameter, in order.
        tensors: the new tensors, by name, of the parameters whose change was iterated.
        digests: position digests before the change, by name; `write` brings them to the new version.
        base_digests: position digests of the base where that is version 0, a checkpoint; in hexadecimal.
        checksum: of new tensors, in files of slime's current format; one of `current.CHECKSUMS`.
    """

    version: int
    base: Held
    run_id: str
    codec: Codec
    params: tuple[ParamMeta, ...]
    tensors: Mapping[str, Tensor]
    digests: dict[str, PositionDigest]
    base_digests: Mapping[str, str] = field(default_factory=dict)
    checksum: str = current.CHECKSUMS[0]

    def write(self, changes: Iterable[Encoded], draft: Draft, prefix: str = "") -> DeltaManifest:
        """Write the files as changes come, and the manifest last; return the manifest.

        Args:
            changes: of every parameter, in order.
            draft: where files are written.
            prefix: of their names there.
        """
        container = _OF_ENCODING.get(self.codec.name, "packed")
        sizes, codecs, told = dict[str, int](), list[Codec](), list[Info]()
        found: dict[str, DeltaParam] = {}
        for file, data, payloads in CONTAINERS[container].files(self, changes):
            draft.write(prefix + file, data)
            sizes[file] = len(data)
            for change, offset, nbytes, checksum in payloads:
                name = change.meta.name
                if change.codec not in codecs:
                    codecs.append(change.codec)
                    told.append(change.codec.to_json())
                if change.digest is None:  # the codec did not find what changed
                    self.digests[name] = position_digest(self.tensors[name])
                else:
                    self.digests[name] = self.digests[name].plus(change.digest)
                found[name] = DeltaParam(
                    meta=change.meta,
                    digest=self.digests[name].hex(),
                    changed=change.changed,
                    codec=codecs.index(change.codec),
                    file=file,
                    offset=offset,
                    nbytes=nbytes,
                    checksum=checksum,
                )
        rows = []
        for meta in self.params:
            rows.append(found.get(meta.name) or DeltaParam(meta=meta, digest=self.digests[meta.name].hex()))
        return self.seal(container, told, rows, sizes, draft, prefix)

    def seal(
        self,
        container: str,
        codecs: Sequence[Info],
        rows: Sequence[DeltaParam],
        files: Mapping[str, int],
        draft: Draft,
        prefix: str = "",
    ) -> DeltaManifest:
        """Write the manifest of payloads that lie in ``draft``, and return it; as `DeltaManifest` for what it takes."""
        manifest = DeltaManifest(
            version=self.version,
            base_version=self.base[1],
            run_id=self.run_id,
            base_run_id=self.base[0],
            container=container,
            codecs=tuple(codecs),
            params=tuple(rows),
            files=files,
            base_digests=self.base_digests,
        )
        draft.write(prefix + MANIFEST, manifest.to_bytes())
        return manifest


class Container(ABC):
    """One layout of a delta's files, which writes and reads them."""

    @abstractmethod
    def files(self, delta: NewDelta, changes: Iterable[Encoded]) -> Iterator[tuple[str, bytes, list[Payload]]]:
        """Yield the name of each file of a delta, its content, and the payloads of changed parameters in it."""

    @abstractmethod
    def read(self, manifest: DeltaManifest, files: Files, where: str) -> Mapping[str, Decode]:
        """Return for each changed parameter a call that decodes it.

        Args:
            manifest: of the delta.
            files: what it consists of.
            where: the folder, for messages.

        Raises:
            IntegrityError: a file is not what the manifest says; names it and a tensor in it.
            ManifestError: an encoding that is not known here.
        """


def _damaged(name: str, path: str, stated: str, found: str, version: int) -> IntegrityError:
    return IntegrityError(
        f"tensor {name!r} in {path} is damaged",
        expected=f"xxh3-64 {stated}, found {found}",
        state=f"nothing of version {version} was used",
        hint="let the trainer publish again, and check the disk",
    )


@final
@dataclass(frozen=True)
class Packed(Container):
    """Lays payloads one after the other into files of about ``FILE_BYTES``, so that writing runs beside coding.

    Args:
        stem: of the names of files.
    """

    FILE_BYTES: ClassVar[int] = 64 << 20

    stem: str = "delta"

    def files(self, delta: NewDelta, changes: Iterable[Encoded]) -> Iterator[tuple[str, bytes, list[Payload]]]:
        return self.laid(changes)

    def laid(self, changes: Iterable[Encoded]) -> Iterator[tuple[str, bytes, list[Payload]]]:
        """Yield as `files`, which need to know nothing of the delta."""
        number, size, payloads = 1, 0, list[Payload]()
        parts: list[bytes] = []
        for change in changes:
            if not change.changed:
                continue
            data = change.payload
            checksum = "" if change.codec.framed else xxhash.xxh3_64_hexdigest(data)
            payloads.append(Payload(change, size, len(data), checksum))
            parts.append(data)
            size += len(data)
            if size >= self.FILE_BYTES:
                yield f"{self.stem}-{number:05d}.bin", b"".join(parts), payloads
                number, size, payloads, parts = number + 1, 0, [], []
        if parts:
            yield f"{self.stem}-{number:05d}.bin", b"".join(parts), payloads

    def read(self, manifest: DeltaManifest, files: Files, where: str) -> Mapping[str, Decode]:
        codecs, found = list(map(codec_from_json, manifest.codecs)), dict[str, Decode]()
        for param in manifest.params:
            if not param.changed:
                continue
            if param.file not in files:
                raise IntegrityError(
                    f"the manifest in {where} names no file for tensor {param.meta.name!r}",
                    expected=f"one of {', '.join(files) or 'none'}",
                    state=f"nothing of version {manifest.version} was used",
                )
            payload, codec = files[param.file][param.offset : param.offset + param.nbytes], codecs[param.codec]
            compare_payload(payload, codec, param, param.meta, where, manifest.version)
            found[param.meta.name] = partial(codec.decode, payload, param.meta)
        return found


def compare_payload(
    payload: memoryview, codec: Codec, placed: DeltaParam | DeltaPart, meta: ParamMeta, where: str, version: int
) -> None:
    """Compare a payload with its checksum, which is stated in its row, or stands at its end.

    Raises:
        IntegrityError: it is damaged; names tensor and file.
    """
    framed = codec.framed and not placed.checksum
    checksum = xxhash.xxh3_64_hexdigest(payload[:-8] if framed else payload)
    stated = bytes(payload[:-9:-1]).hex() if framed else placed.checksum
    if checksum != stated:
        raise _damaged(meta.name, f"{where}/{placed.file}", stated, checksum, version)


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
            data = current.build_shard(
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
                raise _damaged(name, f"{where}/{param.file}", param.checksum, checksum, manifest.version)
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


CONTAINERS: Mapping[str, Container] = {
    "packed": Packed(),
    "flushes": Flushes(),
    "whole": Whole(),
    "foreign flushes": Flushes(foreign=True),
    "foreign whole": Whole(foreign=True),
}
"""The layouts by the name that a manifest gives."""

_OF_ENCODING = {**dict.fromkeys(("indices", "deltas", "deltas_zstd"), "flushes"), "xor": "whole", "overwrite": "whole"}
