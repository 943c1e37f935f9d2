"""`auto`, which picks for each tensor the encoding that lands soonest, from a sample of it and the link's speed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final, final

import numpy as np
from torch import Tensor

from torchrl_ext.codecs.base import Block, Buffer, Codec, Needs
from torchrl_ext.codecs.dense import DenseCodec
from torchrl_ext.codecs.patch import Patch
from torchrl_ext.codecs.ulp import ContextCodec, UlpCodec
from torchrl_ext.codecs.units import Unit
from torchrl_ext.errors import ConfigError
from torchrl_ext.types import ParamMeta

__all__ = ["AutoCodec"]

_SPANS, _SPAN = 64, 512  # the sample: units spread evenly over the tensor


# Nanoseconds of one core to encode, and to decode and write where it belongs: per unit, per byte of a unit, and per
# changed unit. Measured on bfloat16 and float32 tensors of 2 M units at densities from 0.1 to 100 %, on one core of a
# 2023 server.
_ULP: Final = UlpCodec(), (0.0, 0.14, 9.0), (0.0, 0.0, 11.5)
_CONTEXT: Final = ContextCodec(), (0.8, 0.1, 22.0), (0.7, 0.0, 24.0)
_STORED: Final = DenseCodec(level=0), (0.0, 0.8, 0.0), (0.0, 0.43, 0.0)
_PLANES: Final = DenseCodec(), (3.2, 0.55, 0.0), (0.8, 0.43, 0.0)


@final
@dataclass(frozen=True, kw_only=True)
class AutoCodec(Codec):
    """Picks `ulp`, `context` or `dense` for each tensor; the `Encoded` that comes out says which.

    Attributes:
        link_bytes_s: bytes a second between trainer and engines (the slowest store or network on the way).
        threads: cores that code and decode.
        whole_base: whether readers hold the whole base on the host, without which `context` cannot be decoded.
        dense: whether `dense` is among them. Parts of one tensor that are coded apart have to be steps all of them,
            where readers do not hold the base.

    Raises:
        ConfigError: a speed or a number of threads that is not positive.
    """

    name: ClassVar[str] = "auto"
    needs: ClassVar[Needs] = "all"
    link_bytes_s: float = 1e9
    threads: int = 2
    whole_base: bool = True
    dense: bool = True

    def __post_init__(self) -> None:
        if not _positive(self.link_bytes_s, (int, float)) or not _positive(self.threads, int):
            raise ConfigError(f"link_bytes_s={self.link_bytes_s!r}, threads={self.threads!r}", expected="positive")
        for name in ("whole_base", "dense"):
            if not isinstance(found := getattr(self, name), bool):
                raise ConfigError(f"{name}={found!r}", expected="True or False")

    def choose(self, unit: Unit, old: Tensor, new: Tensor) -> Codec:
        from torchrl_ext.codecs.coder.tokens import survey

        count, density, plain, inside = old.numel(), 0.0, 0.0, 0.0
        if count:
            spans, span, apart = _SPANS, _SPAN, (count - _SPAN) // (_SPANS - 1)
            if count <= _SPANS * _SPAN:
                spans, span, apart = 1, count, 0
            if old.device.type != "cpu" or new.device.type != "cpu":  # only the sample comes to the host
                shape, strides, apart = (spans, span), (apart, 1), span
                old = old.as_strided(shape, strides, old.storage_offset()).reshape(-1).cpu()
                new = new.as_strided(shape, strides, new.storage_offset()).reshape(-1).cpu()
            bits = old.numpy().view(unit.dtype), new.numpy().view(unit.dtype)
            context = np.uint64(unit.shift), np.uint64(unit.select)
            density, plain, inside = survey(*bits, spans, span, apart, unit.top, unit.mask, unit.ordered, *context)
        stored = 8.0 * unit.width
        planes = stored - (4.0 if unit.ordered and unit.width > 1 else 1.0)  # of the exponent's byte half stays
        options = [(plain, *_ULP), (stored, *_STORED), (planes, *_PLANES)][: None if self.dense else 1]
        if self.whole_base:
            options.append((inside, *_CONTEXT))
        best, least = options[0][1], math.inf
        for size, codec, encode, land in options:  # nanoseconds per unit until it has landed
            coding = (encode[0] + encode[1] * unit.width + encode[2] * density) / self.threads
            landing = (land[0] + land[1] * unit.width + land[2] * density) / self.threads
            cost = max(coding, size / 8 / self.link_bytes_s * 1e9) + landing  # coding goes on beside the link
            if cost < least:
                best, least = codec, cost
        return best

    def encode_block(self, unit: Unit, block: Block) -> bytes:
        raise AssertionError("another codec was chosen")

    def decode(self, payload: Buffer, meta: ParamMeta, base: Tensor | None = None) -> Patch:
        raise ConfigError(
            "'auto' picks other codecs and decodes nothing", hint="decode with the codec of the `Encoded`"
        )


def _positive(value: object, kind: type[float] | tuple[type[float], ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and 0 < value < math.inf
