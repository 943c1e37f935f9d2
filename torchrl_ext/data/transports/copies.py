"""Copies of tensors as bytes, and memory to copy into, for both ends of every transport that uses buckets."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["HOST", "BufferPool", "as_bytes", "copy_each", "copy_memory", "is_plain", "plain"]

_KEPT = 8
"""Idle buffers of a pool that are kept for another use."""

HOST = torch.device("cpu")
_LARGE_ELEMENTS = 32768
"""Elements from which torch's CPU copies use several threads (at::internal::GRAIN_SIZE)."""


def plain(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``, contiguous, not lazily conjugated or negated; itself where it is so already."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():  # pending, so that memory does not hold the values
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.device != device:
        tensor = tensor.to(device)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as a flat uint8 tensor."""
    return tensor.view(-1).view(torch.uint8)


copy_memory = ctypes.memmove
"""Copies so many bytes between two addresses of the host: (target, source, nbytes). For small tensors a view costs more
than the copy."""


@torch.no_grad()
def copy_each(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each source into its target, of the same dtype and shape.

    numpy copies large ones on the host, in this thread and without the interpreter lock. torch would share such a copy
    among its OpenMP threads, and where cores are busy, as they are while a backend moves bytes, waiting for the slowest
    of these threads was measured to take twenty times as long as the copy.
    """
    small_sources, small_targets = [], []
    for source, target in zip(sources, targets, strict=True):
        if target.numel() >= _LARGE_ELEMENTS and is_plain(source, HOST) and is_plain(target, HOST):
            as_bytes(target.detach()).numpy()[:] = as_bytes(source.detach()).numpy()
        else:
            small_sources.append(source)
            small_targets.append(target)
    if small_targets:
        torch._foreach_copy_(small_targets, small_sources)


def is_plain(tensor: Tensor, device: torch.device) -> bool:
    """Return whether memory of ``device`` holds the values of a tensor, one after the other."""
    there = tensor.is_cpu if device is HOST else tensor.device == device  # small tensors come by the ten thousand
    return there and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


class BufferPool:
    """A pool of buffers, used again once nothing refers to them: fresh memory costs a page fault every 4 KiB.

    A buffer is handed out as a tensor over an array of its own; when the tensor and every view of it are gone, so is
    that array, which a weak reference tells. On CUDA torch's allocator does the same job.

    Args:
        device: where buffers live.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []

    def take(self, nbytes: int) -> Tensor:
        """Return a uint8 tensor of ``nbytes`` that nothing else refers to; its content is undefined."""
        if self._device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        array, idle, kept = None, [], []
        for entry in self._buffers:
            if entry[1]() is not None:
                kept.append(entry)
            elif array is None and nbytes <= entry[0].nbytes <= 2 * nbytes:
                array = entry[0]
            else:
                idle.append(entry)
        if array is None:
            array = np.empty(max(nbytes, 1), dtype=np.uint8)
        handed_out = array[:nbytes]
        self._buffers = [*idle[-_KEPT:], *kept, (array, weakref.ref(handed_out))]
        return torch.from_numpy(handed_out)
