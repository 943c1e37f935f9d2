"""Digests of tensors, for proving that two sides hold the same bytes.

`tensor_digest` is over the bytes in their order. `PositionDigest` does not care for order: it is over (position, bits)
pairs, and updated in O(changed).

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

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from torchrl_ext.errors import ManifestError
from torchrl_ext.kernels.base import Place, flat_bits
from torchrl_ext.kernels.select import kernels_on

__all__ = ["PositionDigest", "byte_view", "position_digest", "tensor_digest"]

_VIEWS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_PIECE = 1 << 20  # elements per task


def byte_view(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in C order: uint8, shape ``(nbytes,)``; shares memory where ``tensor`` is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def tensor_digest(tensor: Tensor) -> str:
    """xxh3-128 of the bytes of ``tensor`` in C order, as 32 hex digits.

    Equal for equal bytes whatever the strides; -0.0 and 0.0 differ, and so do NaN payloads.
    """
    return xxhash.xxh3_128_hexdigest(byte_view(tensor).cpu().numpy().data)


@dataclass(frozen=True)
class PositionDigest:
    """Two words, each modulo 2^64; `PositionDigest()` is that of nothing."""

    first: int = 0
    second: int = 0

    def __add__(self, other: PositionDigest) -> PositionDigest:
        """The digest of disjoint elements together."""
        return PositionDigest((self.first + other.first) % 2**64, (self.second + other.second) % 2**64)

    def plus(self, delta: tuple[int, int]) -> PositionDigest:
        """The digest after a change that adds ``delta`` (as `Encoded.digest` gives it)."""
        return self + PositionDigest(*delta)

    def updated(self, indices: np.ndarray, old: np.ndarray, new: np.ndarray) -> PositionDigest:
        """The digest after some elements changed.

        Args:
            indices: flat positions in the full tensor, any integer dtype, shape (k,), each once.
            old, new: raw bits before and after, unsigned, shape (k,).
        """
        from torchrl_ext.kernels.host_loops import digest_change

        total = np.zeros(2, np.uint64)
        digest_change(np.ascontiguousarray(indices), np.ascontiguousarray(old), np.ascontiguousarray(new), total)
        return self.plus((int(total[0]), int(total[1])))

    def hex(self) -> str:
        """32 hex digits."""
        return f"{self.first:016x}{self.second:016x}"

    @classmethod
    def from_hex(cls, text: str) -> PositionDigest:
        """Inverse of `hex`.

        Raises:
            ManifestError: not 32 hex digits.
        """
        try:
            if len(text) != 32:
                raise ValueError
            return cls(int(text[:16], 16), int(text[16:], 16))
        except (ValueError, TypeError):
            raise ManifestError(f"{text!r} is no position digest", expected="32 hex digits") from None


def position_digest(
    tensor: Tensor, *, shape: Sequence[int] | None = None, starts: Sequence[int] | None = None, threads: int = 1
) -> PositionDigest:
    """Recompute the digest of a tensor, or of a rectangular shard of one.

    Args:
        tensor: any dtype of 1, 2, 4 or 8 bytes, or complex128 (as pairs of 8); a full one is read on its device.
        shape: shape of the full tensor that ``tensor`` is a shard of; default: ``tensor`` is the full one.
        starts: index of the shard's first element along each dimension of ``shape``.
        threads: worker threads.

    Raises:
        ManifestError: the shard does not lie within ``shape``.
    """
    if tensor.device.type != "cpu" and shape is None:
        live = flat_bits(tensor)
        place = Place(shape=(live.numel(),), offset=0, strides=(1,), to=(1,))
        return PositionDigest(*kernels_on(live.device).words(live, place))
    local = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    sizes = tuple(local.shape)
    full = sizes if shape is None else tuple(shape)
    begin = (0,) * len(full) if starts is None else tuple(starts)
    inside = len(sizes) == len(full) == len(begin)
    if not inside or any(b < 0 or b + n > f for b, n, f in zip(begin, sizes, full, strict=True)):
        raise ManifestError(f"a shard of shape {sizes} at {begin} does not lie within {full}")
    if local.is_complex() and local.element_size() == 16:
        local, sizes, full, begin = torch.view_as_real(local), (*sizes, 2), (*full, 2), (*begin, 0)
    bits = local.reshape(-1).view(_VIEWS[local.element_size()]).numpy()
    run, first = _runs(sizes, full, begin)
    return _total(bits, run, first, threads)


def _runs(sizes: tuple[int, ...], full: tuple[int, ...], begin: tuple[int, ...]) -> tuple[int, np.ndarray]:
    """The shard as runs that are contiguous in the full tensor: their length, and the position of each one's start."""
    run, axis = 1, len(sizes)
    while axis and (axis == len(sizes) or sizes[axis] == full[axis]):
        axis -= 1
        run *= sizes[axis]
    strides = np.ones(len(full), np.int64)
    for a in range(len(full) - 2, -1, -1):
        strides[a] = strides[a + 1] * full[a + 1]
    first = np.full(1, sum(int(b) * int(s) for b, s in zip(begin, strides, strict=True)), np.int64)
    for a in range(axis):
        first = (first[:, None] + np.arange(sizes[a], dtype=np.int64) * strides[a]).reshape(-1)
    return run, first


def _total(bits: np.ndarray, run: int, first: np.ndarray, threads: int) -> PositionDigest:
    from torchrl_ext.kernels.host_loops import digest_runs

    if not bits.size:
        return PositionDigest()
    if first.size == 1:  # one long run: cut it
        starts = np.arange(0, bits.size, _PIECE, dtype=np.int64)
        tasks = [(bits[s : s + _PIECE], min(_PIECE, bits.size - s), first + s) for s in starts]
    else:
        rows = max(1, _PIECE // run)
        cuts = range(0, first.size, rows)
        tasks = [(bits[c * run : (c + rows) * run], run, first[c : c + rows]) for c in cuts]
    if threads > 1 and len(tasks) > 1:
        with ThreadPoolExecutor(threads) as pool:
            words = list(pool.map(lambda task: digest_runs(*task), tasks))
    else:
        words = [digest_runs(*task) for task in tasks]
    return sum((PositionDigest(int(a), int(b)) for a, b in words), PositionDigest())
