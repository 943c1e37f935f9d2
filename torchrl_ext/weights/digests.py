"""Digests of tensors, for proving that two sides hold the same bytes.

`tensor_digest` is over the bytes in their order. `PositionDigest` is over (position, bits) pairs in any order, and
updated in O(changed).

Every element contributes two 64-bit words, a mix of its flat position in the full checkpoint tensor and its raw bits;
the digest is their sum modulo 2^64, lane by lane. So

* a shard's digest is the sum over its elements, and shards of any cut add up to the whole tensor's;
* a change adds ``mix(position, new) - mix(position, old)``: the two ends of a delta keep it without reading the rest.

Why it finds accidental errors. ``position * G + bits`` with G = 2^64 / golden ratio puts the positions of a tensor of N
elements at least 2^64 / (2.7 N) apart (the three-distance theorem), so for bits of 16 no two pairs meet below 2^46
elements, for bits of 32 below 2^30; splitmix64's finaliser, a bijection, spreads them. Lost, duplicated, moved, swapped
and altered elements therefore change the sum by differences of words that behave as random, and go unnoticed with
probability about 2^-128 in two lanes, where a plain XOR or sum of bits misses every swap. It is no defence against
somebody who makes collisions on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import mul

import torch
import xxhash
from torch import Tensor

from torchrl_ext.kernels.base import Piece, Words, flat_bits, kernels_on
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.view import Block, View

__all__ = ["PositionDigest", "block_words", "byte_view", "position_digest", "tensor_digest"]


def byte_view(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes in C order, uint8 of shape ``(nbytes,)``, which share its memory if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def tensor_digest(tensor: Tensor) -> str:
    """Return the xxh3-128 of the bytes of ``tensor`` in C order, as 32 hex digits.

    Equal for equal bytes whatever the strides; -0.0 and 0.0 differ, and so do NaN payloads.
    """
    return xxhash.xxh3_128_hexdigest(byte_view(tensor).cpu().numpy().data)


@dataclass(frozen=True)
class PositionDigest:
    """A digest of elements in any order: two words, each modulo 2^64; `PositionDigest()` is that of no elements."""

    first: int = 0
    second: int = 0

    def __add__(self, other: PositionDigest) -> PositionDigest:
        """Return the digest of the elements of both, which are disjoint."""
        return PositionDigest((self.first + other.first) % 2**64, (self.second + other.second) % 2**64)

    def plus(self, delta: tuple[int, int]) -> PositionDigest:
        """Return the digest after a change that adds ``delta`` (as `Encoded.digest` gives it)."""
        return PositionDigest((self.first + delta[0]) % 2**64, (self.second + delta[1]) % 2**64)

    def hex(self) -> str:
        """Return both words as 32 hex digits."""
        return f"{self.first:016x}{self.second:016x}"


def position_digest(tensor: Tensor) -> PositionDigest:
    """Compute the digest of a full tensor, on its device.

    Elements have 1, 2, 4 or 8 bytes, and complex128 counts as pairs of 8. The digest of a part is that of
    `block_words`.
    """
    live = flat_bits(tensor)
    return PositionDigest(*kernels_on(live.device).words(Piece(destination=live, offset=0, strides=(1,))))


def block_words(meta: ParamMeta, block: Block, tensor: Tensor) -> Words:
    """Return what the elements of a block add to the position digest of their parameter.

    Args:
        meta: the parameter.
        block: which of its elements.
        tensor: they are, of the block's shape and the parameter's dtype, on any device.
    """
    shape, start = meta.shape, block.start
    if meta.dtype == torch.complex128:  # of two units per element
        tensor, shape, start = torch.view_as_real(tensor), (*shape, 2), (*start, 0)
    strides = View.whole(shape).strides
    offset = sum(map(mul, start, strides))
    piece = Piece(destination=tensor, offset=offset, strides=strides)
    return kernels_on(tensor.device).words(piece)
