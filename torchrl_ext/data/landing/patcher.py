"""Landing sparse changes in place: translated and compared with digests before the pause, written inside it.

A model's loader copies each checkpoint tensor into its runtime parameters piece by piece. Once those copies are known
(`torchrl_ext.data.landing.placement`), a changed element's checkpoint position says which runtime element to write. So
an update costs what changed, and not what the model weighs, whatever the sharding and fusing.
"""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchrl_ext.base.devices import download
from torchrl_ext.base.errors import IntegrityError, NotConnectedError
from torchrl_ext.data.deltas.bits import BITS, Kernels, Landed, Piece, Places, Writes
from torchrl_ext.data.deltas.streams import StreamPatch
from torchrl_ext.data.deltas.table import ParamTable, unit_bytes, unit_of
from torchrl_ext.data.deltas.torch_ops import kernels_on
from torchrl_ext.data.weights.digests import PositionDigest, as_digests
from torchrl_ext.data.weights.view import View

if TYPE_CHECKING:
    from torchrl_ext.base.types import ParamMeta
    from torchrl_ext.data.landing.changes import Changes

__all__ = ["READ_BACK_VERSIONS", "Patcher", "Piece", "as_bits", "compare", "holds", "identity", "read"]

READ_BACK_VERSIONS = 8
"""Within so many versions that come as changes every tensor is read back from the live bytes once."""
_LISTED = 1 << 18  # elements of a list on the host, which one thread writes
_LISTED_ON_DEVICE = 1 << 22
_THREADS = 4  # beyond these, memory is what is waited for


class _List(NamedTuple):
    """Values for elements of several tensors, as one list."""

    names: list[str]
    writes: Writes
    kernels: Kernels

    def sums(self) -> Tensor:
        """Return `Kernels.sums` of what is to stand in each tensor."""
        return self.kernels.sums(*self.writes[2:])

    def put(self) -> Tensor:
        """Write, and return the same of what stands there then."""
        return self.kernels.write(self.writes)


class _Copy(NamedTuple):
    """Bits for all of a tensor, 1-D."""

    name: str
    target: Tensor
    values: Tensor
    kernels: Kernels

    @property
    def names(self) -> list[str]:
        """The tensor's, for each part of it."""
        return [self.name] * -(-self.target.numel() // _most(self.kernels))

    def sums(self) -> Tensor:
        """Return what is to stand in each part of the tensor, added up: int64; on a device it may not be done yet."""
        return self._sums(self.values.split(_most(self.kernels)))

    def put(self) -> Tensor:
        """Write, and return the same of what stands there then."""
        parts = (one.split(_most(self.kernels)) for one in (self.target, self.values))
        return self._sums(into.copy_(own) for into, own in zip(*parts, strict=True))  # while both lie in a cache

    def _sums(self, parts: Iterable[Tensor]) -> Tensor:
        pieces = [Piece(destination=part, offset=0, strides=(1,)) for part in parts]
        return self.kernels.words(pieces)[:, 0]


class _Lists:
    """Gathers values for many tensors in a few lists."""

    def __init__(self) -> None:
        self._closed: list[_List] = []
        self._open: dict[tuple[Any, ...], list[tuple[list[str], Writes]]] = {}
        self._counts: dict[tuple[Any, ...], int] = {}

    def add(self, names: list[str], writes: Writes, kernels: Kernels) -> None:
        """Add a list with a run for each name."""
        key = kernels, writes.values.device, writes.values.dtype, writes.offsets.dtype
        self._open.setdefault(key, []).append((names, writes))
        self._counts[key] = self._counts.get(key, 0) + writes.values.numel()
        if self._counts[key] >= _most(kernels):
            self._close(key)

    def close(self) -> list[_List]:
        """Make lists of what was added last, and return all."""
        for key in [*self._open]:
            self._close(key)
        return self._closed

    def _close(self, key: tuple[Any, ...]) -> None:
        self._counts[key] = 0
        names, writes = zip(*self._open.pop(key), strict=True)
        self._closed.append(_List([*chain.from_iterable(names)], Writes.joined(writes), key[0]))


def _most(kernels: Kernels) -> int:
    return _LISTED if kernels.on_host else _LISTED_ON_DEVICE


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_THREADS, torch.get_num_threads()), thread_name_prefix="torchrl-ext-commit")


os.register_at_fork(after_in_child=_threads.cache_clear)  # a child has no threads of its parent


class Share(NamedTuple):
    """What a rank holds of a tensor: how many units, and a number that differs with their places."""

    units: int
    places: int


class _Plan(NamedTuple):
    """Where the segments of a stream lie in this rank's memory on one device.

    Attributes:
        names: the tensor of each piece of ``places``.
        places: the pieces of each segment.
        kernels: read and write them.
    """

    names: list[str]
    places: Places
    kernels: Kernels

    def land(self, every: StreamPatch) -> Landed | None:
        """Return the changes in a range that lie here."""
        stream = every.table.streams[every.stream]
        segments = stream.within(every.start, every.start + every.size)
        firsts = stream.first[segments.start : segments.stop + 1] - every.start
        ordered = unit_of(stream.dtype).ordered if every.steps else None
        own = slice(segments.start, segments.stop)
        return self.kernels.land(self.places, own, firsts, every.positions, every.values, ordered)


