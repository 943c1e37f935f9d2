"""Landing sparse changes in place: translated before the pause, written inside it, undone when something is wrong.

A model's loader copies each checkpoint tensor into its runtime parameters piece by piece. Once those copies are known
(`torchrl_ext.landing.placement`), a changed element's checkpoint position says which runtime element to write. So an
update costs what changed, and not what the model weighs, whatever the sharding and fusing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchrl_ext.errors import IntegrityError, NotConnectedError
from torchrl_ext.kernels.base import Kernels
from torchrl_ext.landing.writes import Piece, Staged, as_bits, in_units, piece_digest
from torchrl_ext.weights.digests import PositionDigest

if TYPE_CHECKING:
    from torchrl_ext.landing.loader import Changes
    from torchrl_ext.types import ParamMeta

__all__ = ["READ_BACK_VERSIONS", "Coverage", "Patcher", "Piece", "compare", "holds", "identity", "read"]

READ_BACK_VERSIONS = 8
"""Within so many versions that come as changes every tensor is read back from the live bytes once."""


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

    def stage(self, changes: Changes) -> dict[str, Coverage]:
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


def identity(tensors: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
    """The placement of a model that stores its parameters as they are loaded."""
    found = {}
    for name, tensor in tensors.items():
        units = in_units(tensor)
        strides = torch.empty(units.shape, device="meta").stride()
        found[name] = [Piece(destination=units, offset=0, strides=strides)]
    return found
