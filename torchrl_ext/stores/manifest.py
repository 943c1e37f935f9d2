"""`Manifest`: the last file of a full version; and how the text of a manifest of either kind is written and read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import xxhash
import zstandard

from torchrl_ext.errors import ManifestError, StoreError
from torchrl_ext.stores.base import checked_key
from torchrl_ext.types import ParamMeta, dtype_name

__all__ = [
    "DAMAGE",
    "FORMAT_NUMBER",
    "LARGEST",
    "MANIFEST",
    "Manifest",
    "Placed",
    "closed",
    "count",
    "file_sizes",
    "parsed",
    "plain_name",
    "text",
]

MANIFEST = "manifest.json"
FORMAT_NUMBER = 2
LARGEST = 1 << 28
"""Bytes of a manifest, packed or not: a million parameters take less."""

_ZSTD = b"\x28\xb5\x2f\xfd"
_PARAMETERS = 1 << 20
_SMALL, _RATIO = 1 << 20, 256  # a frame grows to one MiB, or to so many times its size: digests hardly compress
DAMAGE = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError,
    ManifestError, StoreError,
)  # fmt: skip
"""What reading a document raises that is no manifest."""

_CONTENT = b',\n  "content": "'


@dataclass(frozen=True, kw_only=True)
class Placed:
    """One parameter of a version: what it is, the file that holds it, and the xxh3-128 of its bytes (32 hex digits)."""

    meta: ParamMeta
    file: str
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What the directory of a full version holds.

    Attributes:
        version: its number, 1 and up.
        run_id: names the trainer process that published it.
        params: every parameter, in the order of the source.
        files: size in bytes of every file beside the manifest, by name.
    """

    FORMAT: ClassVar[str] = "torchrl_ext.weights"
    SUMS: ClassVar[tuple[str, str]] = ("checksum", "xxh3-128")

    version: int
    run_id: str
    params: tuple[Placed, ...]
    files: Mapping[str, int]

    def to_bytes(self) -> bytes:
        """Return JSON in UTF-8, one parameter per line."""
        params = [
            {
                "name": placed.meta.name,
                "dtype": dtype_name(placed.meta.dtype),
                "shape": list(placed.meta.shape),
                "file": placed.file,
                "checksum": placed.checksum,
            }
            for placed in self.params
        ]
        head = {
            "format": self.FORMAT,
            "format_number": FORMAT_NUMBER,
            "version": self.version,
            "base_version": None,
            "run_id": self.run_id,
            "checksum": "xxh3-128",
            "files": dict(self.files),
        }
        return closed(head, ["    " + json.dumps(param) for param in params])

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Manifest:
        """Return what a document says; where it says something else, one of `DAMAGE`."""
        params, files = tuple(_placed(row) for row in found["params"]), file_sizes(found)
        if found["base_version"] is not None:
            raise ValueError(f"it is a full version, and says that it is a delta on version {found['base_version']!r}")
        if not {placed.file for placed in params} <= set(files):
            raise ValueError("a parameter lies in a file that is not listed")
        if len({placed.meta.name for placed in params}) != len(params):
            raise ValueError("a parameter is listed twice")
        return cls(version=count(found["version"]), run_id=text(found["run_id"]), params=params, files=files)


def _placed(row: Mapping[str, Any]) -> Placed:
    meta = ParamMeta.from_json([row["name"], row["dtype"], row["shape"]])
    return Placed(meta=meta, file=plain_name(row["file"]), checksum=text(row["checksum"], 32))


# writing


def closed(head: Mapping[str, Any], rows: Iterable[str]) -> bytes:
    """Return the text of a manifest: its head, one line per parameter, and the checksum of all that."""
    lines = ",\n".join(rows)
    return _summed(f'{json.dumps(head, indent=2)[:-2]},\n  "params": [\n{lines}\n  ]'.encode())


def _summed(body: bytes) -> bytes:
    return b'%s%s%s"\n}\n' % (body, _CONTENT, xxhash.xxh3_128_hexdigest(body).encode())


# reading what may be anything


def parsed(data: bytes) -> dict[str, Any]:
    """Return what a manifest says. Its text is what it was; that its fields make sense is not known yet.

    Args:
        data: JSON as it is, or in one zstd frame, told apart by the frame's first four bytes.

    Raises:
        ValueError: neither, or one that would take far more memory than a manifest does, or another text than that of
            the checksum at its end, which the first format has not.
    """
    if data[:4] == _ZSTD:
        try:
            size = zstandard.frame_content_size(data)
            most = min(LARGEST, max(_SMALL, _RATIO * len(data)))
            if not 0 <= size <= most:
                raise ValueError(
                    f"its zstd frame declares {size} bytes, and a manifest of its size takes at most {most}"
                )
            data = zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ValueError(f"its zstd frame cannot be read: {error}") from None
    parts = data.count(b",") + data.count(b"[") + data.count(b"{")
    if len(data) > LARGEST or parts > min(len(data) // 4 + 1000, 16 * _PARAMETERS):
        raise ValueError(f"it has {parts:,} parts in {len(data):,} bytes, which no manifest has")
    found = json.loads(data, parse_constant=_refuse)
    if not isinstance(found, dict):
        raise ValueError(f"it is a {type(found).__name__}")
    if found.get("format_number") == FORMAT_NUMBER and data != _summed(data[: max(0, data.rfind(_CONTENT))]):
        raise ValueError("its content is not that of its checksum")
    if not isinstance(found["params"], list) or len(found["params"]) > _PARAMETERS:
        raise ValueError(f"its parameters are no list of at most {_PARAMETERS:,}")
    return found


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def file_sizes(found: Mapping[str, Any]) -> dict[str, int]:
    """Return the ``files`` of a manifest, whose names are plain ones; else raise a ValueError."""
    sizes = {}
    for name, size in found["files"].items():
        sizes[plain_name(name)] = count(size)
    return sizes


def plain_name(name: Any) -> str:
    """Return ``name``, if it is that of a file beside the manifest; else raise a ValueError."""
    if not isinstance(name, str) or "/" in checked_key(name):
        raise ValueError(f"{name!r} is not a file name")
    return name


def count(value: Any) -> int:
    """Return ``value``, if it is an integer of 0 or more that fits into 8 bytes; else raise a ValueError."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is not a count")
    return value


def text(value: Any, length: int | None = None) -> str:
    """Return ``value``, if it is text, of a length where one is given; else raise a ValueError."""
    if not isinstance(value, str) or length not in (None, len(value)):
        raise ValueError(f"{value!r} is no text" + (f" of {length} characters" if length else ""))
    return value
