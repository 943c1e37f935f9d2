"""For the host: loops compiled by numba."""

from __future__ import annotations

import threading
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.kernels.base import BITS, Composed, Diff, Place, Words, unsigned

__all__ = ["HostKernels", "find"]

_PIECE = 1 << 20  # elements that are looked at together: they stay in the processor's cache


class _Lists(threading.local):
    """Memory of a thread for what it finds, by dtype: where much changes, fresh memory costs more than finding does."""

    def __init__(self) -> None:
        self.of: dict[np.dtype[Any], tuple[np.ndarray, ...]] = {}


_lists = _Lists()


def find(old: np.ndarray, new: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, Words]:
    """`HostKernels.diff` of unsigned arrays; the lists are good until this thread calls again.

    Returns:
        Places, bits before, bits after, and words.
    """
    from torchrl_ext.kernels.host_loops import CHUNK, diff

    lists, dtype = _lists.of.get(old.dtype), np.int32 if old.size < 2**31 else np.int64
    if lists is None or lists[0].size < min(old.size, CHUNK) + 64 or lists[0].dtype != dtype:
        lists = tuple(np.empty(CHUNK + 64, each) for each in (dtype, old.dtype, old.dtype))
    digest = np.zeros(2, np.uint64)
    found, *lists = diff(old, new, start, *lists, digest)
    _lists.of[old.dtype] = lists
    places, before, after = lists
    return places[:found], before[:found], after[:found], (int(digest[0]), int(digest[1]))


@final
class HostKernels(Composed):
    """numba's, one thread; a caller cuts its work for several."""

    name: ClassVar[str] = "numba"
    on_host: ClassVar[bool] = True

    def diff(self, old: Tensor, new: Tensor, start: int = 0) -> Diff:
        *lists, words = find(unsigned(old), unsigned(new), start)
        places, before, after = (torch.from_numpy(each.copy()) for each in lists)
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
