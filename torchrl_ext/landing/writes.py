"""Writes that wait for a pause: some elements of a parameter, or all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.codecs.patch import DensePatch, Patch, StepPatch
from torchrl_ext.codecs.units import unit_of
from torchrl_ext.kernels.base import BITS, Kernels, Place
from torchrl_ext.kernels.select import kernels_on
from torchrl_ext.weights.digests import PositionDigest

if TYPE_CHECKING:
    from torchrl_ext.landing.placement import Landing

__all__ = ["Piece", "Staged", "as_bits", "in_units", "piece_digest"]

_SPLIT = 1 << 18  # elements that are worth a thread of their own
_THREADS = 4  # beyond these, memory is what is waited for


def as_bits(tensor: Tensor) -> Tensor:
    """The same memory seen as integers of the same width, so that NaN payloads and -0.0 survive every copy."""
    return tensor.detach().view(BITS[tensor.element_size()])


def flat(view: Tensor) -> Tensor:
    """The memory of ``view`` from its first to its last element, as 1-D integers; elements between belong to others."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    return as_bits(view.detach().as_strided((reach,), (1,), view.storage_offset()))


def in_units(tensor: Tensor) -> Tensor:
    """complex128 has two units per element (`torchrl_ext.codecs.units`); every other dtype has one."""
    return torch.view_as_real(tensor) if tensor.is_complex() and tensor.element_size() == 16 else tensor


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One copy that the loader makes: a strided view of a checkpoint tensor into a strided view of a parameter.

    Attributes:
        destination: view of the live parameter, shape ``shape``.
        offset: first element of the source view in the flat checkpoint tensor.
        strides: strides of the source view in the flat checkpoint tensor, one per dimension of ``destination``.
    """

    destination: Tensor
    offset: int
    strides: tuple[int, ...]

    @cached_property
    def place(self) -> Place:
        """Where the view lies on both sides."""
        view = self.destination
        return Place(shape=tuple(view.shape), offset=self.offset, strides=tuple(self.strides), to=tuple(view.stride()))

    @cached_property
    def target(self) -> Tensor:
        """The memory of ``destination``, as `flat` gives it."""
        return flat(self.destination)

    @classmethod
    def of(cls, live: Tensor, landing: Landing) -> Piece:
        """The copy that was recorded as ``landing``, with the live parameter in the place of its stand-in."""
        live = live.detach()
        return cls(
            destination=live.as_strided(landing.shape, landing.strides, live.storage_offset() + landing.offset),
            offset=landing.source_offset,
            strides=landing.source_strides,
        )


def piece_digest(piece: Piece, bits: Tensor, kernels: Kernels | None = None) -> PositionDigest:
    """Position digest of ``bits``, shaped as the piece, at the checkpoint positions of the piece.

    Args:
        piece: says the positions.
        bits: integers.
        kernels: by default those of the device of ``bits``.
    """
    if not bits.numel():
        return PositionDigest()
    place = Place(shape=tuple(bits.shape), offset=piece.offset, strides=tuple(piece.strides), to=tuple(bits.stride()))
    return PositionDigest(*(kernels or kernels_on(bits.device)).words(flat(bits), place))


@dataclass(frozen=True, kw_only=True)
class _Write:
    """``target[offsets] = values``, or ``target[...] = values`` where ``offsets`` is None; integers on one device."""

    kernels: Kernels
    target: Tensor
    offsets: Tensor | None
    values: Tensor

    def parts(self) -> Iterator[_Write]:
        """The same, cut for several threads; torch's copies and programs of a GPU use their own."""
        if self.offsets is None or not self.kernels.on_host:
            yield self
            return
        for offsets, values in zip(self.offsets.split(_SPLIT), self.values.split(_SPLIT), strict=True):
            yield replace(self, offsets=offsets, values=values)

    def make(self) -> None:
        """Write."""
        if self.offsets is None:
            self.target.copy_(self.values, non_blocking=True)
        else:
            self.kernels.scatter(self.target, self.offsets, self.values)


