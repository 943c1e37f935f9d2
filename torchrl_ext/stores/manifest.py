"""`Manifest`: the last file of a version, and the only one that a reader believes before it has checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import zstandard

from torchrl_ext.errors import IntegrityError, ManifestError, StoreError
from torchrl_ext.stores.base import checked_key
from torchrl_ext.types import ParamMeta, dtype_name

__all__ = ["FORMAT", "FORMAT_NUMBER", "MANIFEST", "Manifest", "Placed", "checked_count", "plain_name", "read_json"]

MANIFEST = "manifest.json"
FORMAT, FORMAT_NUMBER = "torchrl_ext.weights", 1
_CHECKSUM = "xxh3-128"
_ZSTD = b"\x28\xb5\x2f\xfd"
_LARGEST = 1 << 28  # bytes of text: a million parameters take less


@dataclass(frozen=True, kw_only=True)
class Placed:
    """One parameter of a version: what it is, the file that holds it, and the xxh3-128 of its bytes (32 hex digits)."""

    meta: ParamMeta
    file: str
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a version directory holds.

    Attributes:
        version: its number, 1 and up.
        base_version: the version that a reader must hold to apply this one; None for a full version.
        run_id: names the trainer process that published it.
        params: every parameter, in the order of the source.
        files: size in bytes of every file beside the manifest, by name.
    """

    version: int
    base_version: int | None = None
    run_id: str
    params: tuple[Placed, ...]
    files: Mapping[str, int]

    def to_bytes(self) -> bytes:
        """JSON, UTF-8, one parameter per line."""
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
            "format": FORMAT,
            "format_number": FORMAT_NUMBER,
            "version": self.version,
            "base_version": self.base_version,
            "run_id": self.run_id,
            "checksum": _CHECKSUM,
            "files": dict(self.files),
        }
        lines = ",\n".join("    " + json.dumps(param) for param in params)
        return f'{json.dumps(head, indent=2)[:-2]},\n  "params": [\n{lines}\n  ]\n}}\n'.encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Inverse of `to_bytes`.

        Args:
            data: the file's content.
            where: its path, for messages.

        Raises:
            IntegrityError: not a manifest of a format that this version of the library reads, or a hostile one.
        """
        try:
            found = read_json(data)
            if (found["format"], found["format_number"], found.get("checksum")) != (FORMAT, FORMAT_NUMBER, _CHECKSUM):
                raise IntegrityError(
                    f"{where} is format {found['format']!r} number {found['format_number']!r}",
                    expected=f"{FORMAT!r} number {FORMAT_NUMBER} with {_CHECKSUM} checksums",
                    hint="use the same torchrl_ext version on both sides",
                )
            params = tuple(_placed(row) for row in found["params"])
            files = {plain_name(name): checked_count(size) for name, size in found["files"].items()}
            base = found["base_version"]
            manifest = cls(
                version=checked_count(found["version"]),
                base_version=None if base is None else checked_count(base),
                run_id=str(found["run_id"]),
                params=params,
                files=files,
            )
            if not {placed.file for placed in params} <= set(files):
                raise ValueError("a parameter lies in a file that is not listed")
            if len({placed.meta.name for placed in params}) != len(params):
                raise ValueError("a parameter is listed twice")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ManifestError, StoreError) as error:
            raise IntegrityError(f"{where} is damaged: {error}", state="nothing was read from this version") from None
        return manifest


def _placed(row: Mapping[str, Any]) -> Placed:
    meta = ParamMeta.from_json([row["name"], row["dtype"], row["shape"]])
    checksum = row["checksum"]
    if not isinstance(checksum, str) or len(checksum) != 32:
        raise ValueError(f"checksum of {meta.name!r} is {checksum!r}")
    return Placed(meta=meta, file=plain_name(row["file"]), checksum=checksum)


def read_json(data: bytes) -> Any:
    """What a manifest says: JSON as it is, or in one zstd frame, told apart by the frame's first four bytes.

    Raises:
        ValueError: neither, or a frame that does not say its size, or one too large.
    """
    if data[:4] != _ZSTD:
        return json.loads(data)
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= _LARGEST:
            raise ValueError(f"its zstd frame declares {size} bytes, and a manifest takes at most {_LARGEST}")
        return json.loads(zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise ValueError(f"its zstd frame cannot be read: {error}") from None


def plain_name(name: Any) -> str:
    """``name``, if it is that of a file beside the manifest; else a ValueError."""
    if not isinstance(name, str) or "/" in checked_key(name):
        raise ValueError(f"{name!r} is not a file name")
    return name


def checked_count(value: Any) -> int:
    """``value``, if it is an integer of 0 or more; else a ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
