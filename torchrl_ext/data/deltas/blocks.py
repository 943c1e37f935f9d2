"""Blocks: the changed elements of one range of a stream as bytes, in one of three kinds.

    ulp      joint tokens of gaps and steps (`tokens`): near the entropy, a few ns for each change
    context  tokens sorted by the exponent of the base (`tokens`): a third less, for readers of it
    bitmap   uint64 words, a bit for each unit, then the new bits of those that changed: at the speed of memory

All are bit-exact for every dtype that `torchrl_ext.data.deltas.table.unit_of` accepts. Numbers are little-endian.
Nobody checks a block for bits that flipped: its checksum is the manifest's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final, final

import numpy as np

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.data.deltas import tokens
from torchrl_ext.data.deltas.streams import Found, StreamPatch
from torchrl_ext.data.deltas.table import ParamTable, Unit, unit_of
from torchrl_ext.data.deltas.tokens import Buffer, damaged
from torchrl_ext.data.stores.manifest import BLOCKS

__all__ = ["KINDS", "BlockEncoding", "decode_block", "encode_block"]

KINDS: Final = ("ulp", "context", "bitmap")


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
    elif old is None:
        raise ConfigError(f"{name} is of kind {kind!r}, which is read with the base", hint="pass old=")
    elif old.size != size:
        raise damaged(name, f"its base has {old.size} units", f"{size}")
    else:
        positions, values = tokens.decode_sorted(data, unit, old, name)
    return StreamPatch(table, stream, start, size, positions, values, kind != "bitmap")


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


@final
@dataclass(frozen=True)
class BlockEncoding:
    """How the blocks of a delta are coded; `torchrl_ext.base.registry.encodings` has them by name.

    Attributes:
        name: that of a kind; or ``"auto"``: `ulp`, or `bitmap` where that block is shorter.
    """

    name: str
    container: ClassVar[str] = BLOCKS

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


ulp, context, bitmap, auto = (partial(BlockEncoding, name) for name in (*KINDS, "auto"))
