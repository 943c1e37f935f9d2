"""Manifests, each the last file of a version: what it holds or changes, and how that is written down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgspec
import torch
import xxhash
import zstandard

from torchrl_ext.base.errors import IntegrityError, ManifestError, StoreError
from torchrl_ext.base.types import Count, ParamMeta, Shape, Text, Wire, decode_dtype, described, dtype_name
from torchrl_ext.data.deltas.table import PARAMETERS
from torchrl_ext.data.stores.delta_manifest import END, DeltaManifest
from torchrl_ext.data.stores.store import checked_key

__all__ = ["LARGEST", "MANIFEST", "DeltaManifest", "Manifest", "Placed", "read_manifest"]

MANIFEST = "manifest.json"
LARGEST = 1 << 28
"""Bytes of a manifest, packed or not: a million parameters take less."""

_ZSTD = b"\x28\xb5\x2f\xfd"
_END = b',\n  "content": "%s"\n}\n'
_SMALL, _RATIO = 1 << 20, 256  # a frame may unpack to one MiB, or so many times its size: digests hardly compress
_DAMAGE = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError, zstandard.ZstdError,
    msgspec.MsgspecError, ManifestError, StoreError,
)  # fmt: skip
"""The errors that reading a document raises where it is no manifest."""


class Placed(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One parameter of a version: what it is, the file that holds it, and the xxh3-128 of its bytes (32 hex digits)."""

    meta: ParamMeta
    file: str
    checksum: str


class _Row(Wire, frozen=True, kw_only=True, gc=False):
    name: str
    dtype: torch.dtype
    shape: Shape
    file: str
    checksum: Annotated[str, msgspec.Meta(min_length=32, max_length=32)]


class _Head(Wire, frozen=True, kw_only=True):
    """What manifests of both kinds have."""

    format: str
    format_number: int
    files: dict[str, Count]


class _Full(_Head, frozen=True, kw_only=True):
    content: str
    version: Count
    run_id: Text
    checksum: str
    params: list[_Row]
    base_version: None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest of a full version: every parameter and file in its directory.

    Attributes:
        version: its number, 1 and up.
        run_id: names the trainer process that published it.
        params: every parameter, in the order of the source.
        files: size in bytes of every file beside the manifest, by name.
    """

    FORMAT: ClassVar[str] = "torchrl_ext.weights"
    NUMBER: ClassVar[int] = 1

    version: int
    run_id: str
    params: tuple[Placed, ...]
    files: Mapping[str, int]

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON in UTF-8, one parameter per line."""
        encode = msgspec.json.Encoder(enc_hook=dtype_name).encode
        rows = []
        for one in self.params:
            name, dtype, shape = one.meta.name, one.meta.dtype, one.meta.shape
            row = _Row(name=name, dtype=dtype, shape=shape, file=one.file, checksum=one.checksum)
            rows.append(b"    " + encode(row))
        head = {
            "format": self.FORMAT,
            "format_number": self.NUMBER,
            "version": self.version,
            "base_version": None,
            "run_id": self.run_id,
            "checksum": "xxh3-128",
            "files": dict(self.files),
        }
        body = json.dumps(head, indent=2)[:-2].encode() + b',\n  "params": [\n' + b",\n".join(rows) + b"\n  ]"
        return body + _END % xxhash.xxh3_128_hexdigest(body).encode()

    @classmethod
    def of(cls, data: bytes) -> Manifest:
        """Return the manifest in a document whose checksum was compared; raise one of `_DAMAGE` if it is none."""
        found = msgspec.json.decode(data, type=described(_Full), dec_hook=decode_dtype)
        if found.checksum != "xxh3-128":
            raise ValueError(f"its checksums are {found.checksum!r}")
        params = {}
        for row in found.params:
            if row.file not in found.files:
                raise ValueError("a parameter lies in a file that is not listed")
            meta = ParamMeta(row.name, row.dtype, row.shape)
            params[row.name] = Placed(meta=meta, file=row.file, checksum=row.checksum)
        if len(params) != len(found.params):
            raise ValueError("a parameter is listed twice")
        return cls(version=found.version, run_id=found.run_id, params=tuple(params.values()), files=found.files)


_KINDS: tuple[type[Manifest | DeltaManifest], ...] = (Manifest, DeltaManifest)


def read_manifest(data: bytes, where: str) -> Manifest | DeltaManifest:
    """Return the manifest of a full version or of a delta, whichever kind ``data`` is.

    Args:
        data: the file's content, untrusted: JSON as it is, or in one zstd frame, as its first four bytes say. Its
            text has to match the checksum at its end.
        where: its path, for messages.

    Raises:
        IntegrityError: no manifest of the format that this version of the library writes, or a hostile one, which
            would take far more memory than a manifest does.
    """
    try:
        text = _unpacked(data)
        parts = text.count(b",") + text.count(b"[") + text.count(b"{")
        if len(text) > LARGEST or parts > min(len(text) // 4 + 1000, 16 * PARAMETERS):
            raise ValueError(f"it has {parts:,} parts in {len(text):,} bytes, which no manifest has")
        head = msgspec.json.decode(text, type=described(_Head))
        kinds = [kind for kind in _KINDS if (head.format, head.format_number) == (kind.FORMAT, kind.NUMBER)]
        if not kinds:
            raise IntegrityError(
                f"{where} is format {head.format!r} number {head.format_number}",
                expected=" or ".join(f"{kind.FORMAT!r} number {kind.NUMBER}" for kind in _KINDS),
                hint="use the same torchrl_ext version on both sides",
            )
        for file in head.files:
            if "/" in checked_key(file):
                raise ValueError(f"{file!r} is not a file name")
        if not _is_whole(text):
            raise ValueError("its content does not match its checksum")
        return kinds[0].of(text)
    except _DAMAGE as error:
        raise IntegrityError(
            f"{where} is damaged: {error}",
            state="nothing was read from this version",
            hint="let the trainer publish again, and check the disk",
        ) from None


def _is_whole(text: bytes) -> bool:
    """Return whether a document ends with the checksum of all before it."""
    for end in (_END, END):
        body = text[: -len(end) - 30]  # 32 digits in the place of two
        if text[len(body) :] == end % xxhash.xxh3_128_hexdigest(body).encode():
            return True
    return False


def _unpacked(data: bytes) -> bytes:
    """Return the text of a manifest; the frame's own size bounds the memory that is taken."""
    if data[:4] != _ZSTD:
        return data
    size, most = zstandard.frame_content_size(data), min(LARGEST, max(_SMALL, _RATIO * len(data)))
    if not 0 <= size <= most:
        raise ValueError(f"its zstd frame declares {size} bytes, and a manifest of its size takes at most {most}")
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
