"""How the payloads of a delta are laid out in the files of its folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

from torch import Tensor

from torchrl_ext.codecs.base import Codec, Encoded, codec_from_json
from torchrl_ext.codecs.patch import Patch
from torchrl_ext.errors import IntegrityError
from torchrl_ext.registry import Registry
from torchrl_ext.stores.deltas import DeltaManifest, DeltaParam
from torchrl_ext.types import Info

__all__ = ["Container", "Written", "containers"]

Put = Callable[[str, bytes], None]
Get = Callable[[str], bytes]

containers = Registry("container")
containers.register("packed", "torchrl_ext.transports.containers:Packed", "payloads one after the other")


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

    @abstractmethod
    def write(self, encoded: Iterable[Encoded], put: Put) -> Written:
        """Write changes as they come; ``put`` takes a file's name and content."""

    @abstractmethod
    def read(self, manifest: DeltaManifest, get: Get) -> Mapping[str, Callable[[Tensor | None], Patch]]:
        """For each changed parameter a call that decodes it; takes the old tensor where the codec needs one.

        Raises:
            IntegrityError: a file is not what the manifest says.
        """


class Packed(Container):
    """Payloads one after the other, cut into files of about ``FILE_BYTES``, so that writing runs beside coding."""

    name: ClassVar[str] = "packed"
    FILE_BYTES: ClassVar[int] = 64 << 20

    def write(self, encoded: Iterable[Encoded], put: Put) -> Written:
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
            )
            parts.append(change.payload)
            size += len(change.payload)
            if size >= self.FILE_BYTES:
                flush()
        flush()
        return written

    def read(self, manifest: DeltaManifest, get: Get) -> Mapping[str, Callable[[Tensor | None], Patch]]:
        codecs = [codec_from_json(info) for info in manifest.codecs]
        files: dict[str, memoryview] = {}
        for name, size in manifest.files.items():
            data = files[name] = memoryview(get(name))
            if len(data) != size:
                raise IntegrityError(
                    f"file {name} of version {manifest.version} has {len(data)} bytes", expected=f"{size}, as in the manifest"
                )

        def decoder(param: DeltaParam) -> Callable[[Tensor | None], Patch]:
            payload = files[param.file][param.offset : param.offset + param.nbytes]
            return lambda base: codecs[param.codec].decode(payload, param.meta, base)

        return {param.meta.name: decoder(param) for param in manifest.params if param.changed}
