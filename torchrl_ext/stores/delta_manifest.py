"""`DeltaManifest`: the last file of a delta. What changed since which version, where it lies, what comes out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import zstandard

from torchrl_ext.stores.manifest import (
    FORMAT_NUMBER,
    Document,
    Manifest,
    checked_count,
    checked_text,
    closed,
    plain_name,
)
from torchrl_ext.types import Info, ParamMeta

__all__ = ["DELTA_FORMAT", "DeltaManifest", "DeltaParam", "read_manifest"]

DELTA_FORMAT = "torchrl_ext.delta"
_DIGEST = "position-2x64"
_LEVEL = 1  # of zstd: 19 took 13 to 25 times as long, on the way of every version, for 6 to 8 % fewer bytes


@dataclass(frozen=True, kw_only=True)
class DeltaParam:
    """One parameter of a delta.

    Attributes:
        meta: what it is.
        digest: position digest of the whole tensor *after* this delta (`torchrl_ext.weights.digests`); "" where
            another library wrote the delta, which has none.
        changed: units that changed; 0 means that nothing of the rest is set.
        codec: index into the manifest's ``codecs``.
        file: where the payload lies; "" where the container knows by itself.
        offset, nbytes: which bytes of the file.
        checksum: xxh3-64 of the payload, 16 hex digits; "" where payload or file have a checksum of their own.
    """

    meta: ParamMeta
    digest: str
    changed: int = 0
    codec: int = 0
    file: str = ""
    offset: int = 0
    nbytes: int = 0
    checksum: str = ""


@dataclass(frozen=True, kw_only=True)
class DeltaManifest:
    """What a delta holds.

    Attributes:
        version: the version that it leads to.
        base_version: the version that it starts from.
        run_id: the trainer process that published it.
        base_run_id: the one that published the base; "" where another library wrote the delta, which does not say.
        container: how payloads are laid out in files (`torchrl_ext.versions.delta_files`).
        codecs: JSON of every codec used.
        params: every parameter, changed or not, in the order of the source.
        files: size in bytes of every file beside the manifest.
        base_digests: position digest of every tensor of the base, where that is version 0, a checkpoint.
    """

    version: int
    base_version: int
    run_id: str
    base_run_id: str
    container: str
    codecs: tuple[Info, ...]
    params: tuple[DeltaParam, ...]
    files: Mapping[str, int]
    base_digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all payload files."""
        return sum(self.files.values())

    @property
    def changed(self) -> int:
        """Units that changed in all parameters."""
        return sum(param.changed for param in self.params)

    def to_bytes(self) -> bytes:
        """JSON, UTF-8, in a zstd frame. A parameter is ``[name, dtype, shape, digest]``, or that and its change."""
        rows, ends = [], dict[str, int]()
        for param in self.params:
            row = [*param.meta.to_json(), param.digest]
            if param.changed:
                follows = param.offset == ends.get(param.file, 0)
                ends[param.file] = param.offset + param.nbytes
                row += [param.changed, param.codec, param.file, None if follows else param.offset, param.nbytes]
                row += [param.checksum] if param.checksum else []
            rows.append(json.dumps(row, separators=(",", ":")))
        head = {
            "format": DELTA_FORMAT,
            "format_number": FORMAT_NUMBER,
            "version": self.version,
            "base_version": self.base_version,
            "run_id": self.run_id,
            "base_run_id": self.base_run_id,
            "digest": _DIGEST,
            "container": self.container,
            "codecs": list(self.codecs),
            "files": dict(self.files),
            **({"base_digests": dict(self.base_digests)} if self.base_digests else {}),
        }
        return zstandard.ZstdCompressor(level=_LEVEL).compress(closed(head, rows))

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> DeltaManifest:
        """Inverse of `to_bytes`.

        Args:
            data: the file's content; untrusted.
            where: its path, for messages.

        Raises:
            IntegrityError: no manifest of a format that this version of the library reads, or a hostile one.
        """
        return cls.of(Document.of(data, where))

    @classmethod
    def of(cls, document: Document) -> DeltaManifest:
        """As `from_bytes`, of what was read already."""
        with document.reported() as found:
            document.check_format(DELTA_FORMAT, "digest", _DIGEST)
            files = {plain_name(name): checked_count(size) for name, size in found["files"].items()}
            codecs = tuple(found["codecs"])
            if not all(isinstance(codec, dict) and isinstance(codec.get("name"), str) for codec in codecs):
                raise ValueError("its codecs are no list of names and settings")
            params = tuple(_params(found["params"], files, len(codecs)))
            if len({param.meta.name for param in params}) != len(params):
                raise ValueError("a parameter is listed twice")
            manifest = cls(
                version=checked_count(found["version"]),
                base_version=checked_count(found["base_version"]),
                run_id=checked_text(found["run_id"]),
                base_run_id=checked_text(found["base_run_id"]),
                container=checked_text(found["container"]),
                codecs=codecs,
                params=params,
                files=files,
                base_digests={str(name): _digest(name, text) for name, text in found.get("base_digests", {}).items()},
            )
            if not manifest.base_version < manifest.version:
                raise ValueError(f"its base is version {manifest.base_version}")
            document.check_content()
        return manifest


def read_manifest(data: bytes, where: str) -> Manifest | DeltaManifest:
    """A manifest of whichever kind it says that it is; arguments and errors as those of `DeltaManifest.from_bytes`."""
    document = Document.of(data, where)
    return DeltaManifest.of(document) if document.format == DELTA_FORMAT else Manifest.of(document)


def _params(rows: list[list[Any]], files: Mapping[str, int], codecs: int) -> Iterator[DeltaParam]:
    ends: dict[str, int] = {}
    for row in rows:
        meta, digest, rest = ParamMeta.from_json(row[:3]), row[3], row[4:]
        _digest(meta.name, digest)
        if not rest:
            yield DeltaParam(meta=meta, digest=digest)
            continue
        changed, codec, file, offset, nbytes, checksum = [*rest, ""] if len(rest) == 5 else rest
        param = DeltaParam(
            meta=meta,
            digest=digest,
            changed=checked_count(changed),
            codec=checked_count(codec),
            file=checked_text(file),
            offset=ends.get(file, 0) if offset is None else checked_count(offset),
            nbytes=checked_count(nbytes),
            checksum=checked_text(checksum),
        )
        ends[param.file] = param.offset + param.nbytes
        if param.codec >= codecs or (file and param.offset + param.nbytes > files.get(param.file, -1)):
            raise ValueError(f"the payload of {meta.name!r} lies outside of the files")
        yield param


def _digest(name: str, text: Any) -> str:
    if not isinstance(text, str) or len(text) != 32:
        raise ValueError(f"digest of {name!r} is {text!r}")
    return text
