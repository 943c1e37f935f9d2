"""`Manifest`: the last file of a version, and the only one that a reader believes before it has checked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import xxhash
import zstandard

from torchrl_ext.errors import IntegrityError, ManifestError, StoreError
from torchrl_ext.stores.base import checked_key
from torchrl_ext.types import ParamMeta, dtype_name

__all__ = [
    "FORMAT",
    "FORMAT_NUMBER",
    "LARGEST",
    "MANIFEST",
    "Document",
    "Manifest",
    "Placed",
    "checked_count",
    "checked_text",
    "closed",
    "plain_name",
]

MANIFEST = "manifest.json"
FORMAT, FORMAT_NUMBER = "torchrl_ext.weights", 2
_CHECKSUM = "xxh3-128"
_ZSTD = b"\x28\xb5\x2f\xfd"
LARGEST = 1 << 28
"""Bytes of a manifest, packed or not: a million parameters take less."""

_PARAMETERS = 1 << 20
_SMALL, _RATIO = 1 << 20, 256  # a frame grows to one MiB, or to so many times its size: digests hardly compress
_DAMAGE = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError,
    ManifestError, StoreError,
)  # fmt: skip
_CONTENT = b',\n  "content": "'


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
        return closed(head, ["    " + json.dumps(param) for param in params])

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Inverse of `to_bytes`.

        Args:
            data: the file's content.
            where: its path, for messages.

        Raises:
            IntegrityError: not a manifest of a format that this version of the library reads, or a hostile one.
        """
        return cls.of(Document.of(data, where))

    @classmethod
    def of(cls, document: Document) -> Manifest:
        """As `from_bytes`, of what was read already."""
        with document.reported() as found:
            document.check_format(FORMAT, "checksum", _CHECKSUM)
            params = tuple(_placed(row) for row in found["params"])
            files = {plain_name(name): checked_count(size) for name, size in found["files"].items()}
            base = found["base_version"]
            manifest = cls(
                version=checked_count(found["version"]),
                base_version=None if base is None else checked_count(base),
                run_id=checked_text(found["run_id"]),
                params=params,
                files=files,
            )
            if not {placed.file for placed in params} <= set(files):
                raise ValueError("a parameter lies in a file that is not listed")
            if len({placed.meta.name for placed in params}) != len(params):
                raise ValueError("a parameter is listed twice")
            document.check_content()
        return manifest


@dataclass(frozen=True, kw_only=True)
class Document:
    """A manifest of either kind, parsed, and not believed yet.

    Attributes:
        where: its path, for messages.
        text: the JSON.
        found: what it says; may be anything.
    """

    where: str
    text: bytes
    found: Any

    @classmethod
    def of(cls, data: bytes, where: str) -> Document:
        """Read JSON as it is, or in one zstd frame, told apart by the frame's first four bytes.

        Raises:
            IntegrityError: neither, or one that would take far more memory than a manifest does.
        """
        with _reported(where):
            text = _unpacked(data)
            parts = text.count(b",") + text.count(b"[") + text.count(b"{")
            if len(text) > LARGEST or parts > min(len(text) // 4 + 1000, 16 * _PARAMETERS):
                raise ValueError(f"it has {parts:,} parts in {len(text):,} bytes, which no manifest has")
            return cls(where=where, text=text, found=json.loads(text, parse_constant=_refuse))

    @property
    def format(self) -> Any:
        """The format that it claims to have."""
        return self.found.get("format") if isinstance(self.found, dict) else None

    @contextmanager
    def reported(self) -> Iterator[dict[str, Any]]:
        """What the document says; whatever is wrong with it becomes an `IntegrityError` that names it."""
        with _reported(self.where):
            if not isinstance(self.found, dict):
                raise ValueError(f"it is a {type(self.found).__name__}")
            yield self.found

    def check_format(self, name: str, key: str, value: str) -> None:
        """Whether it is of a format that is read here.

        Raises:
            IntegrityError: it is not.
        """
        number = self.found["format_number"]
        if (self.format, self.found.get(key)) != (name, value) or number not in (1, FORMAT_NUMBER):
            raise IntegrityError(
                f"{self.where} is format {self.found['format']!r} number {number!r}",
                expected=f"{name!r} number {FORMAT_NUMBER} or 1, with {value} as its {key}",
                hint="use the same torchrl_ext version on both sides",
            )
        if not isinstance(self.found["params"], list) or len(self.found["params"]) > _PARAMETERS:
            raise ValueError(f"its parameters are no list of at most {_PARAMETERS:,}")

    def check_content(self) -> None:
        """Hold the text against the checksum at its end; the first format had none.

        Raises:
            ValueError: it is another text.
        """
        body = self.text[: max(0, self.text.rfind(_CONTENT))]
        if self.found["format_number"] != 1 and self.text != _summed(body):
            raise ValueError("its content is not that of its checksum")


def closed(head: Mapping[str, Any], rows: Iterable[str]) -> bytes:
    """A manifest: its head, one line per parameter, and the checksum of all that."""
    lines = ",\n".join(rows)
    return _summed(f'{json.dumps(head, indent=2)[:-2]},\n  "params": [\n{lines}\n  ]'.encode())


def _summed(body: bytes) -> bytes:
    return b'%s%s%s"\n}\n' % (body, _CONTENT, xxhash.xxh3_128_hexdigest(body).encode())


@contextmanager
def _reported(where: str) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise IntegrityError(
            f"{where} is damaged: {error}",
            state="nothing was read from this version",
            hint="let the trainer publish again, and check the disk",
        ) from None


def _placed(row: Mapping[str, Any]) -> Placed:
    meta = ParamMeta.from_json([row["name"], row["dtype"], row["shape"]])
    checksum = row["checksum"]
    if not isinstance(checksum, str) or len(checksum) != 32:
        raise ValueError(f"checksum of {meta.name!r} is {checksum!r}")
    return Placed(meta=meta, file=plain_name(row["file"]), checksum=checksum)


def _unpacked(data: bytes) -> bytes:
    if data[:4] != _ZSTD:
        return data
    try:
        size = zstandard.frame_content_size(data)
        most = min(LARGEST, max(_SMALL, _RATIO * len(data)))
        if not 0 <= size <= most:
            raise ValueError(f"its zstd frame declares {size} bytes, and a manifest of its size takes at most {most}")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"its zstd frame cannot be read: {error}") from None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def plain_name(name: Any) -> str:
    """``name``, if it is that of a file beside the manifest; else a ValueError."""
    if not isinstance(name, str) or "/" in checked_key(name):
        raise ValueError(f"{name!r} is not a file name")
    return name


def checked_count(value: Any) -> int:
    """``value``, if it is an integer of 0 or more that fits into 8 bytes; else a ValueError."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is not a count")
    return value


def checked_text(value: Any) -> str:
    """``value``, if it is text; else a ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value
