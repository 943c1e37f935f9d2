"""Codecs of blocks: encode and decode the changed elements of one range of a stream.

    ulp      joint tokens of gaps and steps (`tokens`): near the entropy, a few ns for each change
    context  tokens sorted by the exponent of the base (`tokens`): a third less, for readers of it
    bitmap   uint64 words, a bit for each unit, then the new bits of those that changed: at the speed of memory

An encoding of deltas is one of these (`BlockEncoding`), or one of whole parameters in files of another layout
(`torchrl_ext.data.versions.payloads.FileEncoding`).

Numbers are little-endian. Nobody checks a block for bits that flipped: its checksum is the manifest's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, final

import numpy as np

from torchrl_ext.base.errors import ConfigError, ManifestError
from torchrl_ext.base.registry import encodings
from torchrl_ext.base.types import Info
from torchrl_ext.data.deltas import tokens
from torchrl_ext.data.deltas.streams import Found, StreamPatch
from torchrl_ext.data.deltas.table import ParamTable, Unit, unit_of
from torchrl_ext.data.deltas.tokens import Buffer, damaged
from torchrl_ext.data.stores.manifest import BLOCKS

__all__ = [
    "BITMAP",
    "CONTEXT",
    "KINDS",
    "ULP",
    "BlockCodec",
    "BlockEncoding",
    "Decoded",
    "codec_from_json",
    "encodings",
    "make_codec",
]


def make_codec(name: str) -> Any:
    """Return the encoding called ``name``.

    Raises:
        ConfigError: the name is unknown.
    """
    return encodings.make(name)


def codec_from_json(info: Info) -> Any:
    """Return the encoding that its `to_json` described.

    Args:
        info: ``{"name": ..., settings}``.

    Raises:
        ManifestError: this process does not know the encoding, or it does not take these settings.
    """
    if not isinstance(info, dict) or not isinstance(info.get("name"), str):
        raise ManifestError(f"{info!r} does not describe a codec", expected='{"name": ..., settings}')
    try:
        return encodings.make(**info)
    except ConfigError as error:
        raise ManifestError(f"a delta has an unknown encoding: {error.what}", hint=error.hint) from error


Decoded = tuple[np.ndarray, np.ndarray]
"""Positions, int32 or int64, and values: new bits or steps."""


@final
@dataclass(frozen=True)
class BlockCodec:
    """One kind of block. Bit-exact for every dtype that `torchrl_ext.data.deltas.table.unit_of` accepts.

    Attributes:
        name: in manifests.
        encode: returns the change of a block, in which something changed, as bytes; called from any thread.
        read: does as `decode`, of a block by itself: returns arrays of its own.
        steps: whether steps are decoded, which land on the old bits, rather than new bits.
        whole_base: whether `decode` needs the old bits of the block.
    """

    name: str
    encode: Callable[[Unit, Found], bytes]
    read: Callable[[memoryview, Unit, int, str, np.ndarray | None], Decoded]
    steps: bool = True
    whole_base: bool = False

    def decode(
        self,
        payload: Buffer,
        table: ParamTable,
        stream: int,
        start: int,
        size: int,
        old: np.ndarray | None = None,
    ) -> StreamPatch:
        """Return the change that a block codes; the inverse of `encode`.

        Args:
            payload: untrusted bytes.
            table, stream, start, size: the range of a stream, in units, from a checked manifest: bounds the memory that
                is taken.
            old: unsigned, shape (size,): the block before the change. Needed where ``whole_base``.

        Raises:
            IntegrityError: the bytes are not a block of this range; names it.
            ConfigError: ``old`` is needed.
        """
        unit, name = unit_of(table.streams[stream].dtype), f"block {start} of stream {stream}"
        if self.whole_base and old is None:
            raise ConfigError(f"{name} is of kind {self.name!r}, which is read with the base", hint="pass old=")
        positions, values = self.read(memoryview(payload).cast("B"), unit, size, name, old)
        return StreamPatch(table, stream, start, size, positions, values, self.steps)


def _write_ulp(unit: Unit, found: Found) -> bytes:
    return tokens.encode(found.positions, _steps(unit, found), 8 * unit.width)


def _read_ulp(data: memoryview, unit: Unit, size: int, name: str, old: np.ndarray | None) -> Decoded:
    return tokens.decode(data, size, size, 8 * unit.width, name)


def _write_context(unit: Unit, found: Found) -> bytes:
    return tokens.encode_sorted(unit, found.positions, _steps(unit, found), found.old)


def _read_context(data: memoryview, unit: Unit, size: int, name: str, old: np.ndarray | None) -> Decoded:
    assert old is not None  # `decode` looked
    if old.size != size:
        raise damaged(name, f"its base has {old.size} units", f"{size}")
    return tokens.decode_sorted(data, unit, old, name)


def _write_bitmap(unit: Unit, found: Found) -> bytes:
    from torchrl_ext.data.deltas.codec_loops import compare, set_mask

    mask = np.zeros(-(-found.size // 64), np.uint64)
    if 16 * found.positions.size > found.size and sum(new.size for _, new in found.news) == found.size:
        for at, new in found.news:
            compare(found.old[at : at + new.size], new, at, mask)
    else:
        set_mask(found.positions, mask)
    return b"".join((mask.data, found.after.data))


def _read_bitmap(data: memoryview, unit: Unit, size: int, name: str, old: np.ndarray | None) -> Decoded:
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


ULP = BlockCodec("ulp", _write_ulp, _read_ulp)
CONTEXT = BlockCodec("context", _write_context, _read_context, whole_base=True)
BITMAP = BlockCodec("bitmap", _write_bitmap, _read_bitmap, steps=False)
KINDS: Final = {codec.name: codec for codec in (ULP, CONTEXT, BITMAP)}


@final
@dataclass(frozen=True)
class BlockEncoding:
    """How the blocks of a delta are coded.

    Attributes:
        name: that of a kind; or ``"auto"``: `ulp`, or `bitmap` where that block is shorter.
    """

    name: str
    container: ClassVar[str] = BLOCKS

    @property
    def whole_base(self) -> bool:
        """Whether readers need the whole base."""
        return self.name == CONTEXT.name

    def to_json(self) -> Info:
        """Return ``{"name": ...}``, from which `torchrl_ext.data.deltas.blocks.codec_from_json` makes it again."""
        return {"name": self.name}

    def encode(self, unit: Unit, found: Found) -> tuple[str, bytes]:
        """Code a block in which something changed, and return the name of its kind; called from any thread."""
        codec = KINDS.get(self.name, ULP)
        payload = codec.encode(unit, found)
        if self.name == "auto" and len(payload) > -(-found.size // 64) * 8 + found.after.nbytes:
            codec, payload = BITMAP, BITMAP.encode(unit, found)
        return codec.name, payload


ulp, context, bitmap, auto = (partial(BlockEncoding, name) for name in (*KINDS, "auto"))


def _steps(unit: Unit, found: Found) -> np.ndarray:
    from torchrl_ext.data.deltas.codec_loops import steps_between

    steps = np.empty_like(found.before)
    steps_between(found.before, found.after, unit.top, unit.mask, unit.ordered, steps)
    return steps
