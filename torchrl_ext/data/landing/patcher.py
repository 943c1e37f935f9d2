"""Landing sparse changes in place: translated and compared with digests while the model is in use, exchanged in one go.

A model's loader copies each checkpoint tensor into its runtime parameters piece by piece. Once those copies are known
(`torchrl_ext.data.landing.placement`), a changed element's checkpoint position says which runtime element to write. So
an update costs what changed, and not what the model weighs, whatever the sharding and fusing.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_ext.base.devices import download
from torchrl_ext.base.errors import IntegrityError, NotConnectedError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.deltas.bits import BITS, Kernels, Piece, Places, Range, Writes
from torchrl_ext.data.deltas.streams import StreamPatch
from torchrl_ext.data.deltas.table import ParamTable, unit_of
from torchrl_ext.data.deltas.torch_ops import kernels_on, sums
from torchrl_ext.data.weights.digests import PositionDigest, as_digests
from torchrl_ext.data.weights.view import View

__all__ = ["READ_BACK_VERSIONS", "Changes", "Patcher", "Piece", "as_bits", "compare", "holds", "identity", "read"]

READ_BACK_VERSIONS = 8
"""Within so many versions that come as changes every tensor is read back from the live bytes once."""
_LISTED = 1 << 18  # elements from which on a list is written alone: by one thread of the host, by a few calls elsewhere
_THREADS = 4  # beyond these, memory is what is waited for


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The changes that lead a model from one version to another, merged so that no element occurs twice.

    Attributes:
        patches: iterates once over the changes. It takes a function that says whether a changed tensor is wanted, and
            skips blocks without a wanted tensor; other blocks may include changes of unwanted tensors.
        digests: digest of every tensor after the changes, 32 hex digits, by name.
        whole: returns the named tensors as they are after the changes, for tensors that are not patchable.
        held, reached: run id and number of the first and the last version.
        params: every parameter of the model, in order.
    """

    patches: Callable[[Callable[[str], bool]], Iterator[StreamPatch]]
    digests: Mapping[str, str]
    whole: Callable[[Iterable[str]], Iterator[tuple[str, Tensor]]]
    held: tuple[str, int] = ("", 0)
    reached: tuple[str, int] = ("", 0)
    params: tuple[ParamMeta, ...] = ()


class Share(NamedTuple):
    """What a rank holds of a tensor: how many units, and a number that differs with their places."""

    units: int
    places: int


def _joined(lists: Iterable[Writes]) -> Iterator[Writes]:
    """Yield the same in longer lists."""
    waiting, count = list[Writes](), 0

    def kind(one: Writes) -> tuple[object, ...]:
        return one.values.device, one.values.dtype, one.offsets.dtype

    for one in chain(lists, [None]):
        if waiting and (one is None or count >= _LISTED or kind(one) != kind(waiting[0])):
            names, targets, addresses, ends, *rest = zip(*waiting, strict=True)
            starts = accumulate((writes.values.numel() for writes in waiting), initial=0)
            shifted = torch.cat([end + start for end, start in zip(ends, starts, strict=False)])
            tables = torch.cat(addresses), shifted, *map(torch.cat, rest)
            yield Writes([*chain.from_iterable(names)], [*chain.from_iterable(targets)], *tables)
            waiting, count = [], 0
        if one is not None:
            waiting.append(one)
            count += one.values.numel()


