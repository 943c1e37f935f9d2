"""Manifests, each the last file of a version: what it holds or changes, and how that is written down."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar

import xxhash
import zstandard

from torchrl_ext.errors import IntegrityError, ManifestError, StoreError
from torchrl_ext.stores.base import checked_key
from torchrl_ext.types import Info, ParamMeta, Part

__all__ = ["LARGEST", "MANIFEST", "DeltaManifest", "DeltaParam", "DeltaPart", "Manifest", "Placed", "read_manifest"]

MANIFEST = "manifest.json"
LARGEST = 1 << 28
"""Bytes of a manifest, packed or not: a million parameters take less."""

_FORMAT_NUMBER = 2
_WITH_PARTS = 3  # of a delta whose rows have parts, which a reader of number 2 cannot read
_LEVEL = 1  # of zstd: 19 took 13 to 25 times as long for every version, for 6 to 8 % fewer bytes
_ZSTD = b"\x28\xb5\x2f\xfd"
_PARAMETERS = 1 << 20
_SMALL, _RATIO = 1 << 20, 256  # a frame may unpack to one MiB, or so many times its size: digests hardly compress
_BODY = '%s,\n  "params": [\n%s\n  ]'
_END = b',\n  "content": "%s"\n}\n'
_DAMAGE = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError, zstandard.ZstdError,
    ManifestError, StoreError,
)  # fmt: skip
"""The errors that reading a document raises where it is no manifest."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """One parameter of a version: what it is, the file that holds it, and the xxh3-128 of its bytes (32 hex digits)."""

    meta: ParamMeta
    file: str
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest of a full version: every parameter and file in its directory.

    Attributes:
        version: its number, 1 and up.
        run_id: names the trainer process that published it.
        params: every parameter, in the order of the source.
        files: size in bytes of every file beside the manifest, by name.
        part: which tensors differ from those of an earlier version, and the run that published that one; None where any
            may. The version is complete without it.
    """

    FORMAT: ClassVar[str] = "torchrl_ext.weights"
    NUMBERS: ClassVar[tuple[int, ...]] = (_FORMAT_NUMBER, 1)
    SUMS: ClassVar[tuple[str, str]] = ("checksum", "xxh3-128")

    version: int
    run_id: str
    params: tuple[Placed, ...]
    files: Mapping[str, int]
    part: tuple[str, Part] | None = None

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON in UTF-8, one parameter per line."""
        rows = []
        for placed in self.params:
            name, dtype, shape = placed.meta.to_json()
            row = {"name": name, "dtype": dtype, "shape": shape, "file": placed.file, "checksum": placed.checksum}
            rows.append("    " + json.dumps(row))
        head = {
            "format": self.FORMAT,
            "format_number": _FORMAT_NUMBER,
            "version": self.version,
            "base_version": None,
            "run_id": self.run_id,
            "checksum": self.SUMS[1],
            "files": dict(self.files),
            **({} if self.part is None else {"part": {"run_id": self.part[0], **self.part[1].to_json()}}),
        }
        body = (_BODY % (json.dumps(head, indent=2)[:-2], ",\n".join(rows))).encode()
        return body + _END % xxhash.xxh3_128_hexdigest(body).encode()

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Manifest:
        """Return the manifest in a document whose common fields were checked; raise one of `_DAMAGE` if it is none."""
        if found["base_version"] is not None:
            raise ValueError(f"it is a full version, and says that it is a delta on version {found['base_version']!r}")
        files, params = found["files"], dict[str, Placed]()
        for row in found["params"]:
            meta, file, checksum = (
                ParamMeta.from_json((row["name"], row["dtype"], row["shape"])),
                row["file"],
                row["checksum"],
            )
            if file not in files:
                raise ValueError("a parameter lies in a file that is not listed")
            if type(checksum) is not str or len(checksum) != 32:
                raise ValueError(f"{checksum!r} is no checksum of 32 hex digits")
            params[meta.name] = Placed(meta=meta, file=file, checksum=checksum)
        if len(params) != len(found["params"]):
            raise ValueError("a parameter is listed twice")
        part = None
        if "part" in found:
            part = str(found["part"]["run_id"]), Part.from_json(found["part"])
            if not part[1].names <= params.keys():
                raise ValueError("a tensor of its part is none of its parameters")
        return cls(
            version=found["version"], run_id=found["run_id"], params=tuple(params.values()), files=files, part=part
        )


@dataclass(frozen=True, kw_only=True)
class DeltaPart:
    """The change of one block of a parameter, which one trainer rank wrote.

    Attributes:
        start, sizes: the block: its first element, and its sizes, one number per dimension.
        changed, codec, file, offset, nbytes, checksum: as in `DeltaParam`; the payload codes the block as a contiguous
            tensor of its own.
    """

    start: tuple[int, ...]
    sizes: tuple[int, ...]
    changed: int
    codec: int
    file: str
    offset: int
    nbytes: int
    checksum: str = ""


@dataclass(frozen=True, kw_only=True)
class DeltaParam:
    """One parameter of a delta: what it is, and where its change lies.

    Attributes:
        meta: what it is.
        digest: position digest of the whole tensor *after* this delta (`torchrl_ext.weights.digests`); "" where
            another library wrote the delta, which has none.
        changed: units that changed; where it is 0 the fields below keep their defaults.
        codec: index into the manifest's ``codecs``.
        file: where the payload lies; "" where the container knows by itself.
        offset, nbytes: which bytes of the file.
        checksum: xxh3-64 of the payload, 16 hex digits; "" where payload or file have a checksum of their own.
        parts: its changes by block, where trainer ranks wrote them apart: blocks that do not meet. ``changed`` and
            ``nbytes`` are their sums then, and the other fields keep their defaults.
    """

    meta: ParamMeta
    digest: str
    changed: int = 0
    codec: int = 0
    file: str = ""
    offset: int = 0
    nbytes: int = 0
    checksum: str = ""
    parts: tuple[DeltaPart, ...] = ()

    @classmethod
    def of_parts(cls, meta: ParamMeta, digest: str, parts: Sequence[DeltaPart]) -> DeltaParam:
        """Return the row of a parameter that changed in these blocks."""
        changed, nbytes = sum(part.changed for part in parts), sum(part.nbytes for part in parts)
        return cls(meta=meta, digest=digest, changed=changed, nbytes=nbytes, parts=tuple(parts))

    @property
    def payloads(self) -> tuple[DeltaParam | DeltaPart, ...]:
        """What says where the payloads lie: the parts; or the row itself, where it has none and something changed."""
        return self.parts or ((self,) if self.changed else ())


@dataclass(frozen=True, kw_only=True)
class DeltaManifest:
    """The manifest of a delta: what it is taken against, and what it changes.

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
    NUMBERS: ClassVar[tuple[int, ...]] = (_WITH_PARTS, _FORMAT_NUMBER, 1)
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
    def changed(self) -> int:
        """The number of units that changed, in all parameters."""
        return sum(map(attrgetter("changed"), self.params))

    def to_bytes(self) -> bytes:
        """Return JSON in UTF-8 in a zstd frame.

        A row is ``[name, dtype, shape, digest]``, or that and the change, or that and a list of parts.
        """
        rows, ends, parted = [], dict[str, int](), False

        def placed(what: DeltaParam | DeltaPart) -> list[Any]:
            follows = what.offset == ends.get(what.file, 0)
            ends[what.file] = what.offset + what.nbytes
            found = [what.changed, what.codec, what.file, None if follows else what.offset, what.nbytes]
            return [*found, what.checksum] if what.checksum else found

        for param in self.params:
            row = [*param.meta.to_json(), param.digest]
            if param.parts:
                row.append([[part.start, part.sizes, *placed(part)] for part in param.parts])
                parted = True
            elif param.changed:
                row += placed(param)
            rows.append(json.dumps(row, separators=(",", ":")))
        head = {
            "format": self.FORMAT,
            "format_number": _WITH_PARTS if parted else _FORMAT_NUMBER,
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
        body = (_BODY % (json.dumps(head, indent=2)[:-2], ",\n".join(rows))).encode()
        text = body + _END % xxhash.xxh3_128_hexdigest(body).encode()
        return zstandard.ZstdCompressor(level=_LEVEL).compress(text)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> DeltaManifest:
        """Return the manifest in a document whose common fields were checked; raise one of `_DAMAGE` if it is none."""
        files, codecs, digests = found["files"], tuple(found["codecs"]), found.get("base_digests", {})
        counts, texts, sums = [found["base_version"]], [found["base_run_id"], found["container"]], [*digests.values()]
        for codec in codecs:
            texts.append(codec["name"])
        params, ends = dict[str, DeltaParam](), dict[str, int]()

        def placed(name: str, change: list[Any]) -> dict[str, Any]:
            changed, codec, file, offset, nbytes, checksum = [*change, ""] if len(change) == 5 else change
            offset = ends.get(file, 0) if offset is None else offset
            counts.extend((changed, codec, offset, nbytes))
            texts.extend((file, checksum))
            ends[file] = offset + nbytes
            if codec >= len(codecs) or (file and ends[file] > files.get(file, -1)):
                raise ValueError(f"the payload of {name!r} lies outside of the files")
            fields = "changed", "codec", "file", "offset", "nbytes", "checksum"
            return dict(zip(fields, (changed, codec, file, offset, nbytes, checksum), strict=True))

        for row in found["params"]:
            meta, digest, change = ParamMeta.from_json(row[:3]), row[3], row[4:]
            sums.append(digest)
            if not change:
                params[meta.name] = DeltaParam(meta=meta, digest=digest)
            elif isinstance(change[0], list):
                (rows,), parts = change, list[DeltaPart]()
                for start, sizes, *rest in rows:
                    _check_block(meta, start, sizes)
                    own = placed(meta.name, rest)
                    parts.append(DeltaPart(start=tuple(start), sizes=tuple(sizes), **own))
                held = sum(math.prod(part.sizes) for part in parts)
                if not 0 < held <= meta.numel or not all(part.changed and part.file for part in parts):
                    raise ValueError(f"the parts of {meta.name!r} are no parts of it")
                params[meta.name] = DeltaParam.of_parts(meta, digest, parts)
            else:
                params[meta.name] = DeltaParam(meta=meta, digest=digest, **placed(meta.name, change))
        if len(params) != len(found["params"]):
            raise ValueError("a parameter is listed twice")
        for count in counts:
            if type(count) is not int or not 0 <= count < 1 << 63:
                raise ValueError(f"{count!r} is not a count")
        for text in (*texts, *sums):
            if type(text) is not str:
                raise ValueError(f"{text!r} is no text")
        for digest in sums:
            if len(digest) != 32:
                raise ValueError(f"{digest!r} is no digest of 32 hex digits")
        if not found["base_version"] < found["version"]:
            raise ValueError(f"its base is version {found['base_version']}")
        return cls(
            version=found["version"],
            base_version=found["base_version"],
            run_id=found["run_id"],
            base_run_id=found["base_run_id"],
            container=found["container"],
            codecs=codecs,
            params=tuple(params.values()),
            files=files,
            base_digests=digests,
        )


def read_manifest(data: bytes, where: str) -> Manifest | DeltaManifest:
    """Return the manifest of a full version or of a delta, whichever kind ``data`` is.

    Args:
        data: the file's content, untrusted: JSON as it is, or in one zstd frame, told apart by the frame's first four
            bytes. Its text has to match the checksum at its end, which the first format has not.
        where: its path, for messages.

    Raises:
        IntegrityError: no manifest of a format that this version of the library reads, or a hostile one, which would
            take far more memory than a manifest does.
    """
    try:
        if data[:4] == _ZSTD:
            size = zstandard.frame_content_size(data)
            most = min(LARGEST, max(_SMALL, _RATIO * len(data)))
            if not 0 <= size <= most:
                raise ValueError(
                    f"its zstd frame declares {size} bytes, and a manifest of its size takes at most {most}"
                )
            data = zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
        parts = data.count(b",") + data.count(b"[") + data.count(b"{")
        if len(data) > LARGEST or parts > min(len(data) // 4 + 1000, 16 * _PARAMETERS):
            raise ValueError(f"it has {parts:,} parts in {len(data):,} bytes, which no manifest has")
        found = json.loads(data, parse_constant=_refuse)
        if not isinstance(found, dict):
            raise ValueError(f"it is a {type(found).__name__}")
        name, number, files = found["format"], found["format_number"], found["files"]
        body = data[: max(0, data.rfind(_END[:-6]))]
        kind = DeltaManifest if name == DeltaManifest.FORMAT else Manifest
        told = number in kind.NUMBERS and (number != 1 or "content" in found)
        if told and data != body + _END % xxhash.xxh3_128_hexdigest(body).encode():
            raise ValueError("its content is not that of its checksum")
        if name != kind.FORMAT or number not in kind.NUMBERS or found.get(kind.SUMS[0]) != kind.SUMS[1]:
            numbers = " or ".join(map(str, kind.NUMBERS))
            raise IntegrityError(
                f"{where} is format {name!r} number {number!r}",
                expected=f"{kind.FORMAT!r} number {numbers}, with {kind.SUMS[1]} as its {kind.SUMS[0]}",
                hint="use the same torchrl_ext version on both sides",
            )
        if not isinstance(found["params"], list) or len(found["params"]) > _PARAMETERS:
            raise ValueError(f"its parameters are no list of at most {_PARAMETERS:,}")
        if not isinstance(found["run_id"], str):
            raise ValueError(f"its run is {found['run_id']!r}")
        for file in files:
            if "/" in checked_key(file):
                raise ValueError(f"{file!r} is not a file name")
        for value in (found["version"], *files.values()):
            if type(value) is not int or not 0 <= value < 1 << 63:
                raise ValueError(f"{value!r} is not a count")
        return kind.of(found)
    except _DAMAGE as error:
        raise IntegrityError(
            f"{where} is damaged: {error}",
            state="nothing was read from this version",
            hint="let the trainer publish again, and check the disk",
        ) from None


def _check_block(meta: ParamMeta, start: Any, sizes: Any) -> None:
    """Raise a ValueError if these are not the first element and the sizes of a block of a parameter."""
    if not isinstance(start, list) or not isinstance(sizes, list):
        raise ValueError(f"{start!r} and {sizes!r} are no block")
    for first, size, whole in zip(start, sizes, meta.shape, strict=True):
        if type(first) is not int or type(size) is not int or not 0 <= first < first + size <= whole:
            raise ValueError(f"a part of {meta.name!r} begins at {start} and has sizes {sizes}")


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
