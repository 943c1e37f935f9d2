"""The contract of a codec, and the table of encodings by name.

A codec is a frozen dataclass that turns the change of one tensor into bytes and back. It knows tensors and bytes only:
files, versions and stores come later. To add one, write `Codec`'s abstract methods and register the class in
`torchrl_ext.codecs.base.encodings`; `tests/codecs/contract.py` runs over every registered name.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from torchrl_ext.codecs.patch import Patch, same
from torchrl_ext.codecs.units import Layout, layout_of
from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.registry import Registry
from torchrl_ext.types import Info, ParamMeta

__all__ = ["Codec", "Encoded", "Found", "Needs", "Piece", "codec_from_json", "encodings", "make_codec"]

Buffer = bytes | bytearray | memoryview
Needs = Literal["nothing", "changed", "all"]
"""What a decoder must hold of the base: nothing, the old bits of the changed elements, or the whole old tensor."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What became of one range of a tensor.

    Attributes:
        data: its bytes; empty where nothing changed.
        changed: units that changed.
        digest: what the change adds to the tensor's position digest, two words modulo 2^64; None if not computed.
    """

    data: bytes
    changed: int
    digest: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    """What changed in one range of a tensor, listed before it is coded: on a GPU, so that only this leaves it.

    Attributes:
        size: units in the range.
        start: index of its first unit in the tensor.
        places: int64, shape (k,), increasing: units that changed, counted from ``start``.
        before, after: unsigned, of the unit's width, shape (k,): their bits.
    """

    size: int
    start: int
    places: np.ndarray
    before: np.ndarray
    after: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The change of one tensor, coded.

    Attributes:
        meta: the parameter.
        codec: the codec that decodes ``payload``, which is not always the one that was asked (see `auto`).
        payload: empty where nothing changed.
        changed: units (elements; two per complex128) that changed.
        digest: as in `Piece`.
    """

    meta: ParamMeta
    codec: Codec
    payload: bytes
    changed: int
    digest: tuple[int, int] | None = None

    @property
    def density(self) -> float:
        """Changed units / all units."""
        return self.changed / max(1, layout_of(self.meta.dtype).count(self.meta))


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """One encoding of what changed in a tensor. Bit-exact for every dtype that `layout_of` accepts."""

    name: ClassVar[str]
    needs: ClassVar[Needs]
    framed: ClassVar[bool] = False
    """Whether a payload ends with the xxh3-64 of everything before, little-endian (see `codecs.blocks.frame`)."""

    by_list: ClassVar[bool] = False
    """Whether a payload follows from what changed alone, so that `encode_listed` works."""

    def piece_units(self, layout: Layout, count: int) -> int:
        """Units per independently coded range of a tensor of ``count`` units; all of them unless a codec cuts."""
        return max(1, count)

    def choose(self, layout: Layout, old: np.ndarray, new: np.ndarray) -> Codec:
        """The codec that codes this tensor: this one, unless it is one that picks another.

        Args:
            old, new: unsigned units of the tensor, shape (n,), or those that `looks_at` names.
        """
        return self

    def looks_at(self, count: int) -> np.ndarray:
        """Indices of the units, of ``count``, by which `choose` decides: int64, increasing; none by default."""
        return np.empty(0, np.int64)

    @abstractmethod
    def encode_piece(self, layout: Layout, old: np.ndarray, new: np.ndarray, start: int) -> Piece:
        """Code one range; called from any thread, several at a time.

        Args:
            old, new: unsigned units, shape (n,).
            start: index of their first unit in the tensor.
        """

    def encode_listed(self, layout: Layout, found: Found) -> Piece:
        """As `encode_piece`, byte for byte, but for the digest, which whoever listed the changes takes.

        Raises:
            ConfigError: ``by_list`` is False.
        """
        raise ConfigError(f"encoding {self.name!r} needs old and new tensors as a whole", hint="use `encode_piece`")

    @abstractmethod
    def join(self, layout: Layout, count: int, pieces: list[Piece]) -> bytes:
        """The payload of a tensor of ``count`` units from its pieces in order, of which at least one has changes."""

    @abstractmethod
    def decode(self, payload: Buffer, meta: ParamMeta, base: Tensor | None = None) -> Patch:
        """Inverse of `encode`.

        Args:
            payload: untrusted bytes.
            meta: the parameter, from a trusted manifest: bounds what a payload can make this allocate.
            base: the old tensor. Needed where ``needs`` is ``"all"``; where it is ``"changed"``, a `StepPatch` comes
                back without it.

        Raises:
            IntegrityError: the payload is not one of this parameter; names it.
            ConfigError: ``base`` is needed.
        """

    def encode(self, meta: ParamMeta, old: Tensor, new: Tensor) -> Encoded:
        """Code the change of one tensor in this thread.

        Raises:
            ManifestError: the tensors do not have ``meta``'s dtype and shape.
        """
        layout = layout_of(meta.dtype)
        before, after = same(meta, old, new)
        codec = self.choose(layout, before, after)
        size = codec.piece_units(layout, after.size)
        starts = range(0, after.size, size)
        pieces = [codec.encode_piece(layout, before[s : s + size], after[s : s + size], s) for s in starts]
        return codec.finish(meta, pieces)

    def finish(self, meta: ParamMeta, pieces: list[Piece]) -> Encoded:
        """Put the pieces of a tensor together."""
        layout = layout_of(meta.dtype)
        changed = sum(piece.changed for piece in pieces)
        digests = [piece.digest for piece in pieces]
        digest = None
        if None not in digests:
            digest = tuple(sum(words[lane] for words in digests) % 2**64 for lane in (0, 1))  # type: ignore[index]
        payload = self.join(layout, layout.count(meta), pieces) if changed else b""
        return Encoded(meta=meta, codec=self, payload=payload, changed=changed, digest=digest)

    def to_json(self) -> Info:
        """``{"name": ..., settings}``, from which `codec_from_json` rebuilds the codec."""
        return {"name": self.name, **dataclasses.asdict(self)}

    def _base(self, meta: ParamMeta, base: Tensor | None) -> np.ndarray:
        if base is None:
            raise ConfigError(
                f"encoding {self.name!r} of {meta.name!r} cannot be decoded alone", hint="pass base=, the old tensor"
            )
        return same(meta, base)[0]


