"""The manifest of a delta: what it is taken against, what it changes, and where the blocks of its streams lie.

It is JSON in one zstd frame, and has no row per parameter but those of its table (`torchrl_ext.data.deltas.table`):
digests and blocks are binary columns, little-endian, in base64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, ClassVar, final

import msgspec
import numpy as np
import xxhash
import zstandard

from torchrl_ext.base.types import Count, Info, ParamMeta, Text, Wire, decode_dtype, described, dtype_name
from torchrl_ext.data.deltas.table import ParamTable

__all__ = ["BLOCK", "BLOCKS", "DIGEST", "END", "DeltaManifest"]

DIGEST = np.dtype("<u8")
"""Of the columns of digests, shape (parameters, 2)."""
BLOCK = np.dtype(
    [
        ("stream", "<u4"),
        ("file", "<u4"),
        ("codec", "<u4"),
        ("start", "<u8"),
        ("size", "<u8"),
        ("changed", "<u8"),
        ("offset", "<u8"),
        ("nbytes", "<u8"),
        ("checksum", "<u8"),
    ]
)
"""Of the column of blocks, which are in order of stream and start: ``start`` and ``size`` in units of the stream, how
many units changed, which bytes of which file code them with which codec, and their xxh3-64."""

BLOCKS = "blocks"
"""The container of ours, of which the manifest says where each block lies."""

_LEVEL = 1  # of zstd: 19 took 13 to 25 times as long for every version, for 6 to 8 % fewer bytes
END = b',"content":"%s"}'
"""How the text of a manifest ends: with the xxh3-128 of all before."""


class _Head(Wire, frozen=True, kw_only=True):
    """The manifest as JSON; `bytes` are base64 there."""

    format: str
    format_number: int
    version: Count
    base_version: Count
    run_id: Text
    base_run_id: Text
    container: Text
    codecs: tuple[dict[str, Any], ...]
    files: dict[str, Count]
    params: msgspec.Raw
    streams: msgspec.Raw
    changed: bytes
    digests: bytes
    base_digests: bytes = b""
    blocks: bytes = b""
    placed: dict[str, Text] = msgspec.field(default_factory=dict)


_ALIKE = "version", "base_version", "run_id", "base_run_id", "container", "codecs", "files"
"""The fields of JSON that a `DeltaManifest` has as they are."""


def _alike(found: _Head | DeltaManifest) -> dict[str, Any]:
    return {name: getattr(found, name) for name in _ALIKE}


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class DeltaManifest:
    """The manifest of a delta.

    Attributes:
        version: the version that it leads to.
        base_version: the version that it starts from.
        run_id: the trainer process that published it.
        base_run_id: the one that published the base; made of the digests of a checkpoint, where that is version 0.
        container: how payloads are laid out in files (`torchrl_ext.data.versions.payloads`).
        codecs: JSON of every codec used.
        files: size in bytes of every file beside the manifest.
        table: the parameters, changed or not, and the streams.
        changed: uint64, shape (parameters,): units that changed.
        digests: uint64, shape (parameters, 2): of every tensor *after* this delta.
        base_digests: the same *before* it, where the base is version 0, a checkpoint; else no rows.
        blocks: of dtype `BLOCK`: what changed; none in another container.
        placed: the file in which such a container holds what changed, by parameter.
    """

    FORMAT: ClassVar[str] = "torchrl_ext.delta"
    NUMBER: ClassVar[int] = 1

    version: int
    base_version: int
    run_id: str
    base_run_id: str
    container: str
    codecs: tuple[Info, ...]
    files: Mapping[str, int]
    table: ParamTable
    changed: np.ndarray
    digests: np.ndarray
    base_digests: np.ndarray = field(default_factory=lambda: np.empty((0, 2), DIGEST))
    blocks: np.ndarray = field(default_factory=lambda: np.empty(0, BLOCK))
    placed: Mapping[str, str] = field(default_factory=dict)

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

    def to_bytes(self) -> bytes:
        """Return JSON in UTF-8, which ends with the xxh3-128 of all before its last member, in a zstd frame."""
        head = _Head(
            format=self.FORMAT,
            format_number=self.NUMBER,
            **_alike(self),
            params=msgspec.Raw(msgspec.json.encode(self.table.params, enc_hook=dtype_name)),
            streams=msgspec.Raw(msgspec.json.encode([stream.params.tolist() for stream in self.table.streams])),
            changed=self.changed.astype(DIGEST, copy=False).tobytes(),
            digests=self.digests.astype(DIGEST, copy=False).tobytes(),
            base_digests=self.base_digests.astype(DIGEST, copy=False).tobytes(),
            blocks=self.blocks.tobytes(),
            placed=dict(self.placed),
        )
        body = msgspec.json.encode(head, enc_hook=dtype_name)[:-1]
        text = body + END % xxhash.xxh3_128_hexdigest(body).encode()
        return zstandard.ZstdCompressor(level=_LEVEL).compress(text)

    @classmethod
    def of(cls, text: bytes) -> DeltaManifest:
        """Return the manifest in a document whose checksum was compared.

        Raises:
            ValueError, ManifestError: it is malformed, or contradicts itself.
        """
        head = msgspec.json.decode(text, type=described(_Head), dec_hook=decode_dtype)
        table = _table(bytes(head.params), bytes(head.streams))
        found = cls(
            **_alike(head),
            table=table,
            changed=np.frombuffer(head.changed, DIGEST),
            digests=_digests(head.digests, len(table.params)),
            base_digests=_digests(head.base_digests, len(table.params)),
            blocks=np.frombuffer(head.blocks, BLOCK),
            placed=head.placed,
        )
        found.check()
        return found

    def check(self) -> None:
        """Check that blocks lie apart in their streams, and within their files.

        Raises:
            ValueError: names the first block that does not.
        """
        rows, sizes = self.blocks, np.array([stream.size for stream in self.table.streams], np.uint64)
        lengths = np.array([*self.files.values()], np.uint64)
        if not self.base_version < self.version:
            raise ValueError(f"its base is version {self.base_version}")
        if any(not isinstance(codec.get("name"), str) for codec in self.codecs):
            raise ValueError("a codec has no name")
        if self.changed.size != len(self.params):
            raise ValueError(f"{self.changed.size} counts of {len(self.params)} parameters")
        if len(self.digests) != len(self.params):
            raise ValueError(f"it has {len(self.digests)} digests of {len(self.params)} parameters")
        for name, one in self.placed.items():
            if name not in self.table.number or one not in self.files:
                raise ValueError(f"{name!r} lies in {one!r}, and one of them is not listed")
        if not rows.size:
            return
        bounds = ("stream", sizes.size), ("file", lengths.size), ("codec", len(self.codecs))
        for name, bound in bounds:
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


@lru_cache(maxsize=2)  # mostly that of the delta before
def _table(params: bytes, streams: bytes) -> ParamTable:
    metas = msgspec.json.decode(params, type=described(tuple[ParamMeta, ...]), dec_hook=decode_dtype)
    if len({meta.name for meta in metas}) < len(metas):
        raise ValueError("a parameter is listed twice")
    return ParamTable.of(metas, msgspec.json.decode(streams, type=described(list[list[int]])))


def _digests(data: bytes, count: int) -> np.ndarray:
    if len(data) not in (0, 16 * count):
        raise ValueError(f"{len(data)} bytes of digests of {count} parameters")
    return np.frombuffer(data, DIGEST).reshape(-1, 2)
