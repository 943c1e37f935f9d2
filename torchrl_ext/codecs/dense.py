"""The whole new tensor, in byte planes: sign and exponent bytes of trained weights compress, mantissa bytes do not.

A payload is framed as in `torchrl_ext.codecs.ulp`. A body: byte 3, then per plane (lowest byte of every unit first)
a byte 0 (stored) or 1 (one zstd frame), a uint32 length, and its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, cast, final

import numpy as np
import zstandard
from torch import Tensor

from torchrl_ext.codecs.base import Block, Buffer, Codec, Needs, Reads
from torchrl_ext.codecs.framing import damaged, frame, unframe
from torchrl_ext.codecs.patch import DensePatch, Patch, SparsePatch, index_dtype
from torchrl_ext.codecs.slime.container import decompress
from torchrl_ext.codecs.units import Unit, unit_of
from torchrl_ext.errors import ConfigError
from torchrl_ext.types import ParamMeta

__all__ = ["DenseCodec"]

_PLANES: Final[bytes] = b"\x03"
_WORTH: Final = 0.97  # a plane that compresses less is stored
_MOST_FOLD: Final = (128 << 10) // 4  # of zstd: a block is 128 KiB at most, and takes 4 bytes at least (RFC 8878)


@final
@dataclass(frozen=True, kw_only=True)
class DenseCodec(Codec):
    """Every bit of the new tensor; the old one only decides whether there is anything to send.

    Attributes:
        block_log2: a block is 2^block_log2 units.
        level: zstd level; 0 stores.

    Raises:
        ConfigError: a block size outside 2^12 to 2^28, or a level outside 0 to 19.
    """

    name: ClassVar[str] = "dense"
    needs: ClassVar[Needs] = "nothing"
    framed: ClassVar[bool] = True
    reads: ClassVar[Reads] = "new"
    block_log2: int = 22
    level: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.block_log2, int) or not 12 <= self.block_log2 <= 28:
            raise ConfigError(f"block_log2={self.block_log2!r}", expected="an integer from 12 to 28")
        if not isinstance(self.level, int) or not 0 <= self.level <= 19:
            raise ConfigError(f"level={self.level!r}", expected="an integer from 0 to 19")

    def block_units(self, unit: Unit, count: int) -> int:
        return 1 << self.block_log2

    def encode_block(self, unit: Unit, block: Block) -> bytes:
        parts, new = [_PLANES], cast(np.ndarray, block.new)  # given to a codec that reads it
        for plane in np.ascontiguousarray(new.view(np.uint8).reshape(-1, unit.width).T):
            packed = zstandard.ZstdCompressor(level=self.level).compress(plane) if self.level else plane
            small = len(packed) < _WORTH * plane.size
            data = packed if small else plane
            parts += [bytes((small,)), len(data).to_bytes(4, "little"), bytes(data)]
        return b"".join(parts)

    def join(self, unit: Unit, count: int, blocks: list[bytes]) -> bytes:
        return frame(count, self.block_log2, blocks)

    def decode(self, payload: Buffer, meta: ParamMeta, base: Tensor | None = None) -> Patch:
        unit = unit_of(meta.dtype)
        count = unit.count(meta)
        if not len(payload):
            return SparsePatch(meta, np.empty(0, index_dtype(count)), np.empty(0, unit.dtype))
        size, bodies = unframe(payload, meta, count)
        blocks = [
            list(_planes(body, meta, min(size, count - number * size), unit.width))
            for number, body in enumerate(bodies)
        ]  # before memory is taken for them
        values = np.empty((count, unit.width), np.uint8)
        for number, planes in enumerate(blocks):
            out = values[number * size : (number + 1) * size]
            for plane, (packed, data) in enumerate(planes):
                if packed:
                    data = decompress(data, len(out), f"plane {plane} of the dense payload of {meta.name!r}")
                if len(data) != len(out):
                    raise damaged(meta, f"plane {plane} has {len(data)} bytes", f"{len(out)}")
                out[:, plane] = np.frombuffer(data, np.uint8)
        return DensePatch(meta, values.reshape(-1).view(unit.dtype))


def _planes(body: memoryview, meta: ParamMeta, units: int, width: int) -> Iterator[tuple[bool, Buffer]]:
    """Of each plane of a block, whether it is compressed, and its bytes, which can be ``units`` bytes at least."""
    at = 1
    for plane in range(width):
        length = int.from_bytes(body[at + 1 : at + 5], "little")
        data = body[at + 5 : at + 5 + length]
        if body[:1] != _PLANES or len(data) != length or not length or body[at] > 1:
            raise damaged(meta, f"plane {plane} of a block is malformed")
        if units > (length * _MOST_FOLD if body[at] else length):
            raise damaged(meta, f"plane {plane} of a block has {length} bytes for {units} units")
        yield bool(body[at]), data
        at += 5 + length
    if at != len(body):
        raise damaged(meta, "a block goes on after its last plane")
