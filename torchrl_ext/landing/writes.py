"""Writes that wait for a pause: some elements of a parameter, or all of them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrl_ext.kernels.base import BITS, Kernels

__all__ = ["Copy", "Scatter", "as_bits", "commit", "flat"]

_SPLIT = 1 << 18  # elements that are worth a thread of their own
_THREADS = 4  # beyond these, memory is what is waited for


def as_bits(tensor: Tensor) -> Tensor:
    """The same memory seen as integers of the same width, so that NaN payloads and -0.0 survive every copy."""
    return tensor.detach().view(BITS[tensor.element_size()])


def flat(view: Tensor) -> Tensor:
    """The memory of ``view`` from its first to its last element, as 1-D integers; elements between belong to others."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    return as_bits(view.detach().as_strided((reach,), (1,), view.storage_offset()))


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """Elements of one parameter that will change: ``target[offsets] = values``.

    Attributes:
        kernels: write, and made ``offsets`` and ``values``.
        target: 1-D integers.
        offsets: int32 or int64, shape ``(k,)``, on the device of ``target``.
        values: of ``target``'s dtype, shape ``(k,)``, on the device of ``target``.
    """

    kernels: Kernels
    target: Tensor
    offsets: Tensor
    values: Tensor

    @property
    def elements(self) -> int:
        """Number of elements written."""
        return self.offsets.numel()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is held until the commit."""
        return self.offsets, self.values

    def parts(self) -> Sequence[Scatter]:
        """The same, cut for several threads."""
        if not self.kernels.on_host or self.elements <= _SPLIT:
            return (self,)
        cut = zip(self.offsets.split(_SPLIT), self.values.split(_SPLIT), strict=True)
        return [
            Scatter(kernels=self.kernels, target=self.target, offsets=offsets, values=values) for offsets, values in cut
        ]

    def commit(self) -> None:
        """Write."""
        self.kernels.scatter(self.target, self.offsets, self.values)


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A view that changes as a whole.

    Attributes:
        destination, source: integers of one dtype and shape.
    """

    destination: Tensor
    source: Tensor

    @property
    def elements(self) -> int:
        """Number of elements written."""
        return self.destination.numel()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is held until the commit."""
        return (self.source,)

    def parts(self) -> Sequence[Copy]:
        """The same: torch's copies use its own threads."""
        return (self,)

    def commit(self) -> None:
        """Write."""
        self.destination.copy_(self.source, non_blocking=True)


def commit(writes: Sequence[Scatter | Copy]) -> None:
    """Make all writes; returns when they are done. Their order does not matter: no two meet."""
    scatters = [part for write in writes if isinstance(write, Scatter) for part in write.parts()]
    elements, threads = sum(part.elements for part in scatters), min(_THREADS, torch.get_num_threads())
    if threads > 1 and elements > _SPLIT:
        with ThreadPoolExecutor(threads, thread_name_prefix="torchrl-ext-commit") as pool:
            share = [scatters[first :: 4 * threads] for first in range(4 * threads)]
            list(pool.map(lambda parts: [part.commit() for part in parts], share))
    else:
        for part in scatters:
            part.commit()
    devices = {write.destination.device for write in writes if isinstance(write, Copy)}
    for write in writes:
        if isinstance(write, Copy):
            write.commit()
    for device in devices | {part.target.device for part in scatters}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
