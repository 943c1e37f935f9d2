"""`auto`: per tensor, the encoding that lands soonest, from a sample of the tensor and the speed of the link."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, final

import numpy as np
from torch import Tensor

from torchrl_ext.codecs.base import Buffer, Codec, Needs, Piece
from torchrl_ext.codecs.dense import DenseCodec
from torchrl_ext.codecs.patch import Patch
from torchrl_ext.codecs.ulp import ContextCodec, UlpCodec
from torchrl_ext.codecs.units import Layout
from torchrl_ext.errors import ConfigError
from torchrl_ext.types import ParamMeta

__all__ = ["AutoCodec"]

_SPANS, _SPAN = 64, 512  # the sample: units spread evenly over the tensor


class _Speed(NamedTuple):
    """Nanoseconds of one core, each per unit, per byte of a unit, and per changed unit.

    Measured on bfloat16 and float32 tensors of 2 M units at densities from 0.1 to 100 %, on one core of a 2023 server.
    """

    encode: tuple[float, float, float]
    land: tuple[float, float, float]  # decode, and write where it belongs


_ULP: Final = _Speed((0.0, 0.14, 9.0), (0.0, 0.0, 11.5))
_CONTEXT: Final = _Speed((0.8, 0.1, 22.0), (0.7, 0.0, 24.0))
_STORED: Final = _Speed((0.0, 0.8, 0.0), (0.0, 0.43, 0.0))
_PLANES: Final = _Speed((3.2, 0.55, 0.0), (0.8, 0.43, 0.0))


@final
@dataclass(frozen=True, kw_only=True)
class AutoCodec(Codec):
    """Picks `ulp`, `context` or `dense` for each tensor; what comes out says which.

    Attributes:
        link_bytes_s: bytes a second between trainer and engines (the slowest store or network on the way).
        threads: cores that code and decode.
        whole_base: whether readers hold the whole base on the host, without which `context` cannot be decoded.

    Raises:
        ConfigError: a speed or a number of threads that is not positive.
    """

    name: ClassVar[str] = "auto"
    needs: ClassVar[Needs] = "all"
    link_bytes_s: float = 1e9
    threads: int = 2
    whole_base: bool = True

    def __post_init__(self) -> None:
        if not _positive(self.link_bytes_s, (int, float)) or not _positive(self.threads, int):
            raise ConfigError(f"link_bytes_s={self.link_bytes_s!r}, threads={self.threads!r}", expected="positive")
        if not isinstance(self.whole_base, bool):
            raise ConfigError(f"whole_base={self.whole_base!r}", expected="True or False")

    def choose(self, layout: Layout, old: np.ndarray, new: np.ndarray) -> Codec:
        density, plain, conditional = _survey(layout, old, new)
        options: list[tuple[float, Codec]] = [
            (self._cost(layout, density, plain, _ULP), UlpCodec()),
            (self._cost(layout, density, 8.0 * layout.width, _STORED), DenseCodec(level=0)),
            (self._cost(layout, density, _plane_bits(layout), _PLANES), DenseCodec()),
        ]
        if self.whole_base:
            options.append((self._cost(layout, density, conditional, _CONTEXT), ContextCodec()))
        return min(options, key=lambda option: option[0])[1]

    def looks_at(self, count: int) -> np.ndarray:
        if count <= _SPANS * _SPAN:
            return np.arange(count)
        starts = (count - _SPAN) * np.arange(_SPANS) // (_SPANS - 1)  # where `scan.survey` begins its spans
        return (starts[:, None] + np.arange(_SPAN)).reshape(-1)

    def _cost(self, layout: Layout, density: float, bits: float, speed: _Speed) -> float:
        """Nanoseconds per unit until it has landed; coding goes on while earlier payloads travel."""
        encode, land = ((unit + byte * layout.width + change * density) / self.threads for unit, byte, change in speed)
        return max(encode, bits / 8 / self.link_bytes_s * 1e9) + land

    def encode_piece(self, layout: Layout, old: np.ndarray, new: np.ndarray, start: int) -> Piece:
        return UlpCodec().encode_piece(layout, old, new, start)

    def join(self, layout: Layout, count: int, pieces: list[Piece]) -> bytes:
        return UlpCodec().join(layout, count, pieces)

    def decode(self, payload: Buffer, meta: ParamMeta, base: Tensor | None = None) -> Patch:
        raise ConfigError(
            "'auto' picks other codecs and decodes nothing", hint="decode with the codec of the `Encoded`"
        )


def _positive(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and 0 < value < math.inf


def _plane_bits(layout: Layout) -> float:
    """Bits of a unit in compressed byte planes, about: of the byte with sign and exponent three or four stay."""
    return 8.0 * layout.width - (4.0 if layout.ordered and layout.width > 1 else 1.0)


def _survey(layout: Layout, old: np.ndarray, new: np.ndarray) -> tuple[float, float, float]:
    """Density, bits per unit that `ulp` will take, and bits per unit that `context` will take, from a sample."""
    from torchrl_ext.codecs.scan import survey

    if not old.size:
        return 0.0, 0.0, 0.0
    shift, select = np.uint64(layout.shift), np.uint64(layout.select)
    seen, changed, bits = survey(old, new, _SPANS, _SPAN, layout.top, layout.mask, layout.ordered, shift, select)
    total = seen.sum()
    plain = _entropy(seen.sum(keepdims=True), changed.sum(keepdims=True))
    inside = _entropy(seen, changed)
    return changed.sum() / total, (plain + bits) / total, (inside + bits) / total


def _entropy(seen: np.ndarray, changed: np.ndarray) -> float:
    """Bits that tell which of ``seen`` elements are the ``changed`` ones, group by group."""
    used = seen > 0
    share = np.clip((changed[used] + 0.5) / (seen[used] + 1.0), 1e-9, 1 - 1e-9)
    return float(-(seen[used] * (share * np.log2(share) + (1 - share) * np.log2(1 - share))).sum())
