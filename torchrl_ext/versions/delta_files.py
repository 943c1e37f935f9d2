"""How the payloads of a delta are laid out in the files of its folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import xxhash
from torch import Tensor

from torchrl_ext.codecs.base import Codec, Encoded, codec_from_json
from torchrl_ext.codecs.patch import Patch
from torchrl_ext.errors import ConfigError, IntegrityError, ManifestError
from torchrl_ext.registry import Registry
from torchrl_ext.stores.delta_manifest import DeltaManifest, DeltaParam
from torchrl_ext.types import Info

__all__ = [
    "Container",
    "Decode",
    "Get",
    "Heading",
    "Put",
    "Written",
    "checked_files",
    "container_of",
    "containers",
    "named",
]

Put = Callable[[str, bytes], None]
Get = Callable[[str], bytes]
Decode = Callable[[Tensor | None], Patch]
"""Decodes the change of one parameter; takes the old tensor where the codec needs one."""

containers = Registry("container")
containers.register("packed", "torchrl_ext.versions.delta_files:Packed", "payloads one after the other")
containers.register("flushes", "torchrl_ext.versions.slime.first:Flushes", "slime's first files")
containers.register("whole", "torchrl_ext.versions.slime.current:Whole", "slime's current files")
containers.register("foreign flushes", "torchrl_ext.versions.slime.chains:ForeignFlushes", "flushes without a manifest")
containers.register(
    "foreign whole", "torchrl_ext.versions.slime.chains:ForeignWhole", "slime's files without a manifest"
)


def container_of(manifest: DeltaManifest, where: str) -> Container:
    """The container that reads a delta.

    Args:
        manifest: of the delta.
        where: its folder, for messages.

    Raises:
        ManifestError: no such container here.
    """
    try:
        return containers.make(manifest.container)
    except ConfigError as error:
        raise ManifestError(f"{where} is laid out in a way unknown here: {error.what}", hint=error.hint) from error


@dataclass(frozen=True, kw_only=True)
class Heading:
    """What a container may write beside the payloads.

    Attributes:
        version, base_version: of the delta.
        codec: the encoding.
        tensor: the new tensor of a name whose change was written.
    """

    version: int
    base_version: int
    codec: Codec
    tensor: Callable[[str], Tensor]


class Written:
    """What a container wrote.

    Attributes:
        codecs: JSON of the codecs used, in order of first use.
        files: size in bytes by file name.
        params: the manifest's rows of changed parameters, by name, digests still empty.
    """

    def __init__(self) -> None:
        self.codecs: list[Info] = []
        self.files: dict[str, int] = {}
        self.params: dict[str, DeltaParam] = {}

    def codec(self, codec: Codec) -> int:
        """Index of ``codec``."""
        info = codec.to_json()
        if info not in self.codecs:
            self.codecs.append(info)
        return self.codecs.index(info)


class Container(ABC):
    """One layout."""

    name: ClassVar[str]

    def scanner(self, codec: Codec) -> Codec:
        """The codec whose payloads `write` takes, where that is not the encoding itself."""
        return codec

    @abstractmethod
    def write(self, heading: Heading, encoded: Iterable[Encoded], put: Put) -> Written:
        """Write changes as they come; ``put`` takes a file's name and content."""

    @abstractmethod
    def read(self, manifest: DeltaManifest, get: Get, where: str) -> Mapping[str, Decode]:
        """For each changed parameter a call that decodes it; every file is fetched here.

        Args:
            manifest: of the delta.
            get: content of a file.
            where: the folder, for messages.

        Raises:
            FileNotFoundError: a file is not there.
            IntegrityError: a file is not what the manifest says; names it and a tensor in it.
            ManifestError: an encoding that is not known here.
        """


@final
class Packed(Container):
    """Payloads one after the other, cut into files of about ``FILE_BYTES``, so that writing runs beside coding."""

    name: ClassVar[str] = "packed"
    FILE_BYTES: ClassVar[int] = 64 << 20

    def write(self, heading: Heading, encoded: Iterable[Encoded], put: Put) -> Written:
        written, parts, size = Written(), [], 0

        def flush() -> None:
            nonlocal parts, size
            if parts:
                put(name(), b"".join(parts))
                written.files[name()] = size
            parts, size = [], 0

        def name() -> str:
            return f"delta-{len(written.files) + 1:05d}.bin"

        for change in encoded:
            if not change.changed:
                continue
            written.params[change.meta.name] = DeltaParam(
                meta=change.meta,
                digest="",
                changed=change.changed,
                codec=written.codec(change.codec),
                file=name(),
                offset=size,
                nbytes=len(change.payload),
                checksum="" if change.codec.framed else xxhash.xxh3_64_hexdigest(change.payload),
            )
            parts.append(change.payload)
            size += len(change.payload)
            if size >= self.FILE_BYTES:
                flush()
        flush()
        return written

    def read(self, manifest: DeltaManifest, get: Get, where: str) -> Mapping[str, Decode]:
        codecs = [codec_from_json(info) for info in manifest.codecs]
        files = checked_files(manifest, get, where)

        def decoder(param: DeltaParam) -> Decode:
            if param.file not in files:
                raise IntegrityError(
                    f"the manifest in {where} names no file for tensor {param.meta.name!r}",
                    expected=f"one of {', '.join(files) or 'none'}",
                    state=f"nothing of version {manifest.version} was used",
                )
            payload = files[param.file][param.offset : param.offset + param.nbytes]
            framed = codecs[param.codec].framed and not param.checksum  # then it ends with its checksum
            found = xxhash.xxh3_64_hexdigest(payload[:-8] if framed else payload)
            stated = bytes(payload[:-9:-1]).hex() if framed else param.checksum
            if found != stated:
                raise IntegrityError(
                    f"tensor {param.meta.name!r} in {where}/{param.file} is damaged",
                    expected=f"xxh3-64 {stated}, found {found}",
                    state=f"nothing of version {manifest.version} was used",
                    hint="let the trainer publish again, and check the disk",
                )
            return named(
                f"{where}/{param.file}", lambda base: codecs[param.codec].decode(payload, param.meta, base), param
            )

        return {param.meta.name: decoder(param) for param in manifest.params if param.changed}


def checked_files(manifest: DeltaManifest, get: Get, where: str) -> dict[str, memoryview]:
    """Every file of a delta.

    Raises:
        FileNotFoundError: one is not there.
        IntegrityError: one has not the size that the manifest gives; names it and a tensor in it.
    """
    files = {}
    for name, size in manifest.files.items():
        data = files[name] = memoryview(get(name))
        if len(data) != size:
            rows = [param for param in manifest.params if param.changed and param.file == name]
            cut = next((p for p in rows if p.offset + p.nbytes > len(data)), rows[0] if rows else None)
            tensor = f", so that tensor {cut.meta.name!r} cannot be read" if cut else ""
            raise IntegrityError(
                f"{where}/{name} has {len(data)} bytes{tensor}",
                expected=f"{size}, as in the manifest",
                state=f"nothing of version {manifest.version} was used",
                hint="let the trainer publish again, and check the disk",
            )
    return files


def named(file: str, decode: Decode, param: DeltaParam) -> Decode:
    """``decode``, whose errors name tensor and file."""

    def located(base: Tensor | None) -> Patch:
        try:
            return decode(base)
        except IntegrityError as error:
            raise IntegrityError(
                f"tensor {param.meta.name!r} in {file} cannot be used: {error.what}",
                expected=error.expected,
                state=error.state,
                hint=error.hint or "let the trainer publish again",
            ) from error

    return located
