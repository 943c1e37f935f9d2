"""Loops over the bits of tensors: what every implementation offers.

An implementation lands changes and keeps digests. Tensors come as *bits*: integers of their elements' width (uint8,
int16, int32, int64), so that NaN payloads and -0.0 count. All implementations return the same, bit for bit;
`tests/data/deltas/test_kernels.py` runs one suite over them.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate, chain
from operator import itemgetter
from typing import ClassVar, Final, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.base.errors import ConfigError

__all__ = [
    "BITS",
    "ROW",
    "SEED",
    "UNSIGNED",
    "Kernels",
    "Landed",
    "Piece",
    "Words",
    "Writes",
    "flat_bits",
    "linear_keys",
    "unsigned",
]

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the dtype of its bits."""
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Bytes of an element -> the dtype of its bits on the host, where codecs and loops compute with them."""

_INNERMOST = 16
"""Elements from which on a loop along memory is faster than one across it: 0.90 against 1.07 ns per element at 16 and
0.18 against 6.5 at 4096, but 6.4 against 1.0 at 2 (AMD EPYC with AVX-512, bf16, one thread)."""

Words = tuple[int, int]
"""What elements add to a digest: two words, each modulo 2^64 (`torchrl_ext.data.weights.digests` has the formulas)."""

SEED: Final = int.from_bytes(b"linear64", "little")
"""Where the keys of digests begin."""
ROW: Final = 2048
"""Words of 32 bits that a digest multiplies by keys of their own; both tables fit into half of a small L1 cache."""


@functools.cache
def linear_keys() -> np.ndarray:
    """Return the keys of words modulo `ROW` in a digest, one row for each of its two sums: uint32, shape (2, ROW).

    Key ``n`` in C order is the upper half of output ``n`` of splitmix64 (Steele, Lea, Flood 2014) from `SEED`. No key
    is 0, and no two in a row are equal, even if shifted by bytes. Read-only.
    """
    state = np.uint64(SEED) + np.uint64(0x9E3779B97F4A7C15) * np.arange(1, 2 * ROW + 1, dtype=np.uint64)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys = ((state ^ (state >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32).reshape(2, ROW)
    keys.flags.writeable = False
    return keys


def flat_bits(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor in C order, 1-D, on its device; complex128 has two of 8 bytes per element.

    Shares memory where the tensor is contiguous, and not a lazy conjugate or negative.
    """
    flat = tensor.detach().contiguous().resolve_conj().resolve_neg().reshape(-1)
    if flat.is_complex() and flat.element_size() == 16:
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(BITS[flat.element_size()])


def unsigned(bits: Tensor) -> np.ndarray:
    """Return bits on the host as an unsigned array over the same memory."""
    return bits.numpy().view(UNSIGNED[bits.element_size()])


@functools.lru_cache(maxsize=1024)  # one of each size, since Python's collector looks at every tuple
def _run_of(size: int) -> tuple[tuple[int, int, int], ...]:
    return () if size == 1 else ((size, 1, 1),)


@final
class Piece:
    """One copy that a loader makes: a strided view of a checkpoint tensor, and the live memory where it lies.

    Numbers count elements.

    Args:
        destination: strided view of live memory, of any dtype of 1, 2, 4 or 8 bytes.
        offset: position of the view's first element in the flat checkpoint tensor.
        strides: of the view in the flat checkpoint tensor, one per dimension of ``destination``; none is 0 where there
            are several elements, as an element with several places cannot be written by its position.

    Raises:
        ConfigError: the view has an element several times.

    Attributes:
        memory: bits from the first to the last element of ``destination``, 1-D; those between belong to others.
        dims: ``(size, stride, to)`` with falling strides in the checkpoint tensor; ``to`` is the stride in ``memory``.
            Dimensions that run on from one to the next count as one.
        by_memory: the same for sums, which are taken in any order: with falling strides in ``memory``, after dimensions
            that are too short for an innermost loop.
        end: position after the last element's in the flat checkpoint tensor; ``offset`` where there is none.
        straight: position and place in ``memory`` differ by ``offset`` alone.
        dense: every position from ``offset`` to ``end`` lies in the view.
    """

    __slots__ = ("by_memory", "dense", "destination", "dims", "end", "memory", "offset", "straight", "strides")

    def __init__(self, *, destination: Tensor, offset: int, strides: tuple[int, ...]) -> None:
        self.destination = destination.detach() if destination.requires_grad else destination
        self.offset, self.strides = offset, tuple(strides)
        self.dims: tuple[tuple[int, int, int], ...]
        if self.strides == destination.stride() and destination.is_contiguous():  # of very many, most are
            self.memory = self.destination.view(-1).view(BITS[destination.element_size()])
            self.end, self.dense, self.straight = offset + self.memory.numel(), True, True
            self.dims = self.by_memory = _run_of(self.memory.numel())
            return
        rows = sorted(
            zip(destination.shape, strides, destination.stride(), strict=True), key=itemgetter(1), reverse=True
        )
        dims: list[tuple[int, int, int]] = []
        self.end, reach, self.dense, run = offset + 1, 1, True, 1
        for size, stride, to in rows:
            if size > 1 and not stride:
                raise ConfigError(
                    f"a view of sizes {list(destination.shape)} and strides {list(strides)} has some elements "
                    "several times",
                    expected="a view that has each element of the checkpoint tensor once",
                    state="nothing was changed",
                    hint="load such tensors whole",
                )
            self.end, reach = self.end + (size - 1) * stride, reach + (size - 1) * to
            if dims and dims[-1][1:] == (size * stride, size * to):
                dims[-1] = (dims[-1][0] * size, stride, to)
            elif size != 1:
                dims.append((size, stride, to))
        for size, stride, _ in reversed(dims):
            self.dense, run = self.dense and stride == run, run * size
        if not destination.numel():
            self.end, reach = offset, 0
        self.dims = tuple(dims)
        self.by_memory = tuple(sorted(dims, key=lambda dim: (dim[0] >= _INNERMOST, -dim[2])))
        self.straight = not dims or (len(dims) == 1 and dims[0][1:] == (1, 1))
        flat = self.destination.as_strided((reach,), (1,), destination.storage_offset())
        self.memory = flat.view(BITS[flat.element_size()])


