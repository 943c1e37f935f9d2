"""Landing sparse changes in place: translated before the pause, written inside it, undone when something is wrong.

A model's loader copies each checkpoint tensor into its runtime parameters piece by piece. Once those copies are known
(`torchrl_ext.landing.placement`), a changed element's checkpoint position says which runtime element to write. So an
update costs what changed, and not what the model weighs, whatever the sharding and fusing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.codecs.patch import DensePatch, Patch, SparsePatch, StepPatch
from torchrl_ext.codecs.units import layout_of
from torchrl_ext.errors import IntegrityError, NotConnectedError
from torchrl_ext.kernels.base import BITS, Kernels, Landed, Place
from torchrl_ext.kernels.select import kernels_on
from torchrl_ext.landing.writes import Copy, Scatter, as_bits, commit, flat
from torchrl_ext.weights.digests import PositionDigest

if TYPE_CHECKING:
    from torchrl_ext.landing.loader import Staging
    from torchrl_ext.landing.placement import Landing
    from torchrl_ext.types import ParamMeta

__all__ = [
    "READ_BACK_VERSIONS",
    "Coverage",
    "Patcher",
    "Piece",
    "Staged",
    "as_bits",
    "compare",
    "holds",
    "identity",
    "piece_digest",
    "read",
]

READ_BACK_VERSIONS = 8
"""Within so many versions that come as changes every tensor is read back from the live bytes once."""


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

    @classmethod
    def of(cls, live: Tensor, landing: Landing) -> Piece:
        """The copy that was recorded as ``landing``, with the live parameter in the place of its stand-in."""
        live = live.detach()
        return cls(
            destination=live.as_strided(landing.shape, landing.strides, live.storage_offset() + landing.offset),
            offset=landing.source_offset,
            strides=landing.source_strides,
        )


class Staged:
    """Writes that wait for the pause, and the digests of the tensors that they make.

    Args:
        kernels: translate and write; by default those of each parameter's device.
    """

    def __init__(self, kernels: Kernels | None = None) -> None:
        self._kernels = kernels
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
            positions, (payload, ordered) = torch.from_numpy(patch.indices), _payload(patch)
            for piece in pieces:
                view = piece.destination
                place = Place(
                    shape=tuple(view.shape), offset=piece.offset, strides=tuple(piece.strides), to=tuple(view.stride())
                )
                chosen = _within(patch.indices, place)
                if chosen.start == chosen.stop:
                    continue
                target = flat(view)
                kernels = self._kernels or kernels_on(target.device)
                landed = kernels.land(target, place, positions[chosen], payload[chosen], ordered)
                digest = digest.plus(landed.words)
                if landed.offsets.numel():
                    self._writes.append(_write(kernels, piece, target, landed))
        self.digests[patch.meta.name] = digest

    def _add_dense(self, pieces: Sequence[Piece], patch: DensePatch) -> PositionDigest:
        tensor, digest = patch.tensor(), PositionDigest()
        whole = as_bits(_in_units(tensor)).reshape(-1)
        for piece in pieces:
            source = whole.as_strided(tuple(piece.destination.shape), piece.strides, piece.offset)
            source = source.to(piece.destination.device)
            digest = digest + piece_digest(piece, source, self._kernels)
            self._writes.append(Copy(destination=as_bits(piece.destination), source=source))
        return digest

    def commit(self) -> None:
        """The writes: the only part that a pause has to cover."""
        commit(self._writes)
        self._writes.clear()


def _payload(patch: SparsePatch | StepPatch) -> tuple[Tensor, bool | None]:
    """What `Kernels.land` takes."""
    if isinstance(patch, StepPatch):
        return torch.from_numpy(patch.steps).view(BITS[patch.steps.itemsize]), layout_of(patch.meta.dtype).ordered
    return patch.bits(), None


def _within(positions: np.ndarray, place: Place) -> slice:
    """The positions, increasing, from the first to the last one of a place."""
    if not place.numel:
        return slice(0, 0)
    bounds = np.array([place.offset, place.end], np.int64).astype(positions.dtype)  # else all are converted
    first, end = np.searchsorted(positions, bounds).tolist()
    return slice(first, end)


def _write(kernels: Kernels, piece: Piece, target: Tensor, landed: Landed) -> Scatter | Copy:
    """Some writes, or where most of a block changes the whole block: that is quicker, and takes less memory."""
    own = piece.destination.numel() == target.numel()  # nothing between its elements belongs to others
    if own and target.numel() * target.element_size() <= landed.offsets.nbytes + landed.values.nbytes:
        source = target.clone()
        kernels.scatter(source, landed.offsets, landed.values)
        return Copy(destination=target, source=source)
    return Scatter(kernels=kernels, target=target, offsets=landed.offsets, values=landed.values)


def holds(pieces: Sequence[Piece], tensor: Tensor) -> bool:
    """Whether the live bytes, read where ``pieces`` say that a checkpoint tensor lands, are its own.

    Args:
        pieces: the copies that the loader makes of the tensor on this rank.
        tensor: the checkpoint tensor; cast to the dtype of the parameter where that is another one.
    """
    for piece in pieces:
        live = piece.destination
        source = tensor.detach().to(live.dtype).contiguous().reshape(-1)
        block = source.as_strided(tuple(live.shape), piece.strides, piece.offset)
        if not torch.equal(as_bits(live), as_bits(block.to(live.device))):
            return False
    return True


def read(meta: ParamMeta, pieces: Sequence[Piece]) -> Tensor:
    """One checkpoint tensor, put together on the host from where it lies, or as it lies there; the pieces have to
    cover it."""
    only = pieces[0].destination
    if len(pieces) == 1 and tuple(only.shape) == meta.shape and only.is_contiguous():
        return only
    found = torch.empty(meta.shape, dtype=meta.dtype)
    flat_bits = as_bits(found).reshape(-1)
    for piece in pieces:
        part = as_bits(piece.destination)
        flat_bits.as_strided(tuple(part.shape), piece.strides, piece.offset).copy_(part)
    return found


Coverage = tuple[PositionDigest, int]
"""Digest of the units of a tensor that a rank holds, and how many these are."""


class Patcher:
    """Changes on their way into one rank's parameters: staged while the model is in use, committed while it is idle.

    Args:
        pieces: for each checkpoint tensor that can be patched the copies that the loader makes of it.
        kernels: as in `Staged`.

    Attributes:
        others: names that change in what was staged last, and cannot be patched.
    """

    def __init__(self, pieces: Mapping[str, Sequence[Piece]], kernels: Kernels | None = None) -> None:
        self.pieces, self._kernels = pieces, kernels
        self._held: dict[str, Coverage] = {}
        self._staged: Staged | None = None
        self.others: set[str] = set()
        self._turns = _turns(pieces)
        self._turn = 0

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
        self._staged, staged = None, Staged(self._kernels)
        self.others = set()
        for patch in changes.patches(self._wanted):
            name = patch.meta.name
            staged.add(self.pieces[name], patch, self._coverage(name)[0])
        self._staged = staged
        return {
            name: (staged.digests.get(name, self._coverage(name)[0]), self._coverage(name)[1]) for name in self.pieces
        }

    def _wanted(self, name: str) -> bool:
        if name in self.pieces:
            return True
        self.others.add(name)
        return False

    @property
    def staged_bytes(self) -> int:
        """Memory that staged changes hold until the commit."""
        return 0 if self._staged is None else self._staged.nbytes

    def drop(self) -> None:
        """Forget what was staged."""
        self._staged = None

    def commit(self) -> None:
        """Write what was staged, and read a part of the tensors back: all of them in `READ_BACK_VERSIONS` turns.

        Raises:
            NotConnectedError: nothing is staged.
            IntegrityError: the parameters hold something else than was written into them; names the tensor.
        """
        if self._staged is None:
            raise NotConnectedError("there are no staged changes", hint="stage them first")
        staged, self._staged = self._staged, None
        digests = {name: (digest, self._coverage(name)[1]) for name, digest in staged.digests.items()}
        staged.commit()
        self._held.update(digests)
        self.read_back(self._turns[self._turn])
        self._turn = (self._turn + 1) % len(self._turns)

    def read_back(self, names: Iterable[str]) -> None:
        """Take digests of these tensors from the live bytes, and hold them against what they should be.

        Raises:
            IntegrityError: names the tensor.
        """
        for name in names:
            expected = self._held.pop(name, None)
            found = self._coverage(name)
            if expected is not None and found != expected:
                raise IntegrityError(
                    f"tensor {name!r} of the engine is not what was written into it",
                    expected=f"digest {expected[0].hex()}, found {found[0].hex()}",
                    state="the engine holds a damaged update and stays paused",
                    hint="send the weights again: the next version comes whole",
                )

    def _coverage(self, name: str) -> Coverage:
        if name not in self._held:
            digest, count = PositionDigest(), 0
            for piece in self.pieces[name]:
                digest = digest + piece_digest(piece, as_bits(piece.destination), self._kernels)
                count += piece.destination.numel()
            self._held[name] = (digest, count)
        return self._held[name]


def _turns(pieces: Mapping[str, Sequence[Piece]]) -> list[list[str]]:
    """The tensors in `READ_BACK_VERSIONS` parts of about the same size; none is empty where there are that many."""
    sizes = {name: sum(piece.destination.nbytes for piece in own) for name, own in pieces.items()}
    turns: list[list[str]] = [[] for _ in range(READ_BACK_VERSIONS)]
    filled = [(0, turn) for turn in range(READ_BACK_VERSIONS)]
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        held, turn = heapq.heappop(filled)
        turns[turn].append(name)
        heapq.heappush(filled, (held + sizes[name], turn))
    return turns


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


def identity(tensors: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
    """The placement of a model that stores its parameters as they are loaded."""
    found = {}
    for name, tensor in tensors.items():
        units = _in_units(tensor)
        found[name] = [Piece(destination=units, offset=0, strides=_contiguous(tuple(units.shape)))]
    return found


def _in_units(tensor: Tensor) -> Tensor:
    """complex128 has two units per element (`torchrl_ext.codecs.units`); every other dtype has one."""
    return torch.view_as_real(tensor) if tensor.is_complex() and tensor.element_size() == 16 else tensor


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
