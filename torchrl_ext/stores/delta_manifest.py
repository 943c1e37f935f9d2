"""The manifest of a delta: what it is taken against, what it changes, and where the blocks of its streams lie.

Format 4 is JSON in one zstd frame, and has no row per parameter but those of its table (`torchrl_ext.stores.table`):
digests and blocks are binary columns, little-endian, in base64. Formats 1 to 3 have a row for each parameter, or for
each block of one that a trainer rank wrote; they are read as tables whose streams have one segment and one block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Annotated, Any, ClassVar, final

import msgspec
import numpy as np
import xxhash
import zstandard

from torchrl_ext.errors import ManifestError
from torchrl_ext.stores.table import TILES, ParamTable, Segment, units_of
from torchrl_ext.types import Count, Info, ParamMeta, Text, Wire, decode_dtype, decoded, described, dtype_name

__all__ = ["BLOCK", "BLOCKS", "DIGEST", "END", "ROWS", "DeltaManifest", "Placing", "from_json", "from_rows"]

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
many units changed, which bytes of which file code them with which codec, and their xxh3-64; 0 where a payload of an
older format ends with its own."""

BLOCKS, ROWS = "blocks", "rows"
"""Containers of ours, of which manifests say where each payload lies: of format 4, and of formats 1 to 3."""

_LEVEL = 1  # of zstd: 19 took 13 to 25 times as long for every version, for 6 to 8 % fewer bytes
END = b',"content":"%s"}'
"""How the text of format 4 ends: with the xxh3-128 of all before."""


