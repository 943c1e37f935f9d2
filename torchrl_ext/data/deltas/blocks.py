"""Blocks: the changed elements of one range of a stream as bytes, in one of several kinds.

    ulp          joint tokens of gaps and steps (`tokens`): near the entropy, a few ns for each change
    context      tokens sorted by the exponent of the base (`tokens`): a third less, for readers of it
    bitmap       uint64 words, a bit for each unit, then the new bits of those that changed: at the speed of memory
    indices      positions in 4 bytes each, then the new bits
    deltas       gaps between positions in 2 or 4 bytes each, as their first byte says, then the new bits
    deltas_zstd  deltas in a zstd frame of level 1

All are bit-exact for every dtype that `torchrl_ext.data.deltas.table.unit_of` accepts. Numbers are little-endian.
Nobody checks a block for bits that flipped: its checksum is the manifest's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final, final

import numpy as np
import zstandard

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.data.deltas import tokens
from torchrl_ext.data.deltas.streams import Found, StreamPatch
from torchrl_ext.data.deltas.table import ParamTable, Unit, index_dtype, unit_of
from torchrl_ext.data.deltas.tokens import Buffer, damaged

__all__ = ["KINDS", "BlockEncoding", "decode_block", "encode_block"]

KINDS: Final = ("ulp", "context", "bitmap", "indices", "deltas", "deltas_zstd")


def encode_block(kind: str, unit: Unit, found: Found) -> bytes:
    """Return the change of a block, in which something changed, as bytes; called from any thread.

    Args:
        kind: one of `KINDS`.
        unit: of the stream.
        found: what changed.
    """
    from torchrl_ext.data.deltas.codec_loops import compare, set_mask, steps_between

    if kind == "bitmap":
        mask = np.zeros(-(-found.size // 64), np.uint64)
        if 16 * found.positions.size > found.size and sum(new.size for _, new in found.news) == found.size:
            for at, new in found.news:
                compare(found.old[at : at + new.size], new, at, mask)
        else:
            set_mask(found.positions, mask)
        return b"".join((mask.data, found.after.data))
    if kind not in ("ulp", "context"):
        return _write_lists(kind, found)
    steps = np.empty_like(found.before)
    steps_between(found.before, found.after, unit.top, unit.mask, unit.ordered, steps)
    if kind == "context":
        return tokens.encode_sorted(unit, found.positions, steps, found.old)
    return tokens.encode(found.positions, steps, 8 * unit.width)


def decode_block(
    kind: str,
    payload: Buffer,
    table: ParamTable,
    stream: int,
    start: int,
    size: int,
    old: np.ndarray | None = None,
) -> StreamPatch:
    """Return the change that a block codes, as arrays of its own; the inverse of `encode_block`.

    Args:
        kind: one of `KINDS`.
        payload: untrusted bytes.
        table, stream, start, size: the range of a stream, in units, from a checked manifest: bounds the memory that is
            taken.
        old: unsigned, shape (size,): the block before the change; needed for ``"context"``.

    Raises:
        IntegrityError: the bytes are not a block of this range; names it.
        ConfigError: ``old`` is needed.
    """
    unit, name, data = unit_of(table.streams[stream].dtype), f"block {start} of stream {stream}", memoryview(payload)
    if kind == "bitmap":
        positions, values = _read_bitmap(data, unit, size, name)
    elif kind == "ulp":
        positions, values = tokens.decode(data, size, size, 8 * unit.width, name)
    elif kind != "context":
        positions, values = _read_lists(kind, data, unit, size, name)
    elif old is None:
        raise ConfigError(f"{name} is of kind {kind!r}, which is read with the base", hint="pass old=")
    elif old.size != size:
        raise damaged(name, f"its base has {old.size} units", f"{size}")
    else:
        positions, values = tokens.decode_sorted(data, unit, old, name)
    return StreamPatch(table, stream, start, size, positions, values, kind in ("ulp", "context"))


def _read_bitmap(data: memoryview, unit: Unit, size: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    from torchrl_ext.data.deltas.codec_loops import list_mask

    end = -(-size // 64) * 8
    changed, rest = divmod(len(data) - end, unit.width)
    if rest or not 0 <= changed <= size:
        raise damaged(name, f"it has {len(data)} bytes for {size} units of {unit.width}")
    mask = np.frombuffer(data[:end], np.uint64).copy()  # of whatever alignment: one compiled version for all
    positions = np.empty(changed, np.int32 if size < 2**31 else np.int64)
    if list_mask(mask, positions) != changed or (size % 64 and int(mask[-1]) >> size % 64):
        raise damaged(name, f"its words do not name {changed} of {size} units")
    return positions, np.frombuffer(data[end:], unit.dtype).copy()


def _write_lists(kind: str, found: Found) -> bytes:
    """Return positions, or gaps between them, and new bits."""
    if kind == "indices":
        return b"".join((found.positions.astype("<u4").data, found.after.data))
    gaps = np.diff(found.positions, prepend=-1) - 1
    width = 2 if gaps.max() < 1 << 16 else 4
    data = b"".join((bytes([width]), gaps.astype(f"<u{width}").data, found.after.data))
    return zstandard.ZstdCompressor(level=1).compress(data) if kind == "deltas_zstd" else data


def _read_lists(kind: str, data: memoryview, unit: Unit, size: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    width, most = 4, 1 + size * (4 + unit.width)
    if kind == "deltas_zstd":
        try:
            nbytes = zstandard.frame_content_size(data)
            if not 0 <= nbytes <= most:
                raise damaged(name, f"its zstd frame declares {nbytes} bytes", f"at most {most}")
            unpacker = zstandard.ZstdDecompressor()
            data = memoryview(unpacker.decompress(data, max_output_size=nbytes, allow_extra_data=False))
        except zstandard.ZstdError as error:
            raise damaged(name, f"its zstd frame cannot be read: {error}") from error
    if kind != "indices":
        width, data = data[0] if data else 0, data[1:]
    count, rest = divmod(len(data), width + unit.width)
    if rest or count > size or width not in (2, 4):
        raise damaged(name, f"it has {len(data)} bytes for {size} units of {unit.width}")
    positions = np.frombuffer(data[: width * count], f"<u{width}").astype(np.int64)
    if kind != "indices":
        positions = np.cumsum(positions + 1) - 1
    if count and not (positions[-1] < size and (np.diff(positions) > 0).all()):
        raise damaged(name, f"its positions do not increase from 0 to {size - 1}")
    return positions.astype(index_dtype(size)), np.frombuffer(data[width * count :], unit.dtype).copy()


@final
@dataclass(frozen=True)
class BlockEncoding:
    """How the blocks of a delta are coded; `torchrl_ext.base.registry.encodings` has them by name.

    Attributes:
        name: that of a kind; or ``"auto"``: `ulp`, or `bitmap` where that block is shorter.
    """

    name: str

    @property
    def whole_base(self) -> bool:
        """Whether readers need the whole base."""
        return self.name == "context"

    def encode(self, unit: Unit, found: Found) -> tuple[str, bytes]:
        """Code a block in which something changed, and return its kind, too; called from any thread."""
        if self.name != "auto":
            return self.name, encode_block(self.name, unit, found)
        payload = encode_block("ulp", unit, found)
        if len(payload) > -(-found.size // 64) * 8 + found.after.nbytes:
            return "bitmap", encode_block("bitmap", unit, found)
        return "ulp", payload


ulp, context, bitmap, indices, deltas, deltas_zstd, auto = (partial(BlockEncoding, name) for name in (*KINDS, "auto"))