class Landed(NamedTuple):
    """Changes translated for a parameter, ready for `Kernels.scatter` or `Writes`.

    Attributes:
        offsets: int32 or int64, shape (k,): elements from the first one of the piece's memory.
        values: bits, shape (k,): what is to stand there.
        words: what the change adds to the digest.
    """

    offsets: Tensor
    values: Tensor
    words: Words


class Writes(NamedTuple):
    """Values for several tensors of one width on one device, as one list.

    Attributes:
        targets: bits, 1-D: the tensor of each run of the list.
        addresses: int64, shape (s,), on the device: where each target begins.
        ends: int64, shape (s,), on the device: where each run ends in the next two.
        offsets: int32 or int64, shape (k,): elements from the first one of the run's target.
        values: bits, shape (k,): what is to stand there.
    """

    targets: tuple[Tensor, ...]
    addresses: Tensor
    ends: Tensor
    offsets: Tensor
    values: Tensor

    @classmethod
    def of(cls, runs: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Writes:
        """Return one list of at least one run: target, offsets and values, as `Kernels.land` gives them."""
        targets, offsets, values = zip(*runs, strict=True)
        device = values[0].device
        return cls(
            targets=targets,
            addresses=torch.tensor([target.data_ptr() for target in targets]).to(device),
            ends=torch.tensor([one.numel() for one in values]).cumsum(0).to(device),
            offsets=torch.cat(offsets),
            values=torch.cat(values),
        )

    @classmethod
    def joined(cls, lists: Sequence[Writes]) -> Writes:
        """Return at least one list, of one width on one device, as one."""
        if len(lists) == 1:
            return lists[0]
        targets, addresses, ends, offsets, values = zip(*lists, strict=True)
        starts = accumulate(map(Tensor.numel, values), initial=0)
        return cls(
            targets=tuple(chain.from_iterable(targets)),
            addresses=torch.cat(addresses),
            ends=torch.cat([own + start for own, start in zip(ends, starts, strict=False)]),
            offsets=torch.cat(offsets),
            values=torch.cat(values),
        )


class Kernels(ABC):
    """Loops over the bits of tensors on one kind of device, safe to use from several threads."""

    on_host: ClassVar[bool] = False
    """Whether tensors lie where loops on the host can read them."""

    @abstractmethod
    def words(self, piece: Piece) -> Words:
        """Return what the elements of a piece add to the digest of its tensor."""

    def words_of(self, pieces: Sequence[Piece]) -> list[Words]:
        """Return `words` of each piece; all are of one width."""
        return [self.words(piece) for piece in pieces]

    @abstractmethod
    def land(self, piece: Piece, positions: Tensor, payload: Tensor, ordered: bool | None) -> Landed:
        """Translate changes, and resolve steps against what the memory of a piece holds now. Writes nothing.

        Args:
            piece: where its checkpoint tensor lies.
            positions: int32 or int64, shape (k,), increasing, each once, from ``piece.offset`` to below ``piece.end``;
                on the host or the device.
            payload: bits of the width of the memory, shape (k,), where ``positions`` are: new bits, or steps.
            ordered: None: ``payload`` is new bits. Else it is steps modulo 2^width on the line of integers (False) or
                of a sign-magnitude format (True).
        """

    @abstractmethod
    def scatter(self, target: Tensor, offsets: Tensor, values: Tensor) -> None:
        """Write ``target[offsets] = values``; offsets lie in the target and differ. May return before it is done."""

    @abstractmethod
    def sums(self, ends: Tensor, offsets: Tensor, values: Tensor) -> Tensor:
        """Return what the values of each run of a list add up to: int64, shape (s,), on the device.

        A value ``v`` at offset ``o`` counts as ``((v ^ v >> 32) + 1) * (key ^ key >> 32 | 1)``, modulo 2^64, with
        ``key = (o + 1) * GOLDEN``. So one other value always shows, as factors are odd; several cancel as words that
        behave as random do. May return before it is done.

        Args:
            ends, offsets, values: as in `Writes`.
        """

    @abstractmethod
    def write(self, writes: Writes) -> Tensor:
        """Write a list, and return the `sums` of what stands there then; no two of its elements are the same memory."""