class Staged:
    """Writes that wait for the pause, and the digests of the tensors that they make.

    Args:
        kernels: translate and write; by default those of each parameter's device.
    """

    def __init__(self, kernels: Kernels | None = None) -> None:
        self._kernels = kernels
        self._writes: list[_Write] = []
        self.digests: dict[str, PositionDigest] = {}

    @property
    def elements(self) -> int:
        """Number of runtime elements that will be written."""
        return sum(write.values.numel() for write in self._writes)

    @property
    def nbytes(self) -> int:
        """Memory that the writes hold until they are made, in bytes."""
        tensors = [tensor for write in self._writes for tensor in (write.offsets, write.values) if tensor is not None]
        held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(held.values())

    def add(self, pieces: Sequence[Piece], patch: Patch, digest: PositionDigest) -> None:
        """Translate one tensor's change.

        Args:
            pieces: the copies that the loader makes of the tensor on this rank.
            patch: what changes; steps are resolved against what the parameters hold now.
            digest: position digest of what this rank holds of the tensor now.
        """
        if isinstance(patch, DensePatch):
            digest = self._add_dense(pieces, patch)
        else:
            ordered = unit_of(patch.meta.dtype).ordered if isinstance(patch, StepPatch) else None
            changes = patch.steps if isinstance(patch, StepPatch) else patch.values
            positions, payload = torch.from_numpy(patch.indices), torch.from_numpy(changes).view(BITS[changes.itemsize])
            for piece in pieces:
                chosen = _within(patch.indices, piece.place)
                if chosen.start == chosen.stop:
                    continue
                target, kernels = piece.target, self._kernels or kernels_on(piece.target.device)
                landed = kernels.land(target, piece.place, positions[chosen], payload[chosen], ordered)
                digest = digest.plus(landed.words)
                offsets: Tensor | None = landed.offsets
                values = landed.values
                own = piece.destination.numel() == target.numel()  # nothing between its elements belongs to others
                if own and target.nbytes <= landed.offsets.nbytes + values.nbytes:  # quicker then, and less
                    every = target.clone()
                    kernels.scatter(every, landed.offsets, values)
                    offsets, values = None, every
                if values.numel():
                    self._writes.append(_Write(kernels=kernels, target=target, offsets=offsets, values=values))
        self.digests[patch.meta.name] = digest

    def _add_dense(self, pieces: Sequence[Piece], patch: DensePatch) -> PositionDigest:
        digest, whole = PositionDigest(), as_bits(in_units(patch.tensor())).reshape(-1)
        for piece in pieces:
            target = as_bits(piece.destination)
            values = whole.as_strided(target.shape, piece.strides, piece.offset).to(target.device)
            digest = digest + piece_digest(piece, values, self._kernels)
            kernels = self._kernels or kernels_on(target.device)
            self._writes.append(_Write(kernels=kernels, target=target, offsets=None, values=values))
        return digest

    def commit(self) -> None:
        """Make all writes; the only part that a pause has to cover. Their order does not matter: no two meet."""
        writes, threads = self._writes, min(_THREADS, torch.get_num_threads())
        self._writes = []
        large = [write for write in writes if write.offsets is not None and write.kernels.on_host]
        if threads > 1 and sum(write.values.numel() for write in large) > _SPLIT:
            parts = [part for write in large for part in write.parts()]
            with ThreadPoolExecutor(threads, thread_name_prefix="torchrl-ext-commit") as pool:
                shares = [parts[first :: 4 * threads] for first in range(4 * threads)]
                list(pool.map(lambda share: [part.make() for part in share], shares))
            writes = [write for write in writes if write.offsets is None or not write.kernels.on_host]
        for write in writes:
            write.make()
        for device in {write.target.device for write in writes}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


def _within(positions: np.ndarray, place: Place) -> slice:
    """The positions, increasing, from the first to the last one of a place."""
    if not place.numel:
        return slice(0, 0)
    bounds = np.array([place.offset, place.end], np.int64).astype(positions.dtype)  # else all are converted
    first, end = np.searchsorted(positions, bounds).tolist()
    return slice(first, end)
