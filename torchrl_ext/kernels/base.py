"""What every implementation offers: find what differs, land changes, keep digests.

Tensors come as *bits*: integers of their elements' width (uint8, int16, int32, int64), so that NaN payloads and -0.0
count. All implementations return the same, bit for bit; `tests/kernels` runs one suite over them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

__all__ = ["BITS", "Composed", "Diff", "Kernels", "Landed", "Place", "Words", "flat_bits", "unsigned"]

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the dtype of its bits."""
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}

Words = tuple[int, int]
"""What elements add to a position digest: two words, each modulo 2^64 (`torchrl_ext.weights.digests`)."""


def flat_bits(tensor: Tensor) -> Tensor:
    """The bits of a tensor in C order, 1-D, on its device; complex128 has two of 8 bytes per element.

    Shares memory where the tensor is contiguous, and not a lazy conjugate or negative.
    """
    flat = tensor.detach().contiguous().resolve_conj().resolve_neg().reshape(-1)
    if flat.is_complex() and flat.element_size() == 16:
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(BITS[flat.element_size()])


def unsigned(bits: Tensor) -> np.ndarray:
    """Bits on the host as an unsigned array over the same memory."""
    return bits.view(_UNSIGNED[bits.element_size()]).numpy()


@dataclass(frozen=True, kw_only=True)
class Diff:
    """The elements that differ between two tensors, in order.

    Attributes:
        places: their indices: int32, shape (k,), increasing; int64 where the tensor has 2^31 elements or more.
        before, after: their bits in the old and in the new tensor, shape (k,).
        words: what the change adds to the position digest of the tensor.
    """

    places: Tensor
    before: Tensor
    after: Tensor
    words: Words


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a strided view of a checkpoint tensor lies in the memory of a parameter. All numbers count elements.

    Attributes:
        shape: of the view, on both sides.
        offset: of its first element in the flat checkpoint tensor.
        strides: in the flat checkpoint tensor.
        to: strides in the parameter's memory, which begins at the view's first element.
    """

    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]
    to: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def dims(self) -> tuple[tuple[int, int, int], ...]:
        """``(size, stride, to)`` with falling strides; dimensions that run on from one to the next count as one."""
        rows = zip(self.shape, self.strides, self.to, strict=True)
        merged: list[tuple[int, int, int]] = []
        for size, stride, to in sorted((row for row in rows if row[0] != 1), key=lambda row: -row[1]):
            outer = merged[-1] if merged else None
            if outer is not None and outer[1] == size * stride and outer[2] == size * to:
                merged[-1] = (outer[0] * size, stride, to)
            else:
                merged.append((size, stride, to))
        return tuple(merged)

    @property
    def dense(self) -> bool:
        """Whether every position from the first to the last one lies in the view."""
        expected = 1
        for size, stride, _ in reversed(self.dims):
            if stride != expected:
                return False
            expected *= size
        return True

    @property
    def straight(self) -> bool:
        """Whether position and place in the parameter differ by ``offset`` alone."""
        return not self.dims or (len(self.dims) == 1 and self.dims[0][1:] == (1, 1))

    @property
    def in_order(self) -> bool:
        """Whether elements in C order follow each other in the checkpoint tensor."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def end(self) -> int:
        """Position after the last element's in the flat checkpoint tensor."""
        return self.offset + 1 + sum((size - 1) * stride for size, stride, _ in self.dims)

    @property
    def reach(self) -> int:
        """Elements of the parameter's memory from the view's first to its last one."""
        return 1 + sum((size - 1) * to for size, _, to in self.dims)

    def translate(self, positions: Tensor) -> tuple[Tensor | None, Tensor]:
        """Where positions between ``offset`` and ``end`` land.

        Returns:
            Whether each lies in the view (None where all do), and offsets in the parameter's memory (int64, or of the
            dtype of ``positions``), of use where it does.
        """
        rest = positions - self.offset if self.offset else positions
        if self.straight:
            return None, rest
        rest = rest.to(torch.int64)
        fits, offsets = torch.ones_like(rest, dtype=torch.bool), torch.zeros_like(rest)
        for size, stride, to in self.dims:
            coordinate = torch.div(rest, stride, rounding_mode="floor")
            fits &= coordinate < size
            offsets += coordinate * to
            rest = rest - coordinate * stride
        return (None if self.dense else fits & (rest == 0)), offsets

    def positions(self) -> Tensor:
        """Position in the flat checkpoint tensor of every element, int64, shape ``shape``."""
        found = torch.full((), self.offset, dtype=torch.int64)
        for size, stride in zip(self.shape, self.strides, strict=True):
            found = found[..., None] + torch.arange(size) * stride
        return found


