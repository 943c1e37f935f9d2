"""Digests of tensors, for proving that two sides hold the same bytes.

`tensor_digest` is over the bytes in their order. `PositionDigest` is over (position, bits) pairs in any order, and
updated in O(changed): every element contributes to two sums modulo 2^64 by its raw bits and its flat position in the
full checkpoint tensor. So

* a shard's digest is the sum over its elements, and shards of any cut add up to the whole tensor's;
* a change adds what the new bits contribute less what the old ones did: the two ends of a delta keep it without reading
  the rest.

It sees a tensor as little-endian words of 32 bits and multiplies word ``i`` in each of the two sums by

    key(i) = K[i % 2048] * H(i // 2048)

with K of 32 bits (`torchrl_ext.data.deltas.kernels.linear_keys`) and H odd: the two words of splitmix64's finaliser and
its second mix of ``(i // 2048) * G + SEED``, each ``| 1``, where G is 2^64 / golden ratio. An element of at most 32
bits at byte b adds ``((bits + 1) << 8 * (b % 4)) * key(b // 4)``, one of 64 bits the same for each of its halves; so
zeros count. Of errors that do not depend on the keys it finds

* one changed word always: the difference of its bits times K is below 2^64, and H has an inverse;
* two swapped elements of at most 32 bits in one row of 2048 words always, as shifted keys differ (tested);
* any other in one row but 1 in 2^32 in each sum, so 1 in 2^64: whatever the other keys are, at most one K hides it;
* others but about as few, fewer zeros that end all differences: if only signs of float32 flip, 33 bits of a sum count.

Whole words of 64 bits would not do: ``2^63 * odd`` is ``2^63``, so an even number of flipped signs of float64 would
cancel under any keys. Whoever knows the keys makes collisions at will.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import mul
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.deltas.host import kernels_on
from torchrl_ext.data.deltas.kernels import Piece, Words, flat_bits
from torchrl_ext.data.weights.view import Block, View

__all__ = ["PositionDigest", "block_words", "byte_view", "digest_of", "position_digest", "tensor_digest"]


def byte_view(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes in C order, uint8 of shape ``(nbytes,)``.

    They share its memory if it is contiguous, and not a lazy conjugate or negative.
    """
    whole = tensor.detach().contiguous().resolve_conj().resolve_neg()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)  # strides of one element or none may be any


def tensor_digest(tensor: Tensor) -> str:
    """Return the xxh3-128 of the bytes of ``tensor`` in C order, as 32 hex digits.

    Equal for equal bytes whatever the strides; -0.0 and 0.0 differ, and so do NaN payloads.
    """
    return xxhash.xxh3_128_hexdigest(byte_view(tensor).cpu().numpy().data)


def digest_of(digests: Mapping[str, str]) -> str:
    """Return one digest over the digests of tensors, by name in any order, as 32 hex digits; "" for no tensors."""
    if not digests:
        return ""
    return xxhash.xxh3_128_hexdigest("".join(f"{name}\0{one}\n" for name, one in sorted(digests.items())).encode())


class PositionDigest(NamedTuple):
    """A digest of elements in any order: two words, each modulo 2^64; `PositionDigest()` is that of no elements."""

    first: int = 0
    second: int = 0

    def __add__(self, other: PositionDigest) -> PositionDigest:  # type: ignore[override]
        """Return the digest of the elements of both, which are disjoint."""
        return self.plus(other)

    def plus(self, delta: tuple[int, int]) -> PositionDigest:
        """Return the digest after a change that adds ``delta``."""
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
    """Return what the elements of a block add to the digest of their parameter.

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
