"""Landing sparse changes in place: translated before the pause, written inside it, undone when something is wrong.

A model's loader copies each checkpoint tensor into its runtime parameters piece by piece. Once those copies are known
(`torchrl_ext.weights.placement`), a changed element's checkpoint position says which runtime element to write. So an
update costs what changed, and not what the model weighs, whatever the sharding and fusing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchrl_ext.codecs.layout import layout_of
from torchrl_ext.codecs.patch import DensePatch, Patch, StepPatch
from torchrl_ext.errors import IntegrityError, NotConnectedError
from torchrl_ext.weights.position_digest import PositionDigest, digest_at

if TYPE_CHECKING:
    from torchrl_ext.weights.loader import Staging

__all__ = ["Coverage", "Patcher", "Piece", "Staged", "as_bits", "compare", "identity", "piece_digest", "stage"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(tensor: Tensor) -> Tensor:
    """The same memory seen as integers of the same width, so that NaN payloads and -0.0 survive every copy."""
    return tensor.detach().view(_BITS[tensor.element_size()])


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


@dataclass(frozen=True, kw_only=True)
class _Scatter:
    """Elements of one parameter that will change: ``flat[offsets] = values``."""

    flat: Tensor
    offsets: Tensor
    values: Tensor

    @property
    def elements(self) -> int:
        return self.offsets.numel()

    def commit(self) -> None:
        self.flat[self.offsets] = self.values


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """A view that changes as a whole."""

    destination: Tensor
    source: Tensor

    @property
    def elements(self) -> int:
        return self.destination.numel()

    def commit(self) -> None:
        self.destination.copy_(self.source)


class Staged:
    """Writes that wait for the pause, and the digests of the tensors that they make."""

    def __init__(self) -> None:
        self._writes: list[_Scatter | _Copy] = []
        self.digests: dict[str, PositionDigest] = {}

    @property
    def elements(self) -> int:
        """Number of runtime elements that will be written."""
        return sum(write.elements for write in self._writes)

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
            for flat, chosen, offsets in stage(pieces, patch.places()):
                old = flat[offsets]
                part = patch.only(chosen if isinstance(chosen, slice) else chosen.cpu().numpy())
                bits = old.cpu().numpy().view(layout_of(patch.meta.dtype).dtype)
                resolved = part.resolve(bits) if isinstance(part, StepPatch) else part
                digest = digest.updated(resolved.indices, bits, resolved.values)
                self._writes.append(_Scatter(flat=flat, offsets=offsets, values=resolved.bits().to(flat.device)))
        self.digests[patch.meta.name] = digest

    def _add_dense(self, pieces: Sequence[Piece], patch: DensePatch) -> PositionDigest:
        tensor, digest = patch.tensor(), PositionDigest()
        whole = as_bits(torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
        for piece in pieces:
            source = whole.as_strided(tuple(piece.destination.shape), piece.strides, piece.offset)
            self._writes.append(_Copy(destination=as_bits(piece.destination), source=source))
            digest = digest + piece_digest(piece, source)
        return digest

    def commit(self) -> None:
        """One indexed write per piece: the only part that a pause has to cover."""
        for write in self._writes:
            write.commit()
        self._writes.clear()


Coverage = tuple[PositionDigest, int]
"""Digest of the units of a tensor that a rank holds, and how many these are."""


class Patcher:
    """Changes on their way into one rank's parameters: staged while the model is in use, committed while it is idle.

    Args:
        pieces: for each checkpoint tensor that can be patched the copies that the loader makes of it.
    """

    def __init__(self, pieces: Mapping[str, Sequence[Piece]]) -> None:
        self.pieces = pieces
        self._held: dict[str, Coverage] = {}
        self._staged: Staged | None = None

    def forget(self) -> None:
        """The parameters were written by somebody else: their digests are taken anew when they are needed."""
        self._held.clear()
        self._staged = None

    def held(self) -> dict[str, Coverage]:
        """What this rank holds now of each tensor, from the bytes."""
        self._held.clear()
        return {name: self._coverage(name) for name in self.pieces}

    def stage(self, changes: Staging) -> dict[str, Coverage]:
        """Translate the changes of the tensors that can be patched.

        Returns:
            What this rank will hold of each tensor, for `compare`.
        """
        self._staged, staged = None, Staged()
        for patch in changes.patches():
            name = patch.meta.name
            if name in self.pieces:
                staged.add(self.pieces[name], patch, self._coverage(name)[0])
        self._staged = staged
        return {
            name: (staged.digests.get(name, self._coverage(name)[0]), self._coverage(name)[1]) for name in self.pieces
        }

    def drop(self) -> None:
        """Forget what was staged."""
        self._staged = None

    def commit(self) -> None:
        """Write what was staged.

        Raises:
            NotConnectedError: nothing is staged.
        """
        if self._staged is None:
            raise NotConnectedError("there are no staged changes", hint="stage them first")
        staged, self._staged = self._staged, None
        digests = {name: (digest, self._coverage(name)[1]) for name, digest in staged.digests.items()}
        staged.commit()
        self._held.update(digests)

    def _coverage(self, name: str) -> Coverage:
        if name not in self._held:
            digest, count = PositionDigest(), 0
            for piece in self.pieces[name]:
                digest = digest + piece_digest(piece, as_bits(piece.destination))
                count += piece.destination.numel()
            self._held[name] = (digest, count)
        return self._held[name]


def compare(found: Mapping[str, PositionDigest], expected: Mapping[str, str]) -> None:
    """Hold what would come out of an update against the trainer's digests.

    Raises:
        IntegrityError: a tensor would not be what the trainer has; names it.
    """
    for name, digest in found.items():
        if name in expected and digest.hex() != expected[name]:
            raise IntegrityError(
                f"tensor {name!r} would not become what the trainer has",
                expected=f"digest {expected[name]}, found {digest.hex()}",
                state="nothing was changed; the engine serves what it served",
                hint="the change was taken against other weights than the engine holds; send again for a full version",
            )


def piece_digest(piece: Piece, bits: Tensor) -> PositionDigest:
    """Position digest of ``bits``, shaped as the piece, at the checkpoint positions of the piece."""
    if _dense(tuple(bits.shape), piece.strides):
        return digest_at(bits.reshape(-1), start=piece.offset)
    positions = torch.full((), piece.offset, dtype=torch.int64)
    for size, stride in zip(bits.shape, piece.strides, strict=True):
        positions = positions[..., None] + torch.arange(size) * stride
    order = positions.reshape(-1)
    return digest_at(bits.reshape(-1), positions=order)


def stage(pieces: Sequence[Piece], positions: Tensor) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
    """Where changed elements of one checkpoint tensor land here.

    Args:
        pieces: the copies that the loader makes of the tensor on this rank.
        positions: int64, shape ``(n,)``, increasing: flat positions in the checkpoint tensor.

    Yields:
        ``(flat, chosen, offsets)`` per piece: the destination as 1-D integers; which of ``positions`` land there (a
        slice or int64 indices); and where.
    """
    for piece in pieces:
        destination = piece.destination
        chosen, offsets = _translate(positions, piece)
        if offsets.numel():
            yield _flat(destination), chosen, offsets


def _flat(view: Tensor) -> Tensor:
    """The memory of ``view`` from its first to its last element, as 1-D integers."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    return as_bits(view.detach().as_strided((reach,), (1,), view.storage_offset()))