class Patcher:
    """Lands changes in one rank's parameters: staged while the model is in use, committed while it is idle.

    Args:
        pieces: for each checkpoint tensor that can be patched the copies that the loader makes of it.
        kernels: translate and write; by default those of each parameter's device.
        held: digests of what this rank has of each tensor, as far as they are known.

    Attributes:
        others: names that change in what was staged last, and cannot be patched.
    """

    def __init__(
        self,
        pieces: Mapping[str, Sequence[Piece]],
        kernels: Kernels | None = None,
        held: Mapping[str, PositionDigest] | None = None,
    ) -> None:
        self.pieces, self._kernels = pieces, kernels
        self._plans: tuple[ParamTable, dict[int, list[_Plan]]] | None = None
        self._held = {name: one for name, one in (held or {}).items() if name in pieces}
        self._staged: dict[str, PositionDigest] | None = None  # of the tensors that change
        self._lists: list[_List] = []  # this and the next wait for the pause
        self._copies: list[_Copy] = []
        self._sums: list[list[int]] = []  # of what the copies and the lists are to write
        self._damage: IntegrityError | None = None  # found while the model was in use; the next commit raises it
        self.others: set[str] = set()
        self._turn = 0

    @functools.cached_property
    def _turns(self) -> list[list[str]]:
        """The tensors that are read back together, in lists of about one size."""
        sizes = {name: sum(piece.destination.nbytes for piece in own) for name, own in self.pieces.items()}
        turns, filled = [list[str]() for _ in range(READ_BACK_VERSIONS)], [0] * READ_BACK_VERSIONS
        for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
            turn = filled.index(min(filled))
            turns[turn].append(name)
            filled[turn] += max(1, sizes[name])
        return turns

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
        for name in names:
            self._held.pop(name, None)
        self._take(names)
        return {name: self._held[name] for name in names}

    def stage(self, changes: Changes) -> dict[str, PositionDigest]:
        """Translate the changes of the tensors that can be patched; steps are resolved against what is held now.

        A part of the tensors is read back first, all of them in `READ_BACK_VERSIONS` turns. Damage is raised by
        `commit`, and not here, where the model is in use and an error means that it serves on.

        Returns:
            The digest of what this rank will hold of each tensor, for `compare`.
        """
        self.drop()
        self.others = set()
        try:
            self.read_back(self._turns[self._turn])
        except IntegrityError as error:
            self._damage = error
        self._turn = (self._turn + 1) % READ_BACK_VERSIONS
        lists, copies = _Lists(), dict[str, list[_Copy]]()
        owners, words = list[str](), list[Tensor]()
        self._take(self.pieces)
        for every in changes.patches(self._wanted):
            for plan in self._plan(every.table, every.stream):
                if (landed := plan.land(every)) is not None:
                    names = [plan.names[run] for run in landed.runs.tolist()]
                    self._add(every, plan, names, landed, lists, copies)
                    owners += names
                    words.append(landed.words)
        self._lists, self._copies, staged = lists.close(), [*chain(*copies.values())], dict[str, PositionDigest]()
        sums = [one.sums() for one in self._copies] + [one.sums() for one in self._lists]
        found = [one.tolist() for one in download([*words, *sums])]  # which waits, as `commit` is on another stream
        for name, added in zip(owners, chain.from_iterable(found[: len(words)]), strict=True):
            staged[name] = (staged[name] if name in staged else self._held[name]).plus(added)
        self._sums, self._staged = found[len(words) :], staged
        held = self._held | staged
        return {name: held[name] for name in self.pieces}

    def _add(
        self,
        every: StreamPatch,
        plan: _Plan,
        names: list[str],
        landed: Landed,
        lists: _Lists,
        copies: dict[str, list[_Copy]],
    ) -> None:
        """Add what landed to the lists, or, where most of a range changes, to copies, which are quicker then and less.

        Args:
            every: the range.
            plan, landed: where its changes lie.
            names: the tensor of each run of these.
            lists, copies: of this version; copies by name.
        """
        stream = every.table.streams[every.stream]
        segments = len(stream.within(every.start, every.start + every.size))
        if 3 * every.positions.size < every.size or every.size < segments << 14:
            lists.add(names, landed.writes, plan.kernels)
            return
        spans = zip(names, landed.runs.tolist(), *landed.spans.T.tolist(), strict=True)
        for number, (name, run, at, last) in enumerate(spans):
            own, piece = landed.writes.run(number), plan.places.pieces[run]
            target, others = piece.memory[at : last + 1], copies.setdefault(name, [])
            fits = piece.straight and target.nbytes <= own.offsets.nbytes + own.values.nbytes
            if fits and not any(_meet(target, one.target) for one in others):
                values = target.clone()  # what other patches change in between is listed, and written later
                plan.kernels.scatter(values, own.offsets - at, own.values)
                others.append(_Copy(name, target, values, plan.kernels))
            else:
                own = own._replace(offsets=own.offsets.clone(), values=own.values.clone())
                lists.add([name], own, plan.kernels)

    def _plan(self, table: ParamTable, stream: int) -> list[_Plan]:
        """Return where the segments of a stream lie, for each device; kept for the last table."""
        if self._plans is None or not self._plans[0].lays_out_as(table):
            self._plans = table, {}
        if stream not in self._plans[1]:
            names = [table.params[param].name for param in table.streams[stream].params.tolist()]
            width = unit_bytes(table.streams[stream].dtype)
            found = defaultdict[torch.device, list[list[Piece]]](lambda: [[] for _ in names])
            for number, name in enumerate(names):
                for piece in self.pieces.get(name, ()):
                    memory = piece.memory
                    if memory.numel() and memory.element_size() == width:
                        found[memory.device][number].append(piece)
            self._plans[1][stream] = [
                _Plan(
                    [name for name, own in zip(names, segments, strict=True) for _ in own],
                    Places(segments),
                    self._kernels or kernels_on(device),
                )
                for device, segments in found.items()
            ]
        return self._plans[1][stream]

    def _wanted(self, name: str) -> bool:
        if name in self.pieces:
            return True
        self.others.add(name)
        return False

    @property
    def staged_bytes(self) -> int:
        """The bytes of memory that staged changes hold until the commit."""
        tensors = [one.values for one in self._copies]
        tensors += [tensor for one in self._lists for tensor in one.writes[1:]]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        return sum(storage.nbytes() for storage in storages.values())

    def drop(self) -> None:
        """Forget what was staged."""
        self._lists, self._copies, self._sums, self._staged = [], [], [], None

    def commit(self) -> None:
        """Write what was staged, and read back what was written; nothing is written where `stage` found damage.

        Raises:
            NotConnectedError: nothing is staged.
            IntegrityError: the parameters hold something else than was written into them; names the tensor.
        """
        if self._staged is None:
            raise NotConnectedError("there are no staged changes", hint="stage them first")
        lists, copies, sums, staged, damage = self._lists, self._copies, self._sums, self._staged, self._damage
        self.drop()
        if damage is not None:
            self.forget()
            raise damage
        found = [one.put() for one in copies]
        if len(lists) > 1 and torch.get_num_threads() > 1 and all(one.kernels.on_host for one in lists):
            found += _threads().map(_List.put, lists)  # no two of them meet
        else:
            found += [one.put() for one in lists]
        self._held.update(staged)
        names = [one.names for one in copies] + [one.names for one in lists]
        for own, stands, should in zip(names, (one.tolist() for one in download(found)), sums, strict=True):
            if stands != should:
                other = next(at for at, (a, b) in enumerate(zip(stands, should, strict=True)) if a != b)
                raise _damaged(own[other], "the bits that were staged, found others")

    def read_back(self, names: Iterable[str]) -> None:
        """Take digests of these tensors from the live bytes, and compare them with what they should be.

        Raises:
            IntegrityError: names the tensor.
        """
        expected = {name: self._held.pop(name) for name in names if name in self._held}
        self._take(names)
        found = {name: self._held[name] for name in expected}
        self._held |= expected
        for name, digest in expected.items():
            if found[name] != digest:
                raise _damaged(name, f"digest {digest.hex()}, found {found[name].hex()}")

    def _take(self, names: Iterable[str]) -> None:
        """Take the digest of what this rank holds of each of these tensors from the bytes, unless it is known."""
        groups: dict[tuple[Kernels, torch.device, int], tuple[list[str], list[Piece]]] = {}
        for name in names:
            if name in self._held:
                continue
            self._held[name] = PositionDigest()
            for piece in self.pieces[name]:
                kernels = self._kernels or kernels_on(piece.memory.device)
                own = groups.setdefault((kernels, piece.memory.device, piece.memory.element_size()), ([], []))
                own[0].append(name)
                own[1].append(piece)
        owners = chain.from_iterable(names for names, _ in groups.values())
        words = [kernels.words(pieces) for (kernels, *_), (_, pieces) in groups.items()]
        for name, added in zip(owners, as_digests(words), strict=True):
            self._held[name] += added


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


def _meet(one: Tensor, other: Tensor) -> bool:
    """Return whether two runs of one memory have an element in common."""
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


def as_bits(tensor: Tensor) -> Tensor:
    """Return the same memory seen as integers of the same width, so that NaN payloads and -0.0 survive every copy."""
    return tensor.detach().view(BITS[tensor.element_size()])


def identity(tensors: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
    """Return the pieces of each tensor of a model that stores its parameters as they are loaded."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.is_complex() and tensor.element_size() == 16:  # of two units per element
            tensor = torch.view_as_real(tensor)
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
