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

from torchrl_ext.codecs.base import Block, Buffer, Needs, Reads
from torchrl_ext.codecs.frames import decompress
from torchrl_ext.codecs.patch import DensePatch, Patch, SparsePatch, index_dtype
from torchrl_ext.codecs.ulp import FramedCodec, damaged
from torchrl_ext.codecs.units import Unit, unit_of
from torchrl_ext.errors import ConfigError
from torchrl_ext.types import ParamMeta

__all__ = ["DenseCodec"]

_PLANES: Final[bytes] = b"\x03"
_WORTH: Final = 0.97  # a plane that compresses less is stored
_MOST_FOLD: Final = (128 << 10) // 4  # of zstd: a block is 128 KiB at most, and takes 4 bytes at least (RFC 8878)


@final
@dataclass(frozen=True, kw_only=True)
class DenseCodec(FramedCodec):
    """Codes every bit of the new tensor; the old one only decides whether there is anything to send.

    Attributes:
        level: zstd level; 0 stores.

    Raises:
        ConfigError: as `FramedCodec`, or a level outside 0 to 19.
    """

    name: ClassVar[str] = "dense"
    needs: ClassVar[Needs] = "nothing"
    reads: ClassVar[Reads] = "new"
    level: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.level, int) or not 0 <= self.level <= 19:
            raise ConfigError(f"level={self.level!r}", expected="an integer from 0 to 19")

    def encode_block(self, unit: Unit, block: Block) -> bytes:
        parts, new = [_PLANES], cast(np.ndarray, block.new)  # given to a codec that reads it
        for plane in np.ascontiguousarray(new.view(np.uint8).reshape(-1, unit.width).T):
            packed = zstandard.ZstdCompressor(level=self.level).compress(plane) if self.level else plane
            small = len(packed) < _WORTH * plane.size
            data = packed if small else plane
            parts += [bytes((small,)), len(data).to_bytes(4, "little"), bytes(data)]
        return b"".join(parts)

    def decode(self, payload: Buffer, meta: ParamMeta, base: Tensor | None = None) -> Patch:
        unit = unit_of(meta.dtype)
        count = meta.numel * unit.parts
        if not len(payload):
            return SparsePatch(meta, np.empty(0, index_dtype(count)), np.empty(0, unit.dtype))
        blocks = [
            (start, size, list(_planes(body, meta, size, unit.width)))
            for start, size, body in self._bodies(payload, meta, count)
        ]  # before memory is taken for them
        values = np.empty((count, unit.width), np.uint8)
        for start, size, planes in blocks:
            for plane, (packed, data) in enumerate(planes):
                if packed:
                    data = decompress(data, size, f"plane {plane} of the dense payload of {meta.name!r}")
                if len(data) != size:
                    raise damaged(meta, f"plane {plane} has {len(data)} bytes", f"{size}")
                values[start : start + size, plane] = np.frombuffer(data, np.uint8)
        return DensePatch(meta, values.reshape(-1).view(unit.dtype))


def _planes(body: memoryview, meta: ParamMeta, units: int, width: int) -> Iterator[tuple[bool, Buffer]]:
    """Yield of each plane of a block whether it is compressed, and its bytes, which can unpack to ``units`` bytes."""
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
