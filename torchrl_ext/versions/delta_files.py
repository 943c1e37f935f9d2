"""How the payloads of a delta are laid out in the files of its folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import ClassVar, final

import xxhash
from torch import Tensor

from torchrl_ext.codecs.base import Codec, Encoded, codec_from_json
from torchrl_ext.codecs.patch import Patch
from torchrl_ext.errors import IntegrityError
from torchrl_ext.stores.base import Draft
from torchrl_ext.stores.delta_manifest import DeltaManifest, DeltaParam
from torchrl_ext.types import Info, ParamMeta

__all__ = ["Container", "Decode", "DeltaFiles", "Files", "Packed", "damaged"]

Files = Mapping[str, memoryview]
"""Content of every payload file of a delta, by name."""

Decode = Callable[[Tensor | None], Patch]
"""Decodes the change of one parameter; takes the old tensor where the codec needs one."""


class DeltaFiles:
    """The files of one delta that is being written, and what its manifest will say of them.

    Args:
        version, base_version: of the delta.
        codec: the encoding.
        tensors: the new tensors, of names whose change was written at least.
        draft: where files are written.
        prefix: of their names.

    Attributes:
        codecs: JSON of the codecs used, in order of first use.
        sizes: bytes by file name.
        params: the manifest's rows of changed parameters, by name, digests still empty.
    """

    def __init__(
        self,
        version: int,
        base_version: int,
        codec: Codec,
        tensors: Mapping[str, Tensor],
        draft: Draft,
        prefix: str = "",
    ) -> None:
        self.version, self.base_version, self.codec, self.tensors = version, base_version, codec, tensors
        self._draft, self._prefix = draft, prefix
        self.codecs: list[Info] = []
        self.sizes: dict[str, int] = {}
        self.params: dict[str, DeltaParam] = {}

    def put(self, name: str, data: bytes) -> None:
        """Write one file."""
        self._draft.write(self._prefix + name, data)
        self.sizes[name] = len(data)

    def changed(
        self, meta: ParamMeta, changed: int, codec: Codec, file: str, *, offset: int = 0, nbytes: int = 0,
        checksum: str = "",
    ) -> None:  # fmt: skip
        """Note that a parameter changed, and where its payload is; as in `DeltaParam`."""
        info = codec.to_json()
        if info not in self.codecs:
            self.codecs.append(info)
        self.params[meta.name] = DeltaParam(
            meta=meta,
            digest="",
            changed=changed,
            codec=self.codecs.index(info),
            file=file,
            offset=offset,
            nbytes=nbytes,
            checksum=checksum,
        )


class Container(ABC):
    """One layout of files."""

    name: ClassVar[str]

    @abstractmethod
    def write(self, files: DeltaFiles, changes: Iterable[Encoded]) -> None:
        """Write changes as they come."""

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


def damaged(name: str, file: str, stated: str, found: str, version: int) -> IntegrityError:
    """Return the error that says that a payload is not what its checksum says."""
    return IntegrityError(
        f"tensor {name!r} in {file} is damaged",
        expected=f"xxh3-64 {stated}, found {found}",
        state=f"nothing of version {version} was used",
        hint="let the trainer publish again, and check the disk",
    )


@final
class Packed(Container):
    """Payloads one after the other, cut into files of about ``FILE_BYTES``, so that writing runs beside coding."""

    name: ClassVar[str] = "packed"
    FILE_BYTES: ClassVar[int] = 64 << 20

    def write(self, files: DeltaFiles, changes: Iterable[Encoded]) -> None:
        parts, size, file = list[bytes](), 0, "delta-00001.bin"
        for change in changes:
            if not change.changed:
                continue
            payload = change.payload
            checksum = "" if change.codec.framed else xxhash.xxh3_64_hexdigest(payload)
            files.changed(
                change.meta, change.changed, change.codec, file, offset=size, nbytes=len(payload), checksum=checksum
            )
            parts.append(payload)
            size += len(payload)
            if size >= self.FILE_BYTES:
                files.put(file, b"".join(parts))
                parts, size, file = [], 0, f"delta-{len(files.sizes) + 1:05d}.bin"
        if parts:
            files.put(file, b"".join(parts))

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
            framed = codec.framed and not param.checksum  # then it ends with its checksum
            checksum = xxhash.xxh3_64_hexdigest(payload[:-8] if framed else payload)
            stated = bytes(payload[:-9:-1]).hex() if framed else param.checksum
            if checksum != stated:
                raise damaged(param.meta.name, f"{where}/{param.file}", stated, checksum, manifest.version)
            found[param.meta.name] = partial(codec.decode, payload, param.meta)
        return found
