"""slime's encodings: `indices`, `deltas`, `deltas_zstd` of its first format, `xor` and `overwrite` of its current one.

Files of the first format hold many parameters (`torchrl_ext.compat.slime.first`), so what is coded here of one of them
never leaves the process that writes them: an int64 position and a value of each element.

`xor` and `overwrite` are one zstd frame of level 1 per tensor, byte for byte as slime has it. Source: THUDM/slime
`slime/utils/disk_delta.py` and `docs/` (2026). Before compression:

    xor         new XOR old, every byte of the tensor
    overwrite   uint32 count, count x uint32 byte position, count bytes, little-endian; positions wrap at 4 GiB
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final, cast, final

import numpy as np
import zstandard
from torch import Tensor

from torchrl_ext.codecs.base import Buffer, Codec, Encoded
from torchrl_ext.codecs.patch import Patch, SparsePatch, index_dtype, same
from torchrl_ext.codecs.units import Unit, unit_of
from torchrl_ext.compat.slime.frames import decompress
from torchrl_ext.errors import ConfigError, IntegrityError
from torchrl_ext.types import ParamMeta

__all__ = ["ElementsCodec", "OverwriteCodec", "XorCodec", "deltas", "deltas_zstd", "indices"]

_LEVEL: Final = 1


@dataclass(frozen=True, kw_only=True)
class _FrameCodec(Codec):
    """What the encodings of the current format share: one frame per tensor, compared with the base when decoded."""

    whole_base: ClassVar[bool] = True
    container: ClassVar[str] = "whole"

    @abstractmethod
    def _bytes(self, old: np.ndarray, new: np.ndarray) -> np.ndarray | bytes:
        """Return the bytes that are compressed, from the units of a tensor."""

    @abstractmethod
    def _new(self, data: bytes, meta: ParamMeta, old: np.ndarray) -> np.ndarray:
        """Return the new units from the decompressed bytes; may overwrite ``old``, which is a copy."""

    @abstractmethod
    def _most(self, meta: ParamMeta) -> int:
        """Return how many bytes the decompressed form may take."""

    def encode(self, meta: ParamMeta, old: Tensor, new: Tensor) -> Encoded:
        before, after = same(meta, old, new)
        changed, payload = int(np.count_nonzero(before != after)), b""
        if changed:
            buffer = cast(Buffer, self._bytes(before, after))  # which an array is to zstd, whatever its stub says
            payload = zstandard.ZstdCompressor(level=_LEVEL).compress(buffer)
        return Encoded(meta=meta, codec=self, payload=payload, changed=changed)

    def decode(self, payload: Buffer, meta: ParamMeta, base: Tensor | None = None) -> Patch:
        old = self._base(meta, base)
        if not len(payload):
            return SparsePatch(meta, np.empty(0, index_dtype(old.size)), old[:0].copy())
        data = decompress(payload, self._most(meta), f"the {self.name} delta of {meta.name!r}")
        new = self._new(data, meta, old.copy())
        where = np.flatnonzero(new != old)
        return SparsePatch(meta, where.astype(index_dtype(old.size)), new[where])


@final
@dataclass(frozen=True, kw_only=True)
class XorCodec(_FrameCodec):
    """Codes new XOR old, which undoes itself when applied twice: apply it exactly once, or over a fresh base."""

    name: ClassVar[str] = "xor"

    def _bytes(self, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        return (new ^ old).view(np.uint8)

    def _new(self, data: bytes, meta: ParamMeta, old: np.ndarray) -> np.ndarray:
        if len(data) != old.nbytes:
            raise IntegrityError(f"the xor delta of {meta.name!r} has {len(data)} bytes", expected=f"{old.nbytes}")
        old ^= np.frombuffer(data, old.dtype)
        return old

    def _most(self, meta: ParamMeta) -> int:
        return meta.nbytes


@final
@dataclass(frozen=True, kw_only=True)
class OverwriteCodec(_FrameCodec):
    """Codes positions and values of the changed bytes.

    Raises:
        ConfigError: encoding a tensor of 4 GiB or more, whose positions the format cannot write.
    """

    name: ClassVar[str] = "overwrite"

    def _bytes(self, old: np.ndarray, new: np.ndarray) -> bytes:
        if new.nbytes > 2**32:
            raise ConfigError(
                f"encoding 'overwrite' cannot write byte positions of a tensor of {new.nbytes} bytes",
                expected="at most 4 GiB",
                hint="use 'xor', or 'ulp'",
            )
        values = new.view(np.uint8)
        where = np.flatnonzero(values != old.view(np.uint8)).astype("<u4")
        return b"".join((where.size.to_bytes(4, "little"), where.tobytes(), values[where].tobytes()))

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
        return 4 + 5 * unit_of(meta.dtype).count(meta) * unit_of(meta.dtype).width


@final
@dataclass(frozen=True, kw_only=True)
class ElementsCodec(Codec):
    """Hands positions and values to the container `flushes`, which codes them by the name of the encoding.

    Attributes:
        name: ``"indices"``, ``"deltas"`` or ``"deltas_zstd"``.
    """

    container: ClassVar[str] = "flushes"
    name: str  # type: ignore[misc]  # of one class, three encodings

    def encode(self, meta: ParamMeta, old: Tensor, new: Tensor) -> Encoded:
        before, after = same(meta, old, new)
        where = np.flatnonzero(before != after)
        rows = np.empty(where.size, _row(unit_of(meta.dtype)))
        rows["place"], rows["value"] = where, after[where]
        return Encoded(meta=meta, codec=self, payload=rows.tobytes(), changed=where.size)

    def decode(self, payload: Buffer, meta: ParamMeta, base: Tensor | None = None) -> Patch:
        unit = unit_of(meta.dtype)
        if len(payload) % _row(unit).itemsize:
            raise IntegrityError(f"the {self.name} delta of {meta.name!r} has {len(payload)} bytes")
        rows, count = np.frombuffer(payload, _row(unit)), unit.count(meta)
        where = rows["place"]
        if where.size and not 0 <= where[0] <= where[-1] < count:  # before a cast could hide it
            raise IntegrityError(f"the {self.name} delta of {meta.name!r} has indices up to {where[-1]}")
        return SparsePatch(meta, where.astype(index_dtype(count)), rows["value"].copy())


def _row(unit: Unit) -> np.dtype[np.void]:
    return np.dtype([("place", "<i8"), ("value", unit.dtype)])


indices, deltas, deltas_zstd = (partial(ElementsCodec, name=name) for name in ("indices", "deltas", "deltas_zstd"))
