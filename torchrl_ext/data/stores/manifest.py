"""The manifest of a version, which is its last file: what it holds, what it changes, and where both lie.

It is JSON in one zstd frame. A model has many parameters, so digests and blocks are binary columns, little-endian, in
base64.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, final

import msgspec
import numpy as np
import xxhash
import zstandard

from torchrl_ext.base.errors import IntegrityError, ManifestError, StoreError
from torchrl_ext.base.types import (
    VERSIONS,
    Count,
    ParamMeta,
    Text,
    Wire,
    decode_dtype,
    dtype_name,
)  # fmt: skip
from torchrl_ext.data.deltas.table import PARAMETERS, ParamTable
from torchrl_ext.data.stores.store import checked_key

__all__ = [
    "BLOCK", "DIGEST", "END", "LARGEST", "MANIFEST", "DeltaManifest", "FilePlace", "Manifest", "RunVersion",
    "version_name", "version_number",
]  # fmt: skip

MANIFEST = "manifest.json"
LARGEST = 1 << 28
"""Bytes of a manifest, packed or not: a million parameters take less."""
END = b',"content":"%s"}'
"""How the text of a manifest ends: with the xxh3-128 of all before."""

RunVersion = tuple[str, int]
"""The run id and the number of a version; the number alone could be that of an earlier run."""
FilePlace = tuple[str, Annotated[str, msgspec.Meta(min_length=32, max_length=32)]]
"""The file that holds a tensor, and the xxh3-128 of the tensor's bytes (32 hex digits)."""

DIGEST = np.dtype("<u8")
"""Of the columns of digests, shape (parameters, 2)."""
BLOCK = np.dtype(
    [(name, "<u4") for name in ("stream", "file", "codec")]
    + [(name, "<u8") for name in ("start", "size", "changed", "offset", "nbytes", "checksum")]
)
"""Of the column of blocks, which are in order of stream and start: ``start`` and ``size`` in units of the stream, how
many units changed, which bytes of which file code them with which codec, and their xxh3-64."""

_FORMAT, _NUMBER = "torchrl_ext.version", 2
_NAME = re.compile(r"weight_v(\d{6}|[1-9]\d{6,17})", re.ASCII)
_LEVEL = 1  # of zstd: 19 took 13 to 25 times as long for every version, for 6 to 8 % fewer bytes
_SMALL, _RATIO = 1 << 20, 256  # a frame may unpack to one MiB, or so many times its size: digests hardly compress
_DAMAGE = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError, zstandard.ZstdError,
    msgspec.MsgspecError, ManifestError, StoreError,
)  # fmt: skip
"""The errors that reading a document raises where it is no manifest."""


def version_name(version: int) -> str:
    """Return the directory of a version: 7 -> ``"weight_v000007"``.

    Raises:
        StoreError: the number is negative or has more digits than a name takes.
    """
    if not 0 <= version < VERSIONS:
        raise StoreError(
            f"{version} cannot be the number of a version",
            expected=f"a number below {VERSIONS}",
            state="nothing was written",
            hint="an engine's label, the pointer 'latest' or a caller gave the number before; correct that one",
        )
    return f"weight_v{version:06d}"


