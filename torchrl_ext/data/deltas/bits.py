"""Bits of tensors: their dtypes, where copies of a checkpoint tensor lie in memory, and what loops over them offer.

Tensors come as *bits*: integers of their elements' width (uint8, int16, int32, int64), so that NaN payloads and -0.0
count. Two modules have the loops, `torchrl_ext.data.deltas.loops` for the host and `torchrl_ext.data.deltas.torch_ops`
for any device, and return the same, bit for bit; `tests/data/deltas/test_kernels.py` runs one suite over both.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from operator import itemgetter
from typing import Final, NamedTuple, Protocol, final

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "BITS",
    "ROW",
    "SEED",
    "UNSIGNED",
    "Kernels",
    "Piece",
    "Places",
    "Range",
    "Writes",
    "flat_bits",
    "linear_keys",
    "unsigned",
]

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the dtype of its bits."""
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Bytes of an element -> the dtype of its bits on the host, where codecs and loops compute with them."""

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
    """Return the bits of a tensor in C order, 1-D, on its device.

    Shares memory where the tensor is contiguous, and not a lazy conjugate or negative.
    """
    flat = tensor.detach().contiguous().resolve_conj().resolve_neg().reshape(-1)
    return flat.view(BITS[flat.element_size()])


def unsigned(bits: Tensor) -> np.ndarray:
    """Return bits on the host as an unsigned array over the same memory."""
    return bits.numpy().view(UNSIGNED[bits.element_size()])


@final
class Piece:
    """One copy that a loader makes: a strided view of a checkpoint tensor, and the live memory where it lies.

    Numbers count elements.

    Args:
        destination: strided view of live memory, of any dtype of 1, 2, 4 or 8 bytes.
        offset: position of the view's first element in the flat checkpoint tensor.
        strides: of the view in the flat checkpoint tensor, one per dimension of ``destination``; the view has no
            element twice, as one with several places cannot be written by its position.

    Attributes:
        memory: bits from the first to the last element of ``destination``, 1-D; those between belong to others.
        dims: ``(size, stride, to)`` with falling strides in the checkpoint tensor; ``to`` is the stride in ``memory``.
            Dimensions that run on from one to the next count as one. Empty where the piece is straight: position and
            place in ``memory`` differ by ``offset`` alone.
        end: position after the last element's in the flat checkpoint tensor; ``offset`` where there is none.
    """

    __slots__ = ("destination", "dims", "end", "memory", "offset", "strides")

    def __init__(self, *, destination: Tensor, offset: int, strides: tuple[int, ...]) -> None:
        self.destination = destination.detach() if destination.requires_grad else destination
        self.offset, self.strides = offset, tuple(strides)
        self.dims: tuple[tuple[int, int, int], ...] = ()
        reach = destination.numel()
        self.end = offset + reach
        if reach and not (self.strides == destination.stride() and destination.is_contiguous()):  # of many, few
            dims: list[tuple[int, int, int]] = []
            rows = zip(destination.shape, strides, destination.stride(), strict=True)
            for size, stride, to in sorted(rows, key=itemgetter(1), reverse=True):
                if dims and dims[-1][1:] == (size * stride, size * to):
                    dims[-1] = (dims[-1][0] * size, stride, to)
                elif size != 1:
                    dims.append((size, stride, to))
            self.end = offset + 1 + sum((size - 1) * stride for size, stride, _ in dims)
            reach = 1 + sum((size - 1) * to for size, _, to in dims)
            if [dim[1:] for dim in dims] not in ([], [(1, 1)]):
                self.dims = tuple(dims)
        flat = self.destination.as_strided((reach,), (1,))  # a view of one element may keep another stride
        self.memory = flat.view(BITS[flat.element_size()])


@final
class Places:
    """Where the segments of a stream lie in this rank's memory on one device, as tables for compiled loops.

    Args:
        segments: the pieces of each segment, of one width.
        names: of the segments.

    Attributes:
        pieces: of all segments, one after the other.
        names: of the segment of each piece.
        first: int64, shape (segments + 1,): the number of the first piece of each segment, and of all pieces.
        tables: int64: ``addresses``, ``offsets``, ``ends``, ``reach``, shape (pieces,): of their memory; as in
            `Piece`; and the larger of ``end`` and the elements of the memory; ``at``, shape (pieces + 1,): where the
            dimensions of each piece begin; ``dims``, shape (dimensions, 3): as in `Piece`.
    """

    def __init__(self, segments: Sequence[Sequence[Piece]], names: Iterable[str]) -> None:
        self.pieces = pieces = [*chain.from_iterable(segments)]
        self.names = [name for name, own in zip(names, segments, strict=False) for _ in own]
        self.first = np.array([0, *accumulate(map(len, segments))])
        columns = (
            [piece.memory.data_ptr() for piece in pieces],
            [piece.offset for piece in pieces],
            [piece.end for piece in pieces],
            [max(piece.end, piece.memory.numel()) if piece.dims else piece.end for piece in pieces],
            [0, *accumulate([len(piece.dims) for piece in pieces])],
        )
        dims = [dim for piece in pieces if piece.dims for dim in piece.dims]
        self.tables = (*(np.array(column, np.int64) for column in columns), np.array(dims, np.int64).reshape(-1, 3))


class Range(NamedTuple):
    """Changes in a range of a stream.

    Attributes:
        segments: the numbers, in `Places`, of those that meet the range.
        firsts: int64, shape (segments + 1,): where each of these begins, in the coordinates of ``positions``.
        positions: int32 or int64, shape (k,), increasing, each once.
        payload: unsigned, of the width of the memory, shape (k,): new bits, or steps.
        ordered: None: ``payload`` is new bits. Else it is steps modulo 2^width on the line of integers (False) or of a
            sign-magnitude format (True).
    """

    segments: range
    firsts: np.ndarray
    positions: np.ndarray
    payload: np.ndarray
    ordered: bool | None


class Writes(NamedTuple):
    """Values for several tensors of one width on one device, as one list of a run for each.

    Attributes:
        names: of the tensors of the checkpoint.
        targets: bits, 1-D: where each run is written.
        addresses: int64, shape (s,), on the host: where each target begins.
        ends: int64, shape (s,), on the host: where each run ends in the next two.
        offsets: int32 or int64, shape (k,): elements from the first one of the run's target.
        values: bits, shape (k,): what is to stand there.
        words: int64, shape (s, 2), on the device: what each run adds to the digest of its tensor.
        sums: int64, shape (s,), on the device: what the values of each run add up to. A value ``v`` at offset ``o``
            counts as ``((v ^ v >> 32) + 1) * (key ^ key >> 32 | 1)``, modulo 2^64, with ``key = (o + 1) * GOLDEN``. So
            one other value always shows, as factors are odd; several cancel as words that behave as random do.
    """

    names: list[str]
    targets: list[Tensor]
    addresses: Tensor
    ends: Tensor
    offsets: Tensor
    values: Tensor
    words: Tensor
    sums: Tensor


class Kernels(Protocol):
    """Loops over the bits of tensors on one kind of device, safe to use from several threads.

    What they return on an accelerator may not be done yet: it is queued on this thread's stream, and the host does not
    wait for it. *Words* are what elements add to a digest: two numbers modulo 2^64
    (`torchrl_ext.data.weights.digests` has the formulas).
    """

    @property
    def on_host(self) -> bool:
        """Whether tensors lie where loops on the host can read them."""

    def words(self, pieces: Sequence[Piece]) -> Tensor:
        """Return the words of the elements of each piece, all of one width: int64, shape (pieces, 2), on the device."""

    def land(self, places: Places, changes: Range) -> Writes | None:
        """Translate changes, and resolve steps against what memory holds now; None where none lies in any piece."""

    def exchange(self, writes: Writes) -> Tensor:
        """Exchange the ``values`` of a list with what stands there; no two of its elements are the same memory.

        A second exchange takes the memory back to what it was. Returns the ``sums`` of what is read there afterwards.
        """

    def scatter(self, target: Tensor, offsets: Tensor, values: Tensor) -> None:
        """Write ``target[offsets] = values``; offsets lie in the target and differ."""
