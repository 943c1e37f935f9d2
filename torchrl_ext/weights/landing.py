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
from torchrl_ext.weights.scatter import Copy, Scatter, as_bits, commit, flat, gather

if TYPE_CHECKING:
    from torchrl_ext.weights.loader import Staging

__all__ = ["Coverage", "Patcher", "Piece", "Staged", "as_bits", "compare", "identity", "piece_digest", "stage"]


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


class Staged:
    """Writes that wait for the pause, and the digests of the tensors that they make."""

    def __init__(self) -> None:
        self._writes: list[Scatter | Copy] = []
        self.digests: dict[str, PositionDigest] = {}

    @property
    def elements(self) -> int:
        """Number of runtime elements that will be written."""
        return sum(write.elements for write in self._writes)

    @property
    def nbytes(self) -> int:
        """Memory that the writes hold until they are made, in bytes."""
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for w in self._writes for t in w.tensors}
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
            for piece, chosen, offsets in stage(pieces, torch.from_numpy(patch.indices)):
                target = flat(piece.destination)
                old = gather(target, offsets).numpy().view(layout_of(patch.meta.dtype).dtype)
                part = patch.only(chosen if isinstance(chosen, slice) else chosen.numpy())
                resolved = part.resolve(old) if isinstance(part, StepPatch) else part
                digest = digest.updated(resolved.indices, old, resolved.values)
                self._writes.append(_write(piece, target, offsets, resolved.bits()))
        self.digests[patch.meta.name] = digest

    def _add_dense(self, pieces: Sequence[Piece], patch: DensePatch) -> PositionDigest:
        tensor, digest = patch.tensor(), PositionDigest()
        whole = as_bits(_in_units(tensor)).reshape(-1)
        for piece in pieces:
            source = whole.as_strided(tuple(piece.destination.shape), piece.strides, piece.offset)
            digest = digest + piece_digest(piece, source)
            self._writes.append(
                Copy(destination=as_bits(piece.destination), source=source.to(piece.destination.device))
            )
        return digest

    def commit(self) -> None:
        """The writes: the only part that a pause has to cover."""
        commit(self._writes)
        self._writes.clear()


def _write(piece: Piece, target: Tensor, offsets: Tensor, values: Tensor) -> Scatter | Copy:
    """Some writes, or where most of a block changes the whole block: that is quicker, and takes less memory."""
    own = piece.destination.numel() == target.numel()  # nothing between its elements belongs to others
    if own and target.numel() * target.element_size() <= offsets.nbytes + values.nbytes:
        source = target.cpu().clone() if target.device.type == "cpu" else target.cpu()
        Scatter(target=source, offsets=offsets, values=values).commit()
        return Copy(destination=target, source=source.to(target.device))
    if target.device.type != "cpu":
        offsets, values = offsets.to(target.device, torch.int64), values.to(target.device)
    return Scatter(target=target, offsets=offsets, values=values)


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

    @property
    def staged_bytes(self) -> int:
        """Memory that staged changes hold until the commit."""
        return 0 if self._staged is None else self._staged.nbytes

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


def stage(pieces: Sequence[Piece], positions: Tensor) -> Iterable[tuple[Piece, Tensor | slice, Tensor]]:
    """Where changed elements of one checkpoint tensor land here.

    Args:
        pieces: the copies that the loader makes of the tensor on this rank.
        positions: int32 or int64, shape ``(n,)``, increasing: flat positions in the checkpoint tensor.

    Yields:
        ``(piece, chosen, offsets)``: which of ``positions`` land there (a slice or int64 indices); and where, counted
        in elements from the first one of the destination. Offsets are int32 where the destination's reach allows.
    """
    for piece in pieces:
        chosen, offsets = _translate(positions, piece)
        if offsets.numel():
            yield piece, chosen, offsets


def _translate(positions: Tensor, piece: Piece) -> tuple[Tensor | slice, Tensor]:
    shape, strides = tuple(piece.destination.shape), piece.strides
    to = piece.destination.stride()
    if piece.destination.numel() == 0:
        return slice(0, 0), positions[:0]
    last = piece.offset + _reach(shape, strides)
    bounds = torch.tensor([piece.offset, last], dtype=positions.dtype)
    first, end = (int(bound) for bound in torch.searchsorted(positions, bounds))
    rest = positions[first:end]
    if piece.offset:
        rest = rest - piece.offset
    if _dense(shape, strides) and _dense(shape, to):
        return slice(first, end), _narrowed(rest, last - piece.offset)
    fits, offsets = _spread(rest.to(torch.int64), shape, strides, to)
    offsets = _narrowed(offsets, _reach(shape, to))
    if _dense(shape, strides):
        return slice(first, end), offsets
    return fits.nonzero().flatten() + first, offsets[fits]


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one of a view."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _narrowed(offsets: Tensor, reach: int) -> Tensor:
    """int32 where that can count to ``reach``: half the memory to read in the pause."""
    return offsets.to(torch.int32 if reach <= 2**31 - 1 else torch.int64)


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
        units = _in_units(tensor)
        found[name] = [Piece(destination=units, offset=0, strides=_contiguous(tuple(units.shape)))]
    return found


def _in_units(tensor: Tensor) -> Tensor:
    """complex128 has two units per element (`torchrl_ext.codecs.layout`); every other dtype has one."""
    return torch.view_as_real(tensor) if tensor.is_complex() and tensor.element_size() == 16 else tensor


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