def version_number(name: str) -> int | None:
    """Return the version of a directory: ``"weight_v000007"`` -> 7; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


class _Format(Wire, frozen=True, kw_only=True):
    format: str
    format_number: int


class _Delta(Wire, frozen=True, kw_only=True):
    """The part of a document that a delta has; `bytes` are base64 there."""

    base_version: Count
    base_run_id: Text
    codecs: tuple[str, ...]
    files: tuple[str, ...]
    streams: msgspec.Raw
    changed: bytes
    digests: bytes
    base_digests: bytes
    blocks: bytes


class _Document(_Format, frozen=True, kw_only=True):
    version: Count
    run_id: Text
    params: msgspec.Raw
    files: dict[str, Count]
    full: tuple[FilePlace, ...] | None = None
    delta: _Delta | None = None


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class DeltaManifest:
    """What a version changes.

    Attributes:
        version: the version that it leads to.
        base_version: the version that it starts from.
        run_id: the trainer process that published it.
        base_run_id: the one that published the base; "base" for a checkpoint, which is version 0.
        codecs: the kinds of its blocks.
        files: size in bytes of every file of the delta.
        table: the parameters, changed or not, and the streams.
        changed: uint64, shape (parameters,): units that changed.
        digests: uint64, shape (parameters, 2): of every tensor *after* this delta.
        base_digests: the same *before* it, where the base is version 0, a checkpoint; else no rows.
        blocks: of dtype `BLOCK`: what changed.
    """

    version: int
    base_version: int
    run_id: str
    base_run_id: str
    codecs: tuple[str, ...]
    files: Mapping[str, int]
    table: ParamTable
    changed: np.ndarray
    digests: np.ndarray
    base_digests: np.ndarray
    blocks: np.ndarray

    @property
    def params(self) -> tuple[ParamMeta, ...]:
        """Every parameter, in the order of the source."""
        return self.table.params

    @cached_property
    def hex_digests(self) -> dict[str, str]:
        """The digest of each tensor after this delta, as 32 hex digits, by name."""
        return self._by_name(self.digests)

    @cached_property
    def hex_base_digests(self) -> dict[str, str]:
        """The same before this delta, where the base is version 0."""
        return self._by_name(self.base_digests)

    def _by_name(self, digests: np.ndarray) -> dict[str, str]:
        text = digests.astype(">u8").tobytes().hex()
        rows = (text[at : at + 32] for at in range(0, len(text), 32))
        return dict(zip((meta.name for meta in self.params), rows, strict=False))

    def check(self) -> None:
        """Check that counts fit, and that blocks lie apart in their streams and within their files.

        Raises:
            ValueError: names the first thing that is not so.
        """
        rows, sizes = self.blocks, np.array([stream.size for stream in self.table.streams], np.uint64)
        lengths = np.array([*self.files.values()], np.uint64)
        if not self.base_version < self.version:
            raise ValueError(f"its base is version {self.base_version}")
        if self.changed.size != len(self.params):
            raise ValueError(f"{self.changed.size} counts of {len(self.params)} parameters")
        if len(self.digests) != len(self.params):
            raise ValueError(f"it has {len(self.digests)} digests of {len(self.params)} parameters")
        if not rows.size:
            return
        for name, bound in (("stream", sizes.size), ("file", lengths.size), ("codec", len(self.codecs))):
            if int(rows[name].max()) >= bound:
                raise ValueError(f"a block is of {name} {int(rows[name].max())}, and there are {bound}")
        whole, room = sizes[rows["stream"]], lengths[rows["file"]]
        sound = (rows["start"] < whole) & (rows["size"] <= whole - rows["start"])  # no sum that could overflow
        sound &= (rows["offset"] <= room) & (rows["nbytes"] <= room - np.minimum(rows["offset"], room))
        sound &= (rows["size"] > 0) & (rows["changed"] > 0) & (rows["changed"] <= rows["size"])
        sound[1:] &= (rows["stream"][1:] > rows["stream"][:-1]) | (
            (rows["stream"][1:] == rows["stream"][:-1])
            & (rows["start"][1:] >= rows["start"][:-1])
            & (rows["start"][1:] - rows["start"][:-1] >= rows["size"][:-1])
        )
        if not sound.all():
            raise ValueError(f"block {int(np.argmin(sound))} lies outside of its stream or its file, or meets another")


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """One version: a full one, a delta, or both, a keyframe that readers of the version before reach by its delta.

    Attributes:
        version: its number, 1 and up.
        run_id: the trainer process that published it.
        params: every parameter, in the order of the source.
        files: size in bytes of every file beside the manifest, by name.
        full: where each parameter of the full version lies, in order; None for a delta alone.
        delta: what it changes; None for a full version alone.
    """

    version: int
    run_id: str
    params: tuple[ParamMeta, ...]
    files: Mapping[str, int]
    full: tuple[FilePlace, ...] | None = None
    delta: DeltaManifest | None = None

    @property
    def full_bytes(self) -> int:
        """Bytes of the files of the full version."""
        return sum(self.files.values()) - (sum(self.delta.files.values()) if self.delta else 0)

    def to_bytes(self) -> bytes:
        """Return JSON in UTF-8, which ends with the xxh3-128 of all before its last member, in a zstd frame."""
        encode, delta = msgspec.json.Encoder(enc_hook=dtype_name).encode, self.delta
        part = delta and _Delta(
            base_version=delta.base_version,
            base_run_id=delta.base_run_id,
            codecs=delta.codecs,
            files=tuple(delta.files),
            streams=msgspec.Raw(encode([stream.params.tolist() for stream in delta.table.streams])),
            changed=delta.changed.astype(DIGEST, copy=False).tobytes(),
            digests=delta.digests.astype(DIGEST, copy=False).tobytes(),
            base_digests=delta.base_digests.astype(DIGEST, copy=False).tobytes(),
            blocks=delta.blocks.tobytes(),
        )
        document = _Document(
            format=_FORMAT,
            format_number=_NUMBER,
            version=self.version,
            run_id=self.run_id,
            params=msgspec.Raw(encode(self.params)),
            files=dict(self.files),
            full=self.full,
            delta=part,
        )
        body = encode(document)[:-1]
        text = body + END % xxhash.xxh3_128_hexdigest(body).encode()
        return zstandard.ZstdCompressor(level=_LEVEL).compress(text)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Return the manifest that a file holds.

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
            head = msgspec.json.decode(text, type=_Format)
            if (head.format, head.format_number) != (_FORMAT, _NUMBER):
                raise IntegrityError(
                    f"{where} is format {head.format!r} number {head.format_number}",
                    expected=f"{_FORMAT!r} number {_NUMBER}",
                    hint="use the same torchrl_ext version on both sides",
                )
            body = text[: -len(END) - 30]  # 32 digits in the place of two
            if text[len(body) :] != END % xxhash.xxh3_128_hexdigest(body).encode():
                raise ValueError("its content does not match its checksum")
            return cls._of(msgspec.json.decode(text, type=_Document))
        except _DAMAGE as error:
            raise IntegrityError(
                f"{where} is damaged: {error}",
                state="nothing was read from this version",
                hint="let the trainer publish again, and check the disk",
            ) from None

    @classmethod
    def _of(cls, found: _Document) -> Manifest:
        """Return the manifest in a document; raise one of `_DAMAGE` where it contradicts itself."""
        for file in found.files:
            if "/" in checked_key(file):
                raise ValueError(f"{file!r} is not a file name")
        params, part, delta = _params(bytes(found.params)), found.delta, None
        if part is not None:
            table = _table(bytes(found.params), bytes(part.streams))
            delta = DeltaManifest(
                version=found.version,
                base_version=part.base_version,
                run_id=found.run_id,
                base_run_id=part.base_run_id,
                codecs=part.codecs,
                files={name: found.files[name] for name in part.files},
                table=table,
                changed=np.frombuffer(part.changed, DIGEST),
                digests=_digests(part.digests, len(params)),
                base_digests=_digests(part.base_digests, len(params)),
                blocks=np.frombuffer(part.blocks, BLOCK),
            )
            delta.check()
        elif found.full is None:
            raise ValueError("it is neither a full version nor a delta")
        if found.full is not None and len(found.full) != len(params):
            raise ValueError(f"it places {len(found.full)} of {len(params)} parameters")
        if not found.files.keys() >= {file for file, _ in found.full or ()}:
            raise ValueError("a parameter lies in a file that is not listed")
        return cls(
            version=found.version, run_id=found.run_id, params=params, files=found.files, full=found.full, delta=delta
        )


def _unpacked(data: bytes) -> bytes:
    """Return the text of a manifest; the frame's own size bounds the memory that is taken."""
    if data[:4] != zstandard.FRAME_HEADER:
        return data
    size, most = zstandard.frame_content_size(data), min(LARGEST, max(_SMALL, _RATIO * len(data)))
    if not 0 <= size <= most:
        raise ValueError(f"its zstd frame declares {size} bytes, and a manifest of its size takes at most {most}")
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)


@lru_cache(maxsize=2)  # mostly those of the version before
def _params(params: bytes) -> tuple[ParamMeta, ...]:
    metas = msgspec.json.decode(params, type=tuple[ParamMeta, ...], dec_hook=decode_dtype)
    if len({meta.name for meta in metas}) < len(metas):
        raise ValueError("a parameter is listed twice")
    return metas


@lru_cache(maxsize=2)
def _table(params: bytes, streams: bytes) -> ParamTable:
    return ParamTable.of(_params(params), msgspec.json.decode(streams, type=list[list[int]]))


def _digests(data: bytes, count: int) -> np.ndarray:
    if len(data) not in (0, 16 * count):
        raise ValueError(f"{len(data)} bytes of digests of {count} parameters")
    return np.frombuffer(data, DIGEST).reshape(-1, 2)