def _translate(positions: Tensor, piece: Piece) -> tuple[Tensor | slice, Tensor]:
    shape, strides = tuple(piece.destination.shape), piece.strides
    to = piece.destination.stride()
    numel = piece.destination.numel()
    if numel == 0:
        return slice(0, 0), positions[:0]
    last = piece.offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    bounds = torch.tensor([piece.offset, last + 1], device=positions.device)
    first, end = (int(bound) for bound in torch.searchsorted(positions, bounds))
    rest = positions[first:end] - piece.offset
    if _dense(shape, strides):
        if _dense(shape, to):
            return slice(first, end), rest
        return slice(first, end), _spread(rest, shape, strides, to)[1]
    fits, offsets = _spread(rest, shape, strides, to)
    return fits.nonzero().flatten() + first, offsets[fits]


def _dense(shape: tuple[int, ...], strides: Sequence[int]) -> bool:
    """Whether a view runs through its memory in C order without gaps."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(tuple(strides)), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _spread(rest: Tensor, shape: tuple[int, ...], source: Sequence[int], to: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Coordinates of flat source offsets, and the destination offsets they mean; not all need lie in the view."""
    fits = torch.ones_like(rest, dtype=torch.bool)
    offsets = torch.zeros_like(rest)
    order = sorted((stride, size, step) for size, stride, step in zip(shape, source, to, strict=True) if size != 1)
    for stride, size, step in reversed(order):
        coordinate = torch.div(rest, stride, rounding_mode="floor")
        fits &= coordinate < size
        offsets += coordinate * step
        rest = rest - coordinate * stride
    return fits & (rest == 0), offsets


def identity(tensors: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
    """The placement of a model that stores its parameters as they are loaded."""
    found = {}
    for name, tensor in tensors.items():
        units = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        found[name] = [Piece(destination=units, offset=0, strides=_contiguous(tuple(units.shape)))]
    return found


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
