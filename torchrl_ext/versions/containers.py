"""The layouts of a delta's payloads in the files of its folder, for writing and for reading.

`Packed` is ours; `torchrl_ext.registry.containers` has all of them by the names that manifests give.
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
from torchrl_ext.codecs.patch import Patch
from torchrl_ext.errors import IntegrityError
from torchrl_ext.registry import containers
from torchrl_ext.stores.base import Draft
from torchrl_ext.stores.manifest import MANIFEST, DeltaManifest, DeltaParam, DeltaPart
from torchrl_ext.stores.versions import Held
from torchrl_ext.types import Info, ParamMeta
from torchrl_ext.weights.digests import PositionDigest, position_digest

__all__ = [
    "Container",
    "Decode",
    "Files",
    "NewDelta",
    "Packed",
    "Payload",
    "compare_payload",
    "damaged",
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
        checksum: of new tensors, where the container has one: ``"xxh3-128"``, ``"blake3"``, ``"adler32"``
            or ``"sha256"``.
    """

    version: int
    base: Held
    run_id: str
    codec: Codec
    params: tuple[ParamMeta, ...]
    tensors: Mapping[str, Tensor]
    digests: dict[str, PositionDigest]
    base_digests: Mapping[str, str] = field(default_factory=dict)
    checksum: str = "xxh3-128"

    def write(self, changes: Iterable[Encoded], draft: Draft, prefix: str = "") -> DeltaManifest:
        """Write the files as changes come, and the manifest last; return the manifest.

        Args:
            changes: of every parameter, in order.
            draft: where files are written.
            prefix: of their names there.
        """
        container = self.codec.container
        sizes, codecs, told = dict[str, int](), list[Codec](), list[Info]()
        found: dict[str, DeltaParam] = {}
        for file, data, payloads in containers.make(container).files(self, changes):
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


def damaged(name: str, path: str, stated: str, found: str, version: int) -> IntegrityError:
    """Return the error for a payload with another xxh3-64 than is stated."""
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
        raise damaged(meta.name, f"{where}/{placed.file}", stated, checksum, version)