@dataclass(frozen=True, kw_only=True)
class Landed:
    """Changes translated for a parameter, ready for `Kernels.scatter`.

    Attributes:
        offsets: int32 or int64, shape (k,): elements from the first one of the target.
        values: bits, shape (k,): what is to stand there.
        words: what the change adds to the position digest.
    """

    offsets: Tensor
    values: Tensor
    words: Words


class Kernels(ABC):
    """The loops, for tensors on one kind of device. Safe to use from several threads."""

    name: ClassVar[str]
    on_host: ClassVar[bool] = False
    """Whether tensors lie where encoders can read them, so that several threads find what differs."""

    @abstractmethod
    def diff(self, old: Tensor, new: Tensor, start: int = 0) -> Diff:
        """Find what differs, bit for bit.

        Args:
            old, new: bits, contiguous, shape (n,), on the device.
            start: position of element 0 in its tensor, for the digest; places count from element 0.
        """

    @abstractmethod
    def words(self, memory: Tensor, place: Place) -> Words:
        """What the elements of a view add to the digest of its tensor.

        Args:
            memory: bits, shape (m,), contiguous; ``place`` begins at its first element.
        """

    @abstractmethod
    def land(self, target: Tensor, place: Place, positions: Tensor, payload: Tensor, ordered: bool | None) -> Landed:
        """Translate changes, and resolve steps against what the target holds now. Writes nothing.

        Args:
            target: bits, shape (m,), contiguous; ``place`` begins at its first element.
            place: its view of the checkpoint tensor.
            positions: int32 or int64, shape (k,), increasing, each once, from ``place.offset`` to below ``place.end``;
                on the host or the device.
            payload: bits of the target's width, shape (k,), where ``positions`` are: new bits, or steps.
            ordered: None: ``payload`` is new bits. Else it is steps modulo 2^width on the line of integers (False) or
                of a sign-magnitude format (True).
        """

    @abstractmethod
    def scatter(self, target: Tensor, offsets: Tensor, values: Tensor) -> None:
        """``target[offsets] = values``; offsets lie within the target and differ. May return before it is done."""


class Composed(Kernels):
    """Shared half: `land` from smaller steps."""

    def land(self, target: Tensor, place: Place, positions: Tensor, payload: Tensor, ordered: bool | None) -> Landed:
        positions, payload = positions.to(target.device), payload.to(target.device)
        fits, offsets = place.translate(positions)
        if fits is not None:
            positions, payload, offsets = positions[fits], payload[fits], offsets[fits]
        offsets = self._counted(offsets, target.numel())
        before = self._gather(target, offsets)
        values = payload if ordered is None else self._move(before, payload, ordered)
        return Landed(offsets=offsets, values=values, words=self._change_words(positions, before, values))

    @abstractmethod
    def _change_words(self, positions: Tensor, before: Tensor, after: Tensor) -> Words:
        """What a change of ``before`` to ``after`` at these positions adds to the digest of a tensor."""

    @abstractmethod
    def _counted(self, offsets: Tensor, reach: int) -> Tensor:
        """Offsets of the dtype that `scatter` likes best."""

    @abstractmethod
    def _gather(self, target: Tensor, offsets: Tensor) -> Tensor:
        """``target[offsets]``."""

    @abstractmethod
    def _move(self, before: Tensor, steps: Tensor, ordered: bool) -> Tensor:
        """The bits that are ``steps`` places after ``before``."""
