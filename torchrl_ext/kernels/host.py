"""Kernels for the host: loops compiled by numba."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.kernels.base import UNSIGNED, Diff, Kernels, Landed, Piece, Words, Writes, unsigned

__all__ = ["HostKernels", "Part", "Search"]

_ROOM = (1 << 15) + 64  # changes that are listed together: their lists stay in the nearest caches of a core
_lists = threading.local()  # by dtype: where much changes, fresh memory would cost more than finding does


class Part(NamedTuple):
    """A part of what differs between two arrays.

    Attributes:
        places: int32 or int64, shape (k,), k > 0, increasing, counted from element 0 of the arrays.
        before, after: unsigned, shape (k,): the bits there, in the old and in the new array.
    """

    places: np.ndarray
    before: np.ndarray
    after: np.ndarray


@final
@dataclass(kw_only=True)
class Search:
    """A search for what differs between two arrays on the host, iterated part by part, as often as one likes.

    A part is good until the next one: its lists belong to the thread, and are used again.

    Attributes:
        old, new: unsigned, contiguous, shape (n,).
        start: position of element 0 in its tensor, for the digest.
        positions: gives the positions of elements counted like ``start``, where these are not those of the tensor.
        good: says of new bits whether they are as they should be; None where nobody wants to know.
        changed: how many elements differ; this and the next three are set by an iteration that went to the end.
        sound: whether what differs is known to be good in the new array.
        words: what they add to the position digest of the tensor.
        only: the part, where one held all of them and the thread has not searched again.
    """

    old: np.ndarray
    new: np.ndarray
    start: int = 0
    positions: Callable[[np.ndarray], np.ndarray] | None = None
    good: Callable[[np.ndarray], bool] | None = None
    changed: int = 0
    sound: bool = True
    words: Words = (0, 0)
    only: Part | None = None

    def __iter__(self) -> Iterator[Part]:
        from torchrl_ext.kernels.host_loops import diff, digest_change

        dtype, size = self.old.dtype, self.old.size
        index = np.dtype(np.int32 if size < 2**31 else np.int64)
        key = dtype.str + index.str
        lists = vars(_lists).get(key)
        if lists is None:
            lists = np.empty(_ROOM, index), np.empty(_ROOM, dtype), np.empty(_ROOM, dtype)
            vars(_lists)[key] = lists
        places, before, after = lists
        changed, sound, digest, end, part = 0, True, np.zeros(2, np.uint64), 0, None
        moved = np.zeros(2, np.uint64)
        while end < size:
            found, end = diff(self.old, self.new, end, self.start, places, before, after, digest)
            if found:
                part = Part(places[:found], before[:found], after[:found])
                changed += found
                sound = sound and self.good is not None and self.good(part.after)
                if self.positions is not None:
                    digest_change(self.positions(part.places.astype(np.int64) + self.start), *part[1:], moved)
                yield part
        digest = digest if self.positions is None else moved
        self.changed, self.sound, self.words = changed, sound, (int(digest[0]), int(digest[1]))
        self.only = part if part is not None and part.places.size == changed else None


@final
class HostKernels(Kernels):
    """Kernels made of numba's loops, each in one thread; a caller cuts its work for several."""

    name: ClassVar[str] = "numba"
    on_host: ClassVar[bool] = True

    def diff(self, old: Tensor, new: Tensor, start: int = 0) -> Diff:
        search = Search(old=unsigned(old), new=unsigned(new), start=start)
        found = [Part(*(column.copy() for column in part)) for part in search]
        if not found:
            found = [Part(np.empty(0, np.int32), search.old[:0], search.new[:0])]
        places, before, after = (torch.from_numpy(np.concatenate(column)) for column in zip(*found, strict=True))
        return Diff(places=places, before=before.view(old.dtype), after=after.view(old.dtype), words=search.words)

    def words(self, piece: Piece) -> Words:
        from torchrl_ext.kernels.host_loops import digest_piece

        bits, digest = piece.memory.numpy(), np.zeros(2, np.uint64)
        if bits.size:
            dims = np.array(piece.by_memory, np.int64).reshape(-1, 3)
            digest_piece(bits.view(UNSIGNED[bits.itemsize]), dims, piece.offset, digest)
        return int(digest[0]), int(digest[1])

    def land(self, piece: Piece, positions: Tensor, payload: Tensor, ordered: bool | None) -> Landed:
        from torchrl_ext.kernels.host_loops import land, write

        target, where, digest = piece.memory.numpy(), positions.numpy(), np.zeros(2, np.uint64)
        unit, dims = UNSIGNED[target.itemsize], np.array(piece.dims, np.int64).reshape(-1, 3)
        index = np.dtype(np.int32 if target.size < 2**31 else np.int64)
        same = piece.straight and not piece.offset and where.dtype == index
        offsets, values = where if same else np.empty(where.size, index), np.empty(where.size, unit)
        how = piece.straight, same, ordered is not None, bool(ordered)
        changes = where, payload.numpy().view(unit)
        found = land(target.view(unit), dims, piece.offset, *changes, *how, offsets, values, digest)
        if found < where.size:  # the memory that waits for a pause is as long as what will be written in it
            offsets, values = offsets[:found].copy(), values[:found].copy()
        values = values.view(target.dtype)
        none = np.empty(0, np.int64)
        write(none, none, offsets[:0], values[:0])  # compiled before a pause needs it
        words = int(digest[0]), int(digest[1])
        return Landed(offsets=torch.from_numpy(offsets), values=torch.from_numpy(values), words=words)

    def scatter(self, target: Tensor, offsets: Tensor, values: Tensor) -> Tensor:
        from torchrl_ext.kernels.host_loops import write

        run = np.array([target.data_ptr()]), np.array([offsets.numel()])
        return torch.tensor(write(*run, offsets.numpy(), values.numpy()) == 1)

    def write(self, writes: Writes) -> int:
        from torchrl_ext.kernels.host_loops import write

        return int(write(*(column.numpy() for column in writes[1:])))
