"""slime's current encodings, byte for byte: `xor` and `overwrite`, one zstd frame of level 1 per tensor.

Source: THUDM/slime `slime/utils/disk_delta.py` and `docs/` (2026). Before compression:

    xor         new XOR old, every byte of the tensor
    overwrite   uint32 count, count x uint32 byte position, count bytes, little-endian; positions wrap at 4 GiB
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Final, final

import numpy as np
import zstandard
from torch import Tensor

from torchrl_ext.codecs.base import Buffer, Codec, Found, Needs, Piece
from torchrl_ext.codecs.patch import DensePatch, Patch, SparsePatch, index_dtype
from torchrl_ext.codecs.slime.container import decompress
from torchrl_ext.codecs.units import Layout, layout_of
from torchrl_ext.errors import ConfigError, IntegrityError
from torchrl_ext.types import ParamMeta

__all__ = ["OverwriteCodec", "XorCodec"]

_LEVEL: Final = 1


@dataclass(frozen=True, kw_only=True)
class _WholeCodec(Codec):
    """Shared half: one frame per tensor, checked against the base on the way back."""

    needs: ClassVar[Needs] = "all"
    by_list: ClassVar[bool] = True

    @abstractmethod
    def _bytes(self, old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray | bytes, int]:
        """What is compressed, and how many units changed."""

    @abstractmethod
    def _listed_bytes(self, layout: Layout, found: Found) -> tuple[np.ndarray | bytes, int]:
        """As `_bytes`."""

    @abstractmethod
    def _new(self, data: bytes, meta: ParamMeta, old: np.ndarray) -> np.ndarray:
        """The new units from the decompressed bytes; may overwrite ``old``, which is a copy."""

    @abstractmethod
    def _most(self, meta: ParamMeta) -> int:
        """Bytes that the decompressed form may take."""

    def encode_piece(self, layout: Layout, old: np.ndarray, new: np.ndarray, start: int) -> Piece:
        return self._packed(*self._bytes(old, new))

    def encode_listed(self, layout: Layout, found: Found) -> Piece:
        return self._packed(*self._listed_bytes(layout, found))

    def _packed(self, data: np.ndarray | bytes, changed: int) -> Piece:
        packed = zstandard.ZstdCompressor(level=_LEVEL).compress(data) if changed else b""
        return Piece(data=packed, changed=changed)

    def join(self, layout: Layout, count: int, pieces: list[Piece]) -> bytes:
        return pieces[0].data

    def decode(self, payload: Buffer, meta: ParamMeta, base: Tensor | None = None) -> Patch:
        old = self._base(meta, base)
        if not len(payload):
            return SparsePatch(meta, np.empty(0, index_dtype(old.size)), old[:0].copy())
        data = decompress(payload, self._most(meta), f"the {self.name} delta of {meta.name!r}")
        new = self._new(data, meta, old.copy())
        where = np.flatnonzero(new != old)
        if where.size * (index_dtype(old.size).itemsize + old.itemsize) > old.nbytes:
            return DensePatch(meta, new)
        return SparsePatch(meta, where.astype(index_dtype(old.size)), new[where])


@final
@dataclass(frozen=True, kw_only=True)
class XorCodec(_WholeCodec):
    """New XOR old. Applied twice it undoes itself: exactly once, or over a fresh base."""

    name: ClassVar[str] = "xor"

    def _bytes(self, old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, int]:
        difference = new ^ old
        return difference.view(np.uint8), int(np.count_nonzero(difference))

    def _listed_bytes(self, layout: Layout, found: Found) -> tuple[np.ndarray, int]:
        difference = np.zeros(found.size, layout.dtype)
        difference[found.places] = found.before ^ found.after
        return difference.view(np.uint8), found.places.size

    def _new(self, data: bytes, meta: ParamMeta, old: np.ndarray) -> np.ndarray:
        if len(data) != old.nbytes:
            raise IntegrityError(f"the xor delta of {meta.name!r} has {len(data)} bytes", expected=f"{old.nbytes}")
        old ^= np.frombuffer(data, old.dtype)
        return old

    def _most(self, meta: ParamMeta) -> int:
        return meta.nbytes


@final
@dataclass(frozen=True, kw_only=True)
class OverwriteCodec(_WholeCodec):
    """Positions and values of the changed bytes.

    Raises:
        ConfigError: encoding a tensor of 4 GiB or more, whose positions the format cannot write.
    """

    name: ClassVar[str] = "overwrite"

    def encode_piece(self, layout: Layout, old: np.ndarray, new: np.ndarray, start: int) -> Piece:
        self._check_size(new.nbytes)
        return super().encode_piece(layout, old, new, start)

    def encode_listed(self, layout: Layout, found: Found) -> Piece:
        self._check_size(found.size * layout.width)
        return super().encode_listed(layout, found)

    def _check_size(self, nbytes: int) -> None:
        if nbytes > 2**32:
            raise ConfigError(
                f"a tensor of {nbytes} bytes has byte positions that encoding 'overwrite' cannot write",
                expected="at most 4 GiB",
                hint="use 'xor', or 'ulp'",
            )

    def _bytes(self, old: np.ndarray, new: np.ndarray) -> tuple[bytes, int]:
        after = new.view(np.uint8)
        where = np.flatnonzero(after != old.view(np.uint8)).astype("<u4")
        changed = int(np.count_nonzero(np.diff(where // new.itemsize))) + 1 if where.size else 0
        return b"".join((where.size.to_bytes(4, "little"), where.tobytes(), after[where].tobytes())), changed

    def _listed_bytes(self, layout: Layout, found: Found) -> tuple[bytes, int]:
        before, after = (bits.view(np.uint8).reshape(-1, layout.width) for bits in (found.before, found.after))
        differ = before != after
        where = (found.places[:, None] * layout.width + np.arange(layout.width))[differ].astype("<u4")
        data = b"".join((where.size.to_bytes(4, "little"), where.tobytes(), after[differ].tobytes()))
        return data, found.places.size

    def _new(self, data: bytes, meta: ParamMeta, old: np.ndarray) -> np.ndarray:
        count = int.from_bytes(data[:4], "little")
        if len(data) != 4 + 5 * count or len(data) < 4:
            raise IntegrityError(
                f"the overwrite delta of {meta.name!r} has {len(data)} bytes for {count} positions",
                expected=f"{4 + 5 * count}",
            )
        where, values = np.frombuffer(data, "<u4", count, 4), np.frombuffer(data, np.uint8, count, 4 + 4 * count)
        if count and int(where.max()) >= old.nbytes:
            raise IntegrityError(
                f"the overwrite delta of {meta.name!r} writes byte {int(where.max())}", expected=f"below {old.nbytes}"
            )
        if count and not (where[1:] > where[:-1]).all():
            raise IntegrityError(f"the overwrite delta of {meta.name!r} has positions that do not increase")
        old.view(np.uint8)[where] = values
        return old

    def _most(self, meta: ParamMeta) -> int:
        return 4 + 5 * layout_of(meta.dtype).count(meta) * layout_of(meta.dtype).width
