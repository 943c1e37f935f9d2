"""The contract of a codec, and the table of encodings by name.

A codec is a frozen dataclass that turns what changed in one tensor into bytes and back. It knows tensors and bytes
only: `torchrl_ext.kernels.base.Kernels.diff` finds what changed, on whichever device the tensors are, and files,
versions and stores come later. To add one, write `Codec`'s abstract methods and add the class to
`torchrl_ext.registry.encodings`; `tests/codecs/contract.py` runs over every registered name.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from torchrl_ext.codecs.patch import Patch, same
from torchrl_ext.codecs.units import Unit, unit_of
from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.kernels.base import Words
from torchrl_ext.kernels.host import Part
from torchrl_ext.registry import encodings
from torchrl_ext.types import Info, ParamMeta

__all__ = ["Block", "Codec", "Encoded", "Needs", "Reads", "codec_from_json", "encodings", "make_codec", "needs_base"]

Buffer = bytes | bytearray | memoryview
Needs = Literal["nothing", "changed", "all"]
"""What a decoder must hold of the base: nothing, the old bits of the changed elements, or the whole old tensor."""
Reads = Literal["changed", "all", "either", "new"]
"""What an encoder reads: the units that changed; also the old ones that did not; either the units that changed (where
only they came from a device) or all old and new ones; or every new one, even where none changed."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """An independently coded range of a tensor, and what changed in it.

    Attributes:
        start: index of its first unit in the tensor.
        size: number of its units.
        parts: what changed, from the first unit to the last one; may be iterated again. A codec that reads what changed
            iterates to the end, and keeps nothing of a part when it asks for the next one.
        old, new: unsigned, shape (size,): all units; None where only what changed came from a device.
    """

    start: int
    size: int
    parts: Iterable[Part]
    old: np.ndarray | None = None
    new: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The coded change of one tensor.

    Attributes:
        meta: the parameter.
        codec: the codec that decodes ``payload``, which is not always the one that was asked (see `auto`).
        payload: empty where nothing changed.
        changed: units (elements; two per complex128) that changed.
        digest: what the change adds to the tensor's position digest, two words modulo 2^64; None where the codec read
            whole tensors, so that nobody looked at what changed.
        finite: whether the new elements that differ from the old ones are known to be finite.
    """

    meta: ParamMeta
    codec: Codec
    payload: bytes
    changed: int
    digest: Words | None
    finite: bool = False

    @property
    def density(self) -> float:
        """The share of units that changed, from 0 to 1."""
        return self.changed / max(1, unit_of(self.meta.dtype).count(self.meta))


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """One encoding of what changed in a tensor. Bit-exact for every dtype that `unit_of` accepts."""

    name: ClassVar[str]
    needs: ClassVar[Needs]
    framed: ClassVar[bool] = False
    """Whether a payload ends with the xxh3-64 of everything before, little-endian (`torchrl_ext.codecs.ulp`)."""
    reads: ClassVar[Reads] = "changed"
    """What `encode_block` reads."""
    container: ClassVar[str] = "packed"
    """How payloads are laid out in files; one of `torchrl_ext.registry.containers`."""

    def block_units(self, unit: Unit, count: int) -> int:
        """Return the units per independently coded range of a tensor of ``count`` units: all, unless a codec cuts."""
        return max(1, count)

    def choose(self, unit: Unit, old: Tensor, new: Tensor) -> Codec:
        """Return the codec that codes this tensor: this one, unless it is one that picks another.

        Args:
            old, new: the bits of the tensor (`torchrl_ext.kernels.base.flat_bits`), on any device.
        """
        return self

    @abstractmethod
    def encode_block(self, unit: Unit, block: Block) -> bytes:
        """Code one range; called from any thread, several at a time.

        Returns:
            The coded range; nothing where nothing changed, unless the codec reads every new unit.

        Raises:
            ConfigError: the encoding cannot carry the range.
        """

    def join(self, count: int, blocks: list[bytes]) -> bytes:
        """Return the payload of a tensor of ``count`` units, in which something changed, from its ranges in order."""
        return b"".join(blocks)

    @abstractmethod
    def decode(self, payload: Buffer, meta: ParamMeta, base: Tensor | None = None) -> Patch:
        """Return the change that a payload codes; the inverse of `torchrl_ext.codecs.pipeline.encode_tensor`.

        Args:
            payload: untrusted bytes.
            meta: the parameter, from a trusted manifest: bounds what a payload can make this allocate.
            base: the old tensor. Needed where ``needs`` is ``"all"``; where it is ``"changed"``, a `StepPatch` comes
                back without it.

        Raises:
            IntegrityError: the payload is not one of this parameter; names it.
            ConfigError: ``base`` is needed.
        """

    def to_json(self) -> Info:
        """Return ``{"name": ..., settings}``, from which `codec_from_json` rebuilds the codec."""
        return {"name": self.name, **dataclasses.asdict(self)}

    def _base(self, meta: ParamMeta, base: Tensor | None) -> np.ndarray:
        if base is None:
            raise ConfigError(
                f"encoding {self.name!r} of {meta.name!r} cannot be decoded alone", hint="pass base=, the old tensor"
            )
        return same(meta, base)[0]


def make_codec(name: str, **settings: Any) -> Codec:
    """Return the codec called ``name``.

    Raises:
        ConfigError: no such encoding, or settings that it does not take.
    """
    return encodings.make(name, **settings)


def codec_from_json(info: Info) -> Codec:
    """Return the codec that `Codec.to_json` described.

    Raises:
        ManifestError: no such encoding here, or settings that it does not take.
    """
    if not isinstance(info, dict) or not isinstance(info.get("name"), str):
        raise ManifestError(f"{info!r} does not describe a codec", expected='{"name": ..., settings}')
    try:
        return encodings.make(**info)
    except ConfigError as error:
        raise ManifestError(f"a delta is coded in a way unknown here: {error.what}", hint=error.hint) from error


def needs_base(codec: Codec) -> bool:
    """Return whether what a codec writes is read with all bytes of the old tensor, which a reader has to hold then."""
    return codec.needs == "all" and bool(codec.to_json().get("whole_base", True))
