"""For the host: loops compiled by numba."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.kernels.base import BITS, Composed, Diff, Place, Words, unsigned

__all__ = ["Found", "HostKernels", "find"]

_PIECE = 1 << 20  # elements that are looked at together: they stay in the processor's cache
_ROOM = 1 << 17  # changes that are listed together: their lists stay in the cache of one core


class Found(NamedTuple):
    """What differs in a part of two arrays.

    Attributes:
        places: int32 or int64, shape (k,), increasing, counted from element 0 of the arrays.
        before, after: the bits there, of the dtype of the arrays, shape (k,).
        words: what this adds to the position digest.
        end: element after the part.
    """

    places: np.ndarray
    before: np.ndarray
    after: np.ndarray
    words: Words
    end: int


class _Lists(threading.local):
    """Memory of a thread for what it finds, by dtype: where much changes, fresh memory costs more than finding does."""

    def __init__(self) -> None:
        self.of: dict[np.dtype[Any], tuple[np.ndarray, ...]] = {}


_lists = _Lists()


def find(old: np.ndarray, new: np.ndarray, start: int = 0, first: int = 0) -> Found:
    """What differs from element ``first`` on, as much as the lists of this thread hold; good until it calls again.

    Args:
        old, new: unsigned, contiguous, shape (n,).
        start: position of element 0 in its tensor, for the digest.
        first: where to begin; `Found.end` of the part before.
    """
    from torchrl_ext.kernels.host_loops import diff

    lists, dtype = _lists.of.get(old.dtype), np.int32 if old.size < 2**31 else np.int64
    if lists is None or lists[0].dtype != dtype:
        lists = _lists.of[old.dtype] = tuple(np.empty(_ROOM + 64, each) for each in (dtype, old.dtype, old.dtype))
    digest = np.zeros(2, np.uint64)
    found, end = diff(old, new, first, start, *lists, digest)
    places, before, after = (each[:found] for each in lists)
    return Found(places, before, after, (int(digest[0]), int(digest[1])), end)


def _parts(old: np.ndarray, new: np.ndarray, start: int) -> Iterator[Found]:
    """Everything that differs, in lists of its own."""
    end = -1
    while end < old.size:
        places, before, after, words, end = find(old, new, start, max(0, end))
        yield Found(places.copy(), before.copy(), after.copy(), words, end)


@final
class HostKernels(Composed):
    """numba's, one thread; a caller cuts its work for several."""

    name: ClassVar[str] = "numba"
    on_host: ClassVar[bool] = True

    def diff(self, old: Tensor, new: Tensor, start: int = 0) -> Diff:
        parts = list(_parts(unsigned(old), unsigned(new), start))
        words = sum(part.words[0] for part in parts) % 2**64, sum(part.words[1] for part in parts) % 2**64
        columns = zip(*(part[:3] for part in parts), strict=True)
        places, before, after = (torch.from_numpy(np.concatenate(each)) for each in columns)
        return Diff(places=places, before=before.view(old.dtype), after=after.view(old.dtype), words=words)

    def _change_words(self, positions: Tensor, before: Tensor, after: Tensor) -> Words:
        from torchrl_ext.kernels.host_loops import digest_change

        total = np.zeros(2, np.uint64)
        digest_change(positions.numpy(), unsigned(before), unsigned(after.contiguous()), total)
        return int(total[0]), int(total[1])

    def words(self, memory: Tensor, place: Place) -> Words:
        from torchrl_ext.kernels.host_loops import digest_runs

        bits = unsigned(memory.as_strided(place.shape, place.to).reshape(-1))
        one, two = np.uint64(0), np.uint64(0)
        if place.in_order:
            tasks = [
                (bits[at : at + _PIECE], min(_PIECE, bits.size - at), np.full(1, place.offset + at, np.int64))
                for at in range(0, bits.size, _PIECE)
            ]
        else:
            tasks = [(bits, 1, place.positions().reshape(-1).numpy())]
        with np.errstate(over="ignore"):
            for task in tasks:
                more = digest_runs(*task)
                one, two = one + np.uint64(more[0]), two + np.uint64(more[1])
        return int(one), int(two)

    def scatter(self, target: Tensor, offsets: Tensor, values: Tensor) -> None:
        from torchrl_ext.kernels.host_loops import scatter

        scatter(target.numpy(), offsets.numpy(), values.numpy())

    def _counted(self, offsets: Tensor, reach: int) -> Tensor:
        return offsets.to(torch.int32 if reach <= 2**31 - 1 else torch.int64)  # half the memory to read in the pause

    def _gather(self, target: Tensor, offsets: Tensor) -> Tensor:
        from torchrl_ext.kernels.host_loops import gather, scatter

        found = torch.empty(offsets.shape, dtype=target.dtype)
        gather(target.numpy(), offsets.numpy(), found.numpy())
        scatter(found.numpy(), offsets[:0].numpy(), found[:0].numpy())  # compiled before a pause needs it
        return found

    def _move(self, before: Tensor, steps: Tensor, ordered: bool) -> Tensor:
        from torchrl_ext.kernels.host_loops import move

        width, out = 8 * before.element_size(), torch.empty(before.shape, dtype=BITS[before.element_size()])
        top, mask = np.uint64(1 << (width - 1)), np.uint64((1 << width) - 1)
        move(unsigned(before), unsigned(steps.contiguous()), top, mask, ordered, unsigned(out))
        return out
