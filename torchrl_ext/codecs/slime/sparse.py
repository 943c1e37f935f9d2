"""slime's first encodings, `indices`, `deltas` and `deltas_zstd`: what changed, as it is.

Their files hold many parameters (`torchrl_ext.codecs.slime.flush`), so a payload never leaves the process that writes
them: int64 positions, then values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from torch import Tensor

from torchrl_ext.codecs.base import Block, Buffer, Codec, Needs
from torchrl_ext.codecs.patch import Patch, SparsePatch, index_dtype
from torchrl_ext.codecs.units import Unit, unit_of
from torchrl_ext.errors import IntegrityError
from torchrl_ext.types import ParamMeta

__all__ = ["DeltasCodec", "DeltasZstdCodec", "IndicesCodec"]


@dataclass(frozen=True, kw_only=True)
class _SparseCodec(Codec):
    """Shared half: all of it but the name."""

    needs: ClassVar[Needs] = "nothing"

    def block_units(self, unit: Unit, count: int) -> int:
        return 1 << 20

    def encode_block(self, unit: Unit, block: Block) -> bytes:
        return (block.places + np.int64(block.start)).astype("<i8").tobytes() + block.after.tobytes()

    def join(self, unit: Unit, count: int, blocks: list[bytes]) -> bytes:
        cuts = [len(data) // (8 + unit.width) * 8 for data in blocks]
        where = [data[:cut] for data, cut in zip(blocks, cuts, strict=True)]
        return b"".join([*where, *(data[cut:] for data, cut in zip(blocks, cuts, strict=True))])

    def decode(self, payload: Buffer, meta: ParamMeta, base: Tensor | None = None) -> Patch:
        unit = unit_of(meta.dtype)
        count = len(payload) // (8 + unit.width)
        if len(payload) != count * (8 + unit.width):
            raise IntegrityError(f"the {self.name} delta of {meta.name!r} has {len(payload)} bytes")
        where = np.frombuffer(payload, "<i8", count)
        if count and not 0 <= where[0] <= where[-1] < unit.count(meta):  # before a cast could hide it
            raise IntegrityError(f"the {self.name} delta of {meta.name!r} has indices up to {where[-1]}")
        values = np.frombuffer(payload, unit.dtype, count, 8 * count)
        return SparsePatch(meta, where.astype(index_dtype(unit.count(meta))), values)


@final
@dataclass(frozen=True, kw_only=True)
class IndicesCodec(_SparseCodec):
    """int32 positions and values."""

    name: ClassVar[str] = "indices"


@final
@dataclass(frozen=True, kw_only=True)
class DeltasCodec(_SparseCodec):
    """Position gaps of 16 or 32 bits and values."""

    name: ClassVar[str] = "deltas"


@final
@dataclass(frozen=True, kw_only=True)
class DeltasZstdCodec(_SparseCodec):
    """`DeltasCodec`, compressed."""

    name: ClassVar[str] = "deltas_zstd"
