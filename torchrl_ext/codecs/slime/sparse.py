"""slime's first encodings, `indices`, `deltas` and `deltas_zstd`, for one tensor: a flush file with a single parameter.

`torchrl_ext.codecs.slime.flush` has the format, and puts many parameters into one file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from torch import Tensor

from torchrl_ext.codecs.base import Buffer, Codec, Found, Needs, Piece
from torchrl_ext.codecs.patch import Patch, SparsePatch, index_dtype
from torchrl_ext.codecs.slime.flush import build_flush, check_dtype, parse_flush
from torchrl_ext.codecs.units import Layout, layout_of
from torchrl_ext.errors import IntegrityError
from torchrl_ext.types import ParamMeta

__all__ = ["DeltasCodec", "DeltasZstdCodec", "IndicesCodec"]


@dataclass(frozen=True, kw_only=True)
class _FlushCodec(Codec):
    """Shared half: a tensor is a file of its own. Needs its parameter's name and shape, so `encode` only."""

    needs: ClassVar[Needs] = "nothing"
    by_list: ClassVar[bool] = True

    def encode_piece(self, layout: Layout, old: np.ndarray, new: np.ndarray, start: int) -> Piece:
        where = np.flatnonzero(old != new)
        packed = where.astype("<i8").tobytes() + new[where].tobytes()
        return Piece(data=packed, changed=where.size)

    def encode_listed(self, layout: Layout, found: Found) -> Piece:
        return Piece(data=found.places.astype("<i8").tobytes() + found.after.tobytes(), changed=found.places.size)

    def finish(self, meta, pieces):
        check_dtype(meta)
        piece, layout = pieces[0] if pieces else Piece(data=b"", changed=0), layout_of(meta.dtype)
        where = np.frombuffer(piece.data, "<i8", piece.changed)
        values = np.frombuffer(piece.data, layout.dtype, piece.changed, 8 * piece.changed)
        patch = SparsePatch(meta, where.astype(index_dtype(layout.count(meta))), values)
        payload = build_flush([patch], self.name, current_version="0") if piece.changed else b""
        return super().finish(meta, [Piece(data=payload, changed=piece.changed)])

    def join(self, layout: Layout, count: int, pieces: list[Piece]) -> bytes:
        return pieces[0].data

    def decode(self, payload: Buffer, meta: ParamMeta, base: Tensor | None = None) -> Patch:
        layout = layout_of(meta.dtype)
        if not len(payload):
            return SparsePatch(meta, np.empty(0, index_dtype(layout.count(meta))), np.empty(0, layout.dtype))
        file = parse_flush(payload, f"the {self.name} delta of {meta.name!r}", {meta.name: meta})
        if len(file.patches) != 1:
            raise IntegrityError(f"the {self.name} delta of {meta.name!r} has {len(file.patches)} parameters")
        return file.patches[0]


@final
@dataclass(frozen=True, kw_only=True)
class IndicesCodec(_FlushCodec):
    """int32 positions and values."""

    name: ClassVar[str] = "indices"


@final
@dataclass(frozen=True, kw_only=True)
class DeltasCodec(_FlushCodec):
    """Position gaps of 16 or 32 bits and values."""

    name: ClassVar[str] = "deltas"


@final
@dataclass(frozen=True, kw_only=True)
class DeltasZstdCodec(_FlushCodec):
    """`DeltasCodec`, compressed."""

    name: ClassVar[str] = "deltas_zstd"