class Placing(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where another library's container holds the change of a parameter: its file, and the checksum of the payload."""

    file: Text
    checksum: Text = ""


class _Document(Wire, frozen=True, kw_only=True):
    """The fields of JSON of every format that a `DeltaManifest` has as they are."""

    version: Count
    base_version: Count
    run_id: Text
    base_run_id: Text
    digest: Text
    container: Text
    codecs: tuple[dict[str, Any], ...]
    files: dict[str, Count]


def _plain(found: _Document | DeltaManifest) -> dict[str, Any]:
    return {name: getattr(found, name) for name in _Document.__struct_fields__}


class _Head(_Document, frozen=True, kw_only=True):
    """Format 4 as JSON; `bytes` are base64 there."""

    format: str
    format_number: int
    params: msgspec.Raw
    tiles: Annotated[int, msgspec.Meta(ge=1, le=TILES)] = 1
    streams: list[list[Segment]] | None = None
    changed: bytes
    digests: bytes
    base_digests: bytes = b""
    blocks: bytes = b""
    placed: dict[str, Placing] = msgspec.field(default_factory=dict)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class DeltaManifest:
    """The manifest of a delta.

    Attributes:
        version: the version that it leads to.
        base_version: the version that it starts from.
        run_id: the trainer process that published it.
        base_run_id: the one that published the base; "" where another library wrote the delta, which does not say.
        digest: name of the digest (`torchrl_ext.weights.digests`).
        container: how payloads are laid out in files (`torchrl_ext.versions.containers`).
        codecs: JSON of every codec used.
        files: size in bytes of every file beside the manifest.
        table: the parameters, changed or not, and the streams.
        changed: uint64, shape (parameters,): units that changed.
        digests: uint64, shape (parameters, 2): of every tensor *after* this delta; no rows where another library wrote
            it, which has none.
        base_digests: the same *before* it, where the base is version 0, a checkpoint; else no rows.
        blocks: of dtype `BLOCK`: what changed; none where a container of another library holds it.
        placed: where that container holds what changed, by parameter.
    """

    FORMAT: ClassVar[str] = "torchrl_ext.delta"
    NUMBER: ClassVar[int] = 4

    version: int
    base_version: int
    run_id: str
    base_run_id: str
    digest: str
    container: str
    codecs: tuple[Info, ...]
    files: Mapping[str, int]
    table: ParamTable
    changed: np.ndarray
    digests: np.ndarray = field(default_factory=lambda: np.empty((0, 2), DIGEST))
    base_digests: np.ndarray = field(default_factory=lambda: np.empty((0, 2), DIGEST))
    blocks: np.ndarray = field(default_factory=lambda: np.empty(0, BLOCK))
    placed: Mapping[str, Placing] = field(default_factory=dict)

    @property
    def params(self) -> tuple[ParamMeta, ...]:
        """Every parameter, in the order of the source."""
        return self.table.params

    def blocks_of(self, name: str) -> np.ndarray:
        """Return the rows of `blocks` whose ranges meet a parameter."""
        rows = self.blocks
        own = np.zeros(rows.size, bool)
        for stream, segment in self.table.places[self.table.number[name]]:
            first, end = self.table.streams[stream].first[segment : segment + 2]
            own |= (rows["stream"] == stream) & (rows["start"] < end) & (rows["start"] + rows["size"] > first)
        return rows[own]

    @cached_property
    def hex_digests(self) -> dict[str, str]:
        """The digest of each tensor after this delta, as 32 hex digits, by name; empty where there are none."""
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
        streams = self.table.streams
        head = _Head(
            format=self.FORMAT,
            format_number=self.NUMBER,
            **_plain(self),
            params=msgspec.Raw(msgspec.json.encode(self.table.params, enc_hook=dtype_name)),
            tiles=self.table.tiles or 1,
            streams=None if self.table.tiles else [list(stream.segments) for stream in streams],
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
    def _of(cls, head: _Head) -> DeltaManifest:
        if head.container == ROWS:
            raise ValueError("it has rows, which only formats before 4 have")
        table = ParamTable.of(_params(bytes(head.params)), head.streams, tiles=head.tiles)
        if len(table.number) != len(table.params):
            raise ValueError("a parameter is listed twice")
        lost = None if table.tiles else table.lost()
        if lost is not None:
            raise ValueError(f"no stream, or more than one, covers each unit of {lost}")
        found = cls(
            **_plain(head),
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
        if self.container in (BLOCKS, ROWS) and len(self.digests) != len(self.params):
            raise ValueError(f"it has {len(self.digests)} digests of {len(self.params)} parameters")
        for name, one in self.placed.items():
            if name not in self.table.number or (one.file and one.file not in self.files):
                raise ValueError(f"{name!r} lies in {one.file!r}, and one of them is not listed")
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


@lru_cache(maxsize=2)  # mostly those of the delta before
def _params(rows: bytes) -> tuple[ParamMeta, ...]:
    return msgspec.json.decode(rows, type=described(tuple[ParamMeta, ...]), dec_hook=decode_dtype)


def _digests(data: bytes, count: int) -> np.ndarray:
    if len(data) not in (0, 16 * count):
        raise ValueError(f"{len(data)} bytes of digests of {count} parameters")
    return np.frombuffer(data, DIGEST).reshape(-1, 2)


def from_json(text: bytes) -> DeltaManifest:
    """Return the manifest in a document of format 4, whose checksum was compared.

    Raises:
        ValueError, ManifestError: it is malformed, or contradicts itself.
    """
    return DeltaManifest._of(msgspec.json.decode(text, type=described(_Head), dec_hook=decode_dtype))


class _Before4(_Document, frozen=True, kw_only=True):
    """Formats 1 to 3 as JSON."""

    params: list[list[Any]]
    base_digests: dict[str, str] = msgspec.field(default_factory=dict)


_BOXES = 1 << 12  # of one parameter, about one for each trainer rank; more would take long to compare
_OURS = ("packed", "shards")  # as formats 1 to 3 call them


class _Payload(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The end of a row of formats 1 to 3."""

    changed: Count
    codec: Count
    file: Text
    offset: Count | None
    nbytes: Count
    checksum: Text = ""


def from_rows(found: Any) -> DeltaManifest:
    """Return the manifest in a document of format 1, 2 or 3.

    A row is ``[name, dtype, shape, digest]``; or that and ``changed, codec, file, offset, nbytes[, checksum]``; or that
    and a list of ``[start, sizes, changed, ...]``, one for each block that a trainer rank wrote. An offset is None
    where the payload follows the one before in its file.

    Raises:
        ValueError, ManifestError: it is malformed, or contradicts itself.
    """
    head = decoded(found, _Before4, "the document", ManifestError)
    metas = [ParamMeta.from_json(row[:3]) for row in head.params]
    files = {name: number for number, name in enumerate(head.files)}
    ends, placed = dict.fromkeys(files, 0), dict[str, Placing]()
    segments, blocks, changed = list[list[Segment]](), list[tuple[int, ...]](), np.zeros(len(metas), DIGEST)
    for number, (meta, row) in enumerate(zip(metas, head.params, strict=True)):
        rows = row[4] if len(row) == 5 else [[None, None, *row[4:]]] if len(row) > 5 else []
        for start, sizes, *rest in rows:
            where = f"the row of {meta.name!r}"
            one = decoded(rest, _Payload, where, ManifestError)
            changed[number] += one.changed
            if head.container not in _OURS:
                placed[meta.name] = Placing(one.file, one.checksum)
                continue
            if one.file not in files:
                raise ValueError(f"a payload of {meta.name!r} lies in {one.file!r}, which is not listed")
            offset = ends[one.file] if one.offset is None else one.offset
            ends[one.file] = offset + one.nbytes
            segment = decoded([number, start, sizes], Segment, where, ManifestError)
            stream = (len(segments), files[one.file], one.codec, 0, units_of(meta, segment))
            blocks.append((*stream, one.changed, offset, one.nbytes, int(one.checksum or "0", 16)))
            segments.append([segment])
    table = ParamTable.of(metas, segments)
    for meta, places in zip(metas, table.places, strict=True):
        if len(places) > _BOXES:
            raise ValueError(f"{meta.name!r} has {len(places)} blocks, and trainers wrote at most {_BOXES}")
        if len(places) > 1:
            boxes = np.array([table.streams[stream].box(segment) for stream, segment in places], np.int64)
            starts, stops = boxes[:, 0], boxes[:, 1]
            meet = ((starts[:, None] < stops) & (starts < stops[:, None])).all(axis=2)
            if np.count_nonzero(meet) > len(places):  # each box meets itself
                raise ValueError(f"two blocks of {meta.name!r} share elements")
    made = DeltaManifest(
        **_plain(head) | ({"container": ROWS} if head.container in _OURS else {}),
        table=table,
        changed=changed,
        digests=_from_hex([row[3] for row in head.params]),
        base_digests=_from_hex([head.base_digests[meta.name] for meta in metas] if head.base_digests else []),
        blocks=np.array(blocks, BLOCK),
        placed=placed,
    )
    made.check()
    return made


def _from_hex(digests: Sequence[str]) -> np.ndarray:
    """Return digests of 32 hex digits as two words each; none where all are empty, as in another library's deltas."""
    if not any(digests):
        return np.empty((0, 2), DIGEST)
    if any(len(digest) != 32 for digest in digests):
        raise ValueError("a digest is not 32 hex digits")
    return np.frombuffer(bytes.fromhex("".join(digests)), ">u8").reshape(-1, 2).astype(DIGEST)
