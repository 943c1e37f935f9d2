"""Digests of tensors, for proving that two sides hold the same bytes.

A digest is over (position, bits) pairs in any order: every element contributes to two sums modulo 2^64 by its raw bits
and its flat position in the full checkpoint tensor. So

* every device computes the same, at the speed of its memory, and keeps the sums until somebody asks;
* a shard's digest is the sum over its elements, and shards of any cut add up to the whole tensor's;
* a change adds what the new bits contribute less what the old ones did: the two ends of a delta keep it without reading
  the rest.

It sees a tensor as little-endian words of 32 bits and multiplies word ``i`` in each of the two sums by

    key(i) = K[i % 2048] * H(i // 2048)

with K of 32 bits (`torchrl_ext.data.deltas.bits.linear_keys`) and H odd: the two words of splitmix64's finaliser and
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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import mul
from typing import NamedTuple, final

import torch
import xxhash
from torch import Tensor

from torchrl_ext.base.devices import Recorded, download, recorded, wait_for
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.deltas.bits import Piece, flat_bits
from torchrl_ext.data.deltas.torch_ops import kernels_on
from torchrl_ext.data.weights.view import Block, View

__all__ = [
    "Digests",
    "PositionDigest",
    "as_digests",
    "block_words",
    "byte_view",
    "digest_of",
    "digests_of",
    "fetched",
    "position_digest",
]


def byte_view(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes in C order, uint8 of shape ``(nbytes,)``.

    They share its memory if it is contiguous, and not a lazy conjugate or negative.
    """
    whole = tensor.detach().contiguous().resolve_conj().resolve_neg()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)  # strides of one element or none may be any


def digest_of(digests: Mapping[str, str]) -> str:
    """Return one digest over the digests of tensors, by name in any order, as 32 hex digits; "" for no tensors."""
    if not digests:
        return ""
    return xxhash.xxh3_128_hexdigest("".join(f"{name}\0{one}\n" for name, one in sorted(digests.items())).encode())


class PositionDigest(NamedTuple):
    """A digest of elements in any order: two words, each modulo 2^64; `PositionDigest()` is that of no elements."""

    first: int = 0
    second: int = 0

    def __add__(self, other: Sequence[int]) -> PositionDigest:  # type: ignore[override]
        """Return the digest of the elements of both, which are disjoint; or after a change that adds these words."""
        return PositionDigest((self.first + other[0]) % 2**64, (self.second + other[1]) % 2**64)

    def hex(self) -> str:
        """Return both words as 32 hex digits."""
        return f"{self.first:016x}{self.second:016x}"


@final
class Digests:
    """Takes digests of tensors as they come.

    On an accelerator they are queued on the stream of the thread that adds the tensor, and waited for when they are
    asked for; small tensors are held, and digested together.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[torch.device, int], list[tuple[str, Piece]]] = {}
        self._bytes = 0
        self._names, self._words = list[str](), list[Tensor]()
        self._made = dict[torch.device, Recorded]()
        self._found = dict[str, PositionDigest]()

    def add(self, name: str, tensor: Tensor) -> None:
        """Take the digest of a full tensor, which does not change before `launch`."""
        lies = tensor.is_contiguous() and tensor.element_size() <= 8 and not (tensor.is_conj() or tensor.is_neg())
        live = tensor if lies else flat_bits(tensor)
        piece = Piece(destination=live, offset=0, strides=live.stride())
        self._held.setdefault((live.device, live.element_size()), []).append((name, piece))
        self._bytes += live.nbytes
        if self._bytes >= (_CACHED if live.device.type == "cpu" else _TOGETHER):
            self.launch()

    def launch(self) -> None:
        """Let go of the tensors that were added last; to be called in the thread that added them."""
        held, self._held, self._bytes = self._held, {}, 0
        for (device, _), own in held.items():
            self._names += [name for name, _ in own]
            self._words.append(kernels_on(device).words([piece for _, piece in own]))
            self._made[device] = recorded([device])

    def found(self) -> dict[str, PositionDigest]:
        """Return the digest of each tensor, by name; waits once for each accelerator."""
        self.launch()
        for made in self._made.values():
            wait_for(made)
        names, words = self._names, self._words
        self._names, self._words, self._made = [], [], {}
        self._found |= zip(names, as_digests(words), strict=True)
        return self._found

    def hex(self) -> dict[str, str]:
        """Return `found` as text."""
        return {name: one.hex() for name, one in self.found().items()}


def digests_of(tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]) -> dict[str, PositionDigest]:
    """Return the digest of each full tensor, computed on its device, by name."""
    taken = Digests()
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        taken.add(name, tensor)
    return taken.found()


_CACHED, _TOGETHER = 1 << 20, 32 << 20  # bytes that are digested at once, on the host while they lie in a cache


def as_digests(words: Sequence[Tensor]) -> Iterator[PositionDigest]:
    """Return digests of rows of words, as `torchrl_ext.data.deltas.bits.Kernels.words` returns them, in order.

    Args:
        words: int64, each of shape (k, 2), on any devices, each of which is waited for once.
    """
    return (PositionDigest(one % 2**64, two % 2**64) for rows in fetched(words) for one, two in rows.tolist())


def fetched(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return small tensors on the host; each device is waited for once.

    Args:
        tensors: on any devices, of one dtype, and of the same sizes but for the first one.
    """
    by_device = dict[torch.device, list[int]]()
    for number, one in enumerate(tensors):
        by_device.setdefault(one.device, []).append(number)
    joined = download([torch.cat([tensors[number] for number in own]) for own in by_device.values()])
    found = dict[int, Tensor]()
    for own, every in zip(by_device.values(), joined, strict=True):
        found |= zip(own, every.split([len(tensors[number]) for number in own]), strict=True)
    return [found[number] for number in range(len(tensors))]


def position_digest(tensor: Tensor) -> PositionDigest:
    """Return the digest of a full tensor, computed on its device.

    Elements have 1, 2, 4 or 8 bytes. The digest of a part is that of `block_words`.
    """
    return digests_of({"": tensor})[""]


def block_words(meta: ParamMeta, block: Block, tensor: Tensor) -> Tensor:
    """Return what the elements of a block add to the digest of their parameter: int64, shape (1, 2), on their device.

    Args:
        meta: the parameter.
        block: which of its elements.
        tensor: they are, of the block's shape and the parameter's dtype, on any device.
    """
    strides = View.whole(meta.shape).strides
    offset = sum(map(mul, block.start, strides))
    return kernels_on(tensor.device).words([Piece(destination=tensor, offset=offset, strides=strides)])
