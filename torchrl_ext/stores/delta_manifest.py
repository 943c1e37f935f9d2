"""`DeltaManifest`: the last file of a delta. What changed since which version, where it lies, what comes out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar

import zstandard

from torchrl_ext.errors import IntegrityError
from torchrl_ext.stores.manifest import (
    DAMAGE,
    FORMAT_NUMBER,
    Manifest,
    closed,
    count,
    file_sizes,
    parsed,
    text,
)
from torchrl_ext.types import Info, ParamMeta

__all__ = ["DeltaManifest", "DeltaParam", "read_manifest"]

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
        container: how payloads are laid out in files (`torchrl_ext.versions.containers`).
        codecs: JSON of every codec used.
        params: every parameter, changed or not, in the order of the source.
        files: size in bytes of every file beside the manifest.
        base_digests: position digest of every tensor of the base, where that is version 0, a checkpoint.
    """

    FORMAT: ClassVar[str] = "torchrl_ext.delta"
    SUMS: ClassVar[tuple[str, str]] = ("digest", "position-2x64")

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
        """The bytes of all payload files."""
        return sum(self.files.values())

    @property
    def changed(self) -> int:
        """The units that changed, in all parameters."""
        return sum(map(attrgetter("changed"), self.params))

    def to_bytes(self) -> bytes:
        """Return JSON, UTF-8, in a zstd frame. A row is ``[name, dtype, shape, digest]``, or that and the change."""
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
            "format": self.FORMAT,
            "format_number": FORMAT_NUMBER,
            "version": self.version,
            "base_version": self.base_version,
            "run_id": self.run_id,
            "base_run_id": self.base_run_id,
            "digest": self.SUMS[1],
            "container": self.container,
            "codecs": list(self.codecs),
            "files": dict(self.files),
            **({"base_digests": dict(self.base_digests)} if self.base_digests else {}),
        }
        return zstandard.ZstdCompressor(level=_LEVEL).compress(closed(head, rows))

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> DeltaManifest:
        """Return what a document says; where it says something else, one of `DAMAGE`."""
        files, codecs = file_sizes(found), tuple(found["codecs"])
        for codec in codecs:
            text(codec["name"])
        manifest = cls(
            version=count(found["version"]),
            base_version=count(found["base_version"]),
            run_id=text(found["run_id"]),
            base_run_id=text(found["base_run_id"]),
            container=text(found["container"]),
            codecs=codecs,
            params=tuple(_params(found["params"], files, len(codecs))),
            files=files,
            base_digests=found.get("base_digests", {}),
        )
        for digest in manifest.base_digests.values():
            text(digest, 32)
        if not manifest.base_version < manifest.version:
            raise ValueError(f"its base is version {manifest.base_version}")
        return manifest


def read_manifest(data: bytes, where: str) -> Manifest | DeltaManifest:
    """Return a manifest of whichever kind it says that it is.

    Args:
        data: the file's content; untrusted.
        where: its path, for messages.

    Raises:
        IntegrityError: no manifest of a format that this version of the library reads, or a hostile one.
    """
    try:
        found = parsed(data)
        name, number = found["format"], found["format_number"]
        kind = DeltaManifest if name == DeltaManifest.FORMAT else Manifest
        if name != kind.FORMAT or number not in (1, FORMAT_NUMBER) or found.get(kind.SUMS[0]) != kind.SUMS[1]:
            raise IntegrityError(
                f"{where} is format {name!r} number {number!r}",
                expected=f"{kind.FORMAT!r} number {FORMAT_NUMBER} or 1, with {kind.SUMS[1]} as its {kind.SUMS[0]}",
                hint="use the same torchrl_ext version on both sides",
            )
        return kind.of(found)
    except DAMAGE as error:
        raise IntegrityError(
            f"{where} is damaged: {error}",
            state="nothing was read from this version",
            hint="let the trainer publish again, and check the disk",
        ) from None


def _params(rows: list[list[Any]], files: Mapping[str, int], codecs: int) -> Iterator[DeltaParam]:
    ends, names = dict[str, int](), set[str]()
    for row in rows:
        meta, digest, rest = ParamMeta.from_json(row[:3]), text(row[3], 32), row[4:]
        if meta.name in names:
            raise ValueError("a parameter is listed twice")
        names.add(meta.name)
        if not rest:
            yield DeltaParam(meta=meta, digest=digest)
            continue
        changed, codec, file, offset, nbytes, checksum = [*rest, ""] if len(rest) == 5 else rest
        param = DeltaParam(
            meta=meta,
            digest=digest,
            changed=count(changed),
            codec=count(codec),
            file=text(file),
            offset=ends.get(file, 0) if offset is None else count(offset),
            nbytes=count(nbytes),
            checksum=text(checksum),
        )
        ends[param.file] = param.offset + param.nbytes
        if param.codec >= codecs or (file and param.offset + param.nbytes > files.get(param.file, -1)):
            raise ValueError(f"the payload of {meta.name!r} lies outside of the files")
        yield param