class Patcher:
    """Lands changes in one rank's parameters: staged while the model is in use, committed between two steps of it.

    A commit exchanges what was staged with what the parameters held, so that the same memory leads back (`undo`).

    Args:
        pieces: for each checkpoint tensor that can be patched the copies that the loader makes of it.
        kernels: translate and write; by default those of each parameter's device.

    Attributes:
        others: names that change in what was staged last, and cannot be patched.
    """

    def __init__(self, pieces: Mapping[str, Sequence[Piece]], kernels: Kernels | None = None) -> None:
        self.pieces, self._kernels = pieces, kernels
        self._places: tuple[ParamTable, dict[int, list[Places]]] | None = None  # by stream of the last table
        self._held: dict[str, PositionDigest] = {}  # of what this rank has of each tensor, as far as they are known
        self._staged: dict[str, PositionDigest] | None = None  # of the tensors that change
        self._lists: list[Writes] = []  # this and the next wait for the commit, and after it for an undo
        self._sums: list[list[int]] = []  # of the lists
        self._stood: dict[str, PositionDigest] | None = None  # of the tensors that changed, before the commit
        self._damage: IntegrityError | None = None  # found while the model was in use; the next commit raises it
        self.others: set[str] = set()
        self._turn = 0

    @functools.cached_property
    def _by_size(self) -> list[str]:
        sizes = {name: sum(piece.destination.nbytes for piece in own) for name, own in self.pieces.items()}
        return sorted(sizes, key=sizes.__getitem__, reverse=True)

    @functools.cached_property
    def shares(self) -> Mapping[str, Share]:
        """What this rank holds of each tensor; made once, as many names take long."""
        return {name: _share(own) for name, own in self.pieces.items()}

    def forget(self) -> None:
        """Forget what is known of the parameters, which something else wrote; digests are taken anew when needed."""
        self._held.clear()
        self._damage = None
        self.drop()

    def digests_of_memory(self, names: Iterable[str] | None = None) -> dict[str, PositionDigest]:
        """Return the digest of what this rank holds now of each of these tensors, by default of all, from the bytes."""
        names = [*(self.pieces if names is None else names)]
        found = dict.fromkeys(names, PositionDigest())
        groups = defaultdict[tuple[torch.device, int], tuple[list[str], list[Piece]]](lambda: ([], []))
        for name in names:
            for piece in self.pieces[name]:
                owners, pieces = groups[piece.memory.device, piece.memory.element_size()]
                owners.append(name)
                pieces.append(piece)
        words = [self._on(device).words(pieces) for (device, _), (_, pieces) in groups.items()]
        for name, added in zip(chain.from_iterable(own for own, _ in groups.values()), as_digests(words), strict=True):
            found[name] += added
        self._held |= found
        return found

    def stage(self, changes: Changes) -> dict[str, PositionDigest]:
        """Translate the changes of the tensors that can be patched; steps are resolved against what is held now.

        A part of the tensors is read back first, all of them in `READ_BACK_VERSIONS` turns. Damage is raised by
        `commit`, and not here, where the model is in use and an error means that it serves on.

        Returns:
            The digest of what this rank will hold of each tensor, for `compare`.
        """
        self.drop()
        self.others = set()
        held = self._held.copy()
        again = [name for name in self._by_size[self._turn :: READ_BACK_VERSIONS] if name in held]
        self._turn = (self._turn + 1) % READ_BACK_VERSIONS
        for name, digest in self.digests_of_memory(again).items():
            if digest != held[name]:
                self._damage = _damaged(name, f"digest {held[name].hex()}, found {digest.hex()}")
        self._held |= held
        self.digests_of_memory(name for name in self.pieces if name not in self._held)
        lists, staged = [*_joined(self._landed(changes))], dict[str, PositionDigest]()
        numbers = [*(one.words for one in lists), *(one.sums for one in lists)]
        found = [one.tolist() for one in download(numbers)]  # which waits, as `commit` is on another stream
        for one, words in zip(lists, found, strict=False):
            for name, added in zip(one.names, words, strict=True):
                staged[name] = (staged[name] if name in staged else self._held[name]) + added
        self._lists, self._sums, self._staged = lists, found[len(lists) :], staged
        return self._held | staged

    def _landed(self, changes: Changes) -> Iterator[Writes]:
        """Yield what is to be written for each range that changes on each device."""
        for every in changes.patches(self._wanted):
            stream = every.table.streams[every.stream]
            segments = stream.within(every.start, every.start + every.size)
            firsts = stream.first[segments.start : segments.stop + 1] - every.start
            ordered = unit_of(stream.dtype).ordered if every.steps else None
            own = Range(segments, firsts, every.positions, every.values, ordered)
            for places in self._places_of(every.table, every.stream):
                if (writes := self._on(places.pieces[0].memory.device).land(places, own)) is not None:
                    yield writes

    def _places_of(self, table: ParamTable, stream: int) -> list[Places]:
        """Return where the segments of a stream lie, on each device."""
        if self._places is None or not self._places[0].lays_out_as(table):
            self._places = table, {}
        if stream not in self._places[1]:
            names = [table.params[param].name for param in table.streams[stream].params.tolist()]
            width = table.streams[stream].dtype.itemsize
            found = defaultdict[torch.device, list[list[Piece]]](lambda: [[] for _ in names])
            for number, name in enumerate(names):
                for piece in self.pieces.get(name, ()):
                    if piece.memory.numel() and piece.memory.element_size() == width:
                        found[piece.memory.device][number].append(piece)
            self._places[1][stream] = [Places(segments, names) for segments in found.values()]
        return self._places[1][stream]

    def _on(self, device: torch.device) -> Kernels:
        return self._kernels or kernels_on(device)

    def _wanted(self, name: str) -> bool:
        if name in self.pieces:
            return True
        self.others.add(name)
        return False

    def drop(self) -> None:
        """Forget what was staged, and give up the way back from what was committed."""
        self._lists, self._sums, self._staged, self._stood = [], [], None, None

    def keep(self) -> None:
        """Give up the way back from what was committed."""
        if self._staged is None:
            self.drop()

    def commit(self) -> None:
        """Write what was staged, and read back what was written; nothing is written where `stage` found damage.

        Raises:
            NotConnectedError: nothing is staged.
            IntegrityError: the parameters hold something else than was written into them; names the tensor.
        """
        if self._staged is None:
            raise NotConnectedError("there are no staged changes", hint="stage them first")
        if (damage := self._damage) is not None:
            self.forget()
            raise damage
        staged, self._staged = self._staged, None
        self._stood = {name: self._held[name] for name in staged}
        self._exchange(staged)

    def undo(self) -> None:
        """Write back what the last `commit` replaced, and read it back.

        Raises:
            NotConnectedError: the way back was given up, or nothing was committed.
            IntegrityError: the parameters hold something else than before that commit; names the tensor.
        """
        if self._stood is None:
            raise NotConnectedError("what the last changes replaced is not known", hint="send the weights again")
        try:
            self._sums = [one.tolist() for one in download([sums(writes) for writes in self._lists])]
            self._exchange(self._stood)
        finally:
            self.drop()

    def _exchange(self, digests: Mapping[str, PositionDigest]) -> None:
        """Exchange the lists with what the parameters hold, which has ``digests`` from then on."""
        lists = self._lists
        threads = min(_THREADS, torch.get_num_threads(), len(lists))
        if threads > 1 and all(self._on(writes.values.device).on_host for writes in lists):
            with ThreadPoolExecutor(threads) as pool:
                found = [*pool.map(self._put, lists)]  # no two of them meet
        else:
            found = [*map(self._put, lists)]
        self._held.update(digests)
        for writes, stands, should in zip(lists, (one.tolist() for one in download(found)), self._sums, strict=True):
            if stands != should:
                rows = zip(writes.names, stands, should, strict=True)
                other = next(name for name, one, two in rows if one != two)
                raise _damaged(other, "the bits that were written, found others")

    def _put(self, writes: Writes) -> Tensor:
        return self._on(writes.values.device).exchange(writes)


