"""The kinds of blocks of a delta: how what changed in a range of a stream becomes bytes, and those a change again.

    ulp      joint tokens of gaps and steps (`torchrl_ext.codecs.tokens`): near the entropy, a few ns for each change
    context  tokens sorted by the exponent of the base (`torchrl_ext.codecs.contexts`): a third less, for readers of it
    bitmap   uint64 words, a bit for each unit, then the new bits of those that changed: at the speed of memory
    dense    the new bits of every unit, byte plane by byte plane: byte 0 (stored) or 1 (one zstd frame), uint32 length,
             bytes

Numbers are little-endian. Nobody checks a block for bits that flipped: its checksum is the manifest's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Final, final

import numpy as np
import zstandard

from torchrl_ext.codecs import contexts, tokens
from torchrl_ext.codecs.streams import Found, StreamPatch
from torchrl_ext.codecs.tokens import Buffer, damaged
from torchrl_ext.codecs.units import Unit, unit_of
from torchrl_ext.errors import ConfigError
from torchrl_ext.stores.table import ParamTable

__all__ = ["BITMAP", "CONTEXT", "DENSE", "KINDS", "ULP", "BlockCodec", "Decoded"]

Decoded = tuple[np.ndarray, np.ndarray]
"""Positions, int32 or int64, and values: new bits or steps."""
_WORTH: Final = 0.97  # a plane that compresses less is stored
_MOST_FOLD: Final = (128 << 10) // 4  # of zstd: a block is 128 KiB at most, and takes 4 bytes at least (RFC 8878)


class BlockCodec(ABC):
    """One kind of block. Bit-exact for every dtype that `torchrl_ext.codecs.units.unit_of` accepts.

    Attributes:
        name: in manifests.
        steps: whether steps are decoded, which land on the old bits, rather than new bits.
        whole_base: whether `decode` needs the old bits of the block.
    """

    name: ClassVar[str]
    steps: ClassVar[bool] = False
    whole_base: ClassVar[bool] = False

    @abstractmethod
    def encode(self, unit: Unit, found: Found) -> bytes:
        """Return the change of a block, in which something changed, as bytes; called from any thread."""

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

    @abstractmethod
    def read(self, data: memoryview, unit: Unit, size: int, name: str, old: np.ndarray | None) -> Decoded:
        """Do as `decode`, of a block by itself: return arrays of its own."""


@final
@dataclass(frozen=True)
class _Ulp(BlockCodec):
    name: ClassVar[str] = "ulp"
    steps: ClassVar[bool] = True

    def encode(self, unit: Unit, found: Found) -> bytes:
        return tokens.encode(found.positions, _steps(unit, found), 8 * unit.width)

    def read(self, data: memoryview, unit: Unit, size: int, name: str, old: np.ndarray | None) -> Decoded:
        return tokens.decode(data, size, size, 8 * unit.width, name)


@final
@dataclass(frozen=True)
class _Context(BlockCodec):
    name: ClassVar[str] = "context"
    steps: ClassVar[bool] = True
    whole_base: ClassVar[bool] = True

    def encode(self, unit: Unit, found: Found) -> bytes:
        return contexts.encode(unit, found.positions, _steps(unit, found), found.old)

    def read(self, data: memoryview, unit: Unit, size: int, name: str, old: np.ndarray | None) -> Decoded:
        assert old is not None  # `decode` looked
        if old.size != size:
            raise damaged(name, f"its base has {old.size} units", f"{size}")
        return contexts.decode(data, unit, old, name)


@final
@dataclass(frozen=True)
class _Bitmap(BlockCodec):
    name: ClassVar[str] = "bitmap"

    def encode(self, unit: Unit, found: Found) -> bytes:
        from torchrl_ext.codecs.block_loops import compare, set_mask

        mask = np.zeros(-(-found.size // 64), np.uint64)
        if 16 * found.positions.size > found.size and sum(new.size for _, new in found.news) == found.size:
            for at, new in found.news:
                compare(found.old[at : at + new.size], new, at, mask)
        else:
            set_mask(found.positions, mask)
        return b"".join((mask.data, found.after.data))

    def read(self, data: memoryview, unit: Unit, size: int, name: str, old: np.ndarray | None) -> Decoded:
        from torchrl_ext.codecs.block_loops import list_mask

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
class _Dense(BlockCodec):
    name: ClassVar[str] = "dense"

    def encode(self, unit: Unit, found: Found) -> bytes:
        new, parts, packer = found.old.copy(), list[bytes](), zstandard.ZstdCompressor(level=1)
        new[found.positions] = found.after
        for plane in np.ascontiguousarray(new.view(np.uint8).reshape(-1, unit.width).T):
            packed = packer.compress(plane.data)
            small = len(packed) < _WORTH * plane.size
            data = packed if small else plane.tobytes()
            parts += [bytes((small,)), len(data).to_bytes(4, "little"), data]
        return b"".join(parts)

    def read(self, data: memoryview, unit: Unit, size: int, name: str, old: np.ndarray | None) -> Decoded:
        at, planes = 0, list[tuple[int, memoryview]]()
        for plane in range(unit.width):  # all of them before memory is taken
            length = int.from_bytes(data[at + 1 : at + 5], "little")
            own = data[at + 5 : at + 5 + length]
            if not length or len(own) != length or data[at] > 1:
                raise damaged(name, f"byte plane {plane} is malformed")
            if size > length * _MOST_FOLD if data[at] else size != length:
                raise damaged(name, f"byte plane {plane} has {length} bytes for {size} units")
            planes.append((data[at], own))
            at += 5 + length
        if at != len(data):
            raise damaged(name, "it goes on after its last byte plane")
        values = np.empty((size, unit.width), np.uint8)
        for plane, (packed, own) in enumerate(planes):
            values[:, plane] = tokens.unpack_frame(own, bool(packed), size, name)
        positions = np.arange(size, dtype=np.int32 if size < 2**31 else np.int64)
        return positions, values.reshape(-1).view(unit.dtype)


ULP, CONTEXT, BITMAP, DENSE = _Ulp(), _Context(), _Bitmap(), _Dense()
KINDS: Final[dict[str, BlockCodec]] = {codec.name: codec for codec in (ULP, CONTEXT, BITMAP, DENSE)}


def _steps(unit: Unit, found: Found) -> np.ndarray:
    from torchrl_ext.codecs.token_loops import steps_between

    steps = np.empty_like(found.before)
    steps_between(found.before, found.after, unit.top, unit.mask, unit.ordered, steps)
    return steps
