"""For the host: loops compiled by numba."""

from __future__ import annotations

from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.kernels.base import BITS, Composed, Listed, Place, Words

__all__ = ["HostKernels", "unsigned"]

_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_PIECE = 1 << 20  # elements that are looked at together: they stay in the processor's cache


def unsigned(bits: Tensor) -> np.ndarray:
    """Bits on the host as an unsigned array over the same memory."""
    return bits.view(_UNSIGNED[bits.element_size()]).numpy()


@final
class HostKernels(Composed):
    """numba's, one thread; a caller cuts its work for several."""

    name: ClassVar[str] = "numba"
    on_host: ClassVar[bool] = True

    def diff(self, old: Tensor, new: Tensor) -> Listed:
        parts = [
            np.flatnonzero(old[at : at + _PIECE].numpy() != new[at : at + _PIECE].numpy()) + at
            for at in range(0, old.numel(), _PIECE)
        ]
        dtype = np.int32 if old.numel() < 2**31 else np.int64
        places = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *parts]).astype(dtype))
        return Listed(places=places, before=self._gather(old, places), after=self._gather(new, places))

    def change_words(self, places: Tensor, before: Tensor, after: Tensor, start: int = 0) -> Words:
        from torchrl_ext.kernels.host_loops import digest_change

        total = np.zeros(2, np.uint64)
        where = places if start == 0 else places.to(torch.int64) + start
        digest_change(where.contiguous().numpy(), unsigned(before.contiguous()), unsigned(after.contiguous()), total)
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