def _share(pieces: Sequence[Piece]) -> Share:
    places = tuple((one.offset, tuple(one.destination.shape), one.strides) for one in pieces)
    return Share(sum(piece.destination.numel() for piece in pieces), hash(places))


def _damaged(name: str, expected: str) -> IntegrityError:
    return IntegrityError(
        f"tensor {name!r} of the engine differs from what was written into it",
        expected=expected,
        state="the engine holds a damaged update and stays paused",
        hint="send the weights again: the next version is a full one",
    )


def as_bits(tensor: Tensor) -> Tensor:
    """Return the same memory seen as integers of the same width, so that NaN payloads and -0.0 survive every copy."""
    return tensor.detach().view(BITS[tensor.element_size()])


def identity(tensors: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
    """Return the pieces of each tensor of a model that stores its parameters as they are loaded."""
    found = {}
    for name, tensor in tensors.items():
        strides = tensor.stride() if tensor.is_contiguous() else View.whole(tensor.shape).strides
        found[name] = [Piece(destination=tensor, offset=0, strides=strides)]
    return found


def compare(found: Mapping[str, PositionDigest], expected: Mapping[str, str]) -> None:
    """Compare what would come out of an update with the trainer's digests.

    Raises:
        IntegrityError: a tensor would not be what the trainer has; names it.
    """
    for name, digest in found.items():
        if name in expected and digest.hex() != expected[name]:
            raise IntegrityError(
                f"tensor {name!r} would differ from the trainer's after the change",
                expected=f"digest {expected[name]}, found {digest.hex()}",
                state="nothing was changed; the engine still serves its previous weights",
                hint="the change builds on weights that the engine does not hold; send again for a full version",
            )


def holds(pieces: Sequence[Piece], tensor: Tensor) -> bool:
    """Return whether the live bytes, read where ``pieces`` say that a checkpoint tensor lands, are its own.

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
    """Return a checkpoint tensor on its device, put together from pieces that cover it, or the one piece as it lies."""
    only = pieces[0].destination
    if len(pieces) == 1 and tuple(only.shape) == meta.shape and only.is_contiguous():
        return only
    found = torch.empty(meta.shape, dtype=meta.dtype, device=only.device)
    flat = as_bits(found).reshape(-1)
    for piece in pieces:
        part = as_bits(piece.destination)
        flat.as_strided(tuple(part.shape), piece.strides, piece.offset).copy_(part)
    return found