encodings = Registry("encoding")
for _name, _path, _summary in (
    ("ulp", "ulp:UlpCodec", "gaps and ulp steps, rANS; the fast one"),
    ("context", "ulp:ContextCodec", "gaps and ulp steps in the context of the base's exponent, rANS; the tight one"),
    ("dense", "dense:DenseCodec", "the whole new tensor in byte planes"),
    ("auto", "auto:AutoCodec", "picks per tensor by measured density and link speed"),
    ("indices", "slime.sparse:IndicesCodec", "int32 positions and values (slime's first format)"),
    ("deltas", "slime.sparse:DeltasCodec", "position gaps of 16 or 32 bits and values (slime's first format)"),
    ("deltas_zstd", "slime.sparse:DeltasZstdCodec", "deltas, the whole file in zstd (slime's first format)"),
    ("xor", "slime.whole:XorCodec", "new ^ old in zstd (slime's current format)"),
    ("overwrite", "slime.whole:OverwriteCodec", "byte positions and bytes in zstd (slime's current format)"),
):
    encodings.register(_name, f"torchrl_ext.codecs.{_path}", _summary)


def make_codec(name: str, **settings: Any) -> Codec:
    """The codec called ``name``.

    Raises:
        ConfigError: no such encoding, or settings that it does not take.
    """
    return encodings.make(name, **settings)


def codec_from_json(info: Info) -> Codec:
    """Inverse of `Codec.to_json`.

    Raises:
        ManifestError: no such encoding here, or settings that it does not take.
    """
    if not isinstance(info, dict) or not isinstance(info.get("name"), str):
        raise ManifestError(f"{info!r} does not describe a codec", expected='{"name": ..., settings}')
    try:
        return make_codec(**info)
    except ConfigError as error:
        raise ManifestError(f"a delta is coded in a way unknown here: {error.what}", hint=error.hint) from error
