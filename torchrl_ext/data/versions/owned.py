"""What a trainer rank owns of the newest version: whole parameters, which it compares, codes and writes by itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import final

import msgspec
import numpy as np
import torch
from torch import Tensor

from torchrl_ext.base.devices import pinned_memory, settle
from torchrl_ext.base.errors import ConfigError
from torchrl_ext.base.types import Count, Info, ParamMeta, Wire
from torchrl_ext.data.deltas.bits import flat_bits
from torchrl_ext.data.deltas.blocks import BlockEncoding
from torchrl_ext.data.deltas.streams import find, worker_threads
from torchrl_ext.data.deltas.table import ParamTable
from torchrl_ext.data.stores.manifest import DIGEST, FilePlace
from torchrl_ext.data.stores.store import Draft, Store
from torchrl_ext.data.versions.full import FullWriter
from torchrl_ext.data.versions.kept import KeptTensors
from torchrl_ext.data.versions.payloads import DeltaFiles
from torchrl_ext.data.weights.checkpoint import CheckpointSource
from torchrl_ext.data.weights.digests import Digests, PositionDigest
from torchrl_ext.data.weights.gather import Gather, Holding
from torchrl_ext.data.weights.source import WeightSource, checked

__all__ = ["FlatCopies", "Owned", "Written", "steps"]

_TOGETHER = 64 << 20  # bytes that come from an accelerator at once
_KEPT = "tensors"  # stands where a manifest names a file


class Written(Wire, frozen=True, kw_only=True):
    """What one rank wrote of a version.

    Attributes:
        kinds: names of what the delta is coded with.
        files: bytes of the delta's files.
        blocks: of dtype `BLOCK`, with numbers of these kinds and files.
        changed: uint64, shape (parameters,): units that changed.
        digests: uint64, shape (parameters, 2): of the parameters that the rank owns; 0 elsewhere.
        tensors, sizes: of the full version (`FullWriter.write_tensors`).
    """

    kinds: tuple[str, ...] = ()
    files: dict[str, Count] = msgspec.field(default_factory=dict)
    blocks: bytes = b""
    changed: bytes = b""
    digests: bytes
    tensors: dict[str, FilePlace] = msgspec.field(default_factory=dict)
    sizes: dict[str, Count] = msgspec.field(default_factory=dict)


@final
class FlatCopies:
    """Host memory for streams of a table: one flat tensor for each.

    Args:
        table: has the streams.
        pinned: in pinned memory.
        owned: numbers of the streams that have memory; None for all.

    Attributes:
        table: has the streams.
        bits: of each stream, 1-D; empty without memory.
        parts: views of each stream's segments, of their shapes.
    """

    def __init__(self, table: ParamTable, *, pinned: bool = False, owned: Collection[int] | None = None) -> None:
        self.table = table
        self.bits: list[Tensor] = []
        self.parts: list[list[Tensor]] = []
        for number, stream in enumerate(table.streams):
            if owned is not None and number not in owned:
                self.bits.append(torch.empty(0))
                self.parts.append([])
                continue
            nbytes = stream.size * stream.dtype.itemsize
            flat = (pinned_memory(nbytes) if pinned else torch.empty(nbytes, dtype=torch.uint8)).view(stream.dtype)
            metas = [table.params[param] for param in stream.params.tolist()]
            parts = flat.split([meta.numel for meta in metas])
            # most of very many parts have one dimension, and are of their shape
            self.parts.append(
                [one if len(meta.shape) == 1 else one.view(meta.shape) for one, meta in zip(parts, metas, strict=True)]
            )
            self.bits.append(flat_bits(flat))

    @property
    def nbytes(self) -> int:
        """The bytes of all streams."""
        return sum(bits.nbytes for bits in self.bits)

    def by_name(self) -> dict[str, Tensor]:
        """Return the parts by the names of their parameters."""
        streams = zip(self.table.streams, self.parts, strict=True)
        rows = ((param, part) for stream, own in streams for param, part in zip(stream.params, own, strict=False))
        return {self.table.params[param].name: part for param, part in rows}


@final
class Owned:
    """Copies of the parameters that this rank owns, as they are in the newest version: what deltas are taken against.

    They are on the host, pinned where the tensors are on an accelerator.

    While a version is being written they are neither the old one nor the new one, and stay so when the attempt fails;
    rank 0 knows it, and has every rank write a full version next.

    Args:
        codec: the encoding of deltas.
        full: writes full versions, or keeps their tensors.

    Attributes:
        codec, full: as given.
        table: all parameters, and the streams of their deltas: each has parameters of one owner.
        digests: uint64, shape (parameters, 2): of those that this rank owns; 0 elsewhere.
    """

    def __init__(self, codec: BlockEncoding, full: FullWriter | KeptTensors) -> None:
        self.codec, self.full = codec, full
        self.table = ParamTable.of(())
        self.digests = np.zeros((0, 2), DIGEST)
        self._params: tuple[ParamMeta, ...] = ()
        self._held: Holding | None = None  # None without other ranks
        self._gather: Gather | None = None
        self._copies: FlatCopies | None = None
        self._alone: bool | None = None  # how the parameters were shared out; None before
        self._rank, self._owners, self._own = 0, 1, list[int]()

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return 0 if self._copies is None else self._copies.nbytes

    @property
    def held(self) -> Holding:
        """What this rank holds, since `look`."""
        assert self._held is not None
        return self._held

    def look(self, source: WeightSource, *, alone: bool = False) -> bool:
        """Look at what this rank holds now; return whether the parameters are shared out for it.

        Args:
            source: what is sent.
            alone: there are no other ranks, so this one gathers nothing, and its blocks may be any.
        """
        before, self._params = self._params, source.params()
        if alone:
            self._held, same = None, before == self._params
        else:
            self._held = Holding(source, self._held)
            same = self._held.same
        return same and alone is self._alone

    def share(self, held: Sequence[Info], rank: int, owners: int, timeout_s: float) -> None:
        """Share the parameters out, and forget every copy.

        Args:
            held: what every rank holds (`Holding.to_json`); nothing without other ranks.
            rank: this one.
            owners: as many ranks own parameters.
            timeout_s: of each wait for another rank.

        Raises:
            ManifestError: as `Gather`.
        """
        params, streams = self._params, dict[tuple[int, torch.dtype], list[int]]()
        self._alone, self._copies, self.digests = None, None, np.zeros((len(params), 2), DIGEST)
        self._gather = Gather(params, held, rank, owners, timeout_s) if held else None
        self._owned_by = [0] * len(params) if self._gather is None else self._gather.owners
        for number, (owner, meta) in enumerate(zip(self._owned_by, params, strict=True)):
            streams.setdefault((owner, meta.dtype), []).append(number)
        order = sorted(streams, key=lambda one: one[0])
        self.table = ParamTable.of(params, [streams[one] for one in order])
        self._streams = {number for number, (owner, _) in enumerate(order) if owner == rank}
        self._rank, self._owners, self._own = rank, owners, self._of(rank)
        self._alone = not held

    def start(self, base: str) -> Written:
        """Copy the own parameters from a checkpoint directory, as if this rank had written that.

        Raises:
            ConfigError: it lacks one of them, or has another one under its name.
        """
        checkpoint, number = CheckpointSource(base), self.table.number
        found = {meta.name: meta for meta in checkpoint.params()}
        own = {self.table.params[param].name: param for param in self._own}
        for name, param in own.items():
            if found.get(name) != (meta := self.table.params[param]):
                raise ConfigError(
                    f"the base checkpoint holds {found.get(name, f'no {name}')}",
                    expected=str(meta),
                    hint="pass as base= the checkpoint from which this policy was loaded, or nothing",
                )
        for _ in self._copied((number[meta.name], tensor) for meta, tensor in checked(checkpoint) if meta.name in own):
            pass
        return Written(digests=self.digests.tobytes())

    def write(self, source: WeightSource, draft: Draft | None, *, delta: bool, keyframe: bool) -> Written:
        """Gather, compare, code and write what this rank owns; the copies become what ``source`` has now.

        Where a part of the source alone may have changed (`WeightSource.part`), nothing else is looked at.

        Args:
            source: what is sent, at which `look` looked.
            draft: of the version; None for a rank that owns nothing, in a store that takes files of one process.
            delta: it has a delta on the version before.
            keyframe: it is a full one.

        Raises:
            ManifestError: the source does not yield what it declares, on this rank.
            TransportError: another rank is gone.
        """
        params, part = self.table.params, source.part

        def wanted(param: int) -> bool:
            return not delta or part is None or params[param].name in part.names

        if self._rank >= self._owners:
            for _ in self._tensors(source, wanted):
                pass
            return Written(changed=np.zeros(len(params), DIGEST).tobytes(), digests=self.digests.tobytes())
        assert draft is not None
        if not delta:
            with closing(self._tensors(source)) as tensors:
                placed, sizes = self._keyframe(draft, self._copied(tensors))
            return Written(digests=self.digests.tobytes(), tensors=placed, sizes=sizes)

        with closing(self._tensors(source, wanted)) as tensors:
            written = self._delta(tensors, draft)
        if keyframe:
            copies = {} if self._copies is None else self._copies.by_name()
            placed, sizes = self._keyframe(draft, ((params[one], copies[params[one].name]) for one in self._own))
            written = msgspec.structs.replace(written, tensors=placed, sizes=sizes)
        return written

    def _tensors(
        self, source: WeightSource, wanted: Callable[[int], bool] = lambda param: True
    ) -> Generator[tuple[int, Tensor], None, None]:
        """Return the generator of `Gather.tensors`; without other ranks, that of the source's own tensors."""
        if self._gather is None:
            return _numbered(source, self.table, wanted)
        return self._gather.tensors(self.held.dropped(), wanted)

    def _of(self, rank: int) -> list[int]:
        """Return the numbers of the parameters that a rank owns, in order."""
        return [param for param, owner in enumerate(self._owned_by) if owner == rank]

    def _keyframe(
        self, draft: Draft, pairs: Iterator[tuple[ParamMeta, Tensor]]
    ) -> tuple[dict[str, FilePlace], dict[str, int]]:
        if isinstance(self.full, KeptTensors):
            self.full.tensors = {meta.name: tensor for meta, tensor in pairs}
            nbytes = sum(tensor.nbytes for tensor in self.full.tensors.values())
            placed, sizes = dict.fromkeys(self.full.tensors, (_KEPT, "")), {_KEPT: nbytes}
        else:
            owned = [[self.table.params[one] for one in self._of(rank)] for rank in range(self._owners)]
            placed, sizes = self.full.write_tensors(draft, owned, self._rank, pairs)
        number = self.table.number
        digests = {name: PositionDigest(*self.digests[number[name]].tolist()) for name in placed}
        return {name: (file, checksum or digests[name].hex()) for name, (file, checksum) in placed.items()}, sizes

    def _delta(self, tensors: Iterable[tuple[int, Tensor]], draft: Draft) -> Written:
        """Find, code and write what changed; the copies follow."""
        streams, segments = self.table.place
        olds = [] if self._copies is None else self._copies.bits
        placed = ((streams[param], segments[param], tensor) for param, tensor in tensors)
        made = DeltaFiles(self.table, self.codec, self._rank, self._owners)
        with closing(find(self.table, olds, placed, made.code, threads=_threads(), follow=True)) as blocks:
            for name, data in made.files(blocks):
                draft.write(name, data)
        self.digests = self.digests + made.words
        return Written(
            kinds=tuple(made.kinds),
            files=made.sizes,
            blocks=made.rows.tobytes(),
            changed=made.changed.tobytes(),
            digests=self.digests.tobytes(),
        )

    def _copied(self, tensors: Iterable[tuple[int, Tensor]]) -> Iterator[tuple[ParamMeta, Tensor]]:
        """Copy tensors as they come, and yield the copies; `digests` are those of the copies when all have come."""
        (streams, segments), params, number = self.table.place, self.table.params, self.table.number
        taken, coming, nbytes = Digests(), list[tuple[ParamMeta, Tensor]](), 0
        devices = set[torch.device]()
        for param, tensor in tensors:
            away = tensor.device.type != "cpu"
            if self._copies is None:
                self._copies = FlatCopies(self.table, pinned=away, owned=self._streams)
            copy = self._copies.parts[streams[param]][segments[param]]
            copy.copy_(tensor, non_blocking=True)
            taken.add(params[param].name, tensor if away else copy)
            coming.append((params[param], copy))
            devices.add(tensor.device)
            nbytes += tensor.nbytes
            if not away or nbytes >= _TOGETHER:  # a wait for each would take longer than many copies
                settle(devices)
                yield from coming
                coming, nbytes = [], 0
        settle(devices)
        yield from coming
        own = {number[name]: digest for name, digest in taken.found().items()}
        self.digests = np.zeros((len(params), 2), DIGEST)
        self.digests[[*own]] = np.array([*own.values()], DIGEST).reshape(-1, 2)


def _numbered(
    source: WeightSource, table: ParamTable, wanted: Callable[[int], bool]
) -> Generator[tuple[int, Tensor], None, None]:
    chosen = [meta for number, meta in enumerate(table.params) if wanted(number)]
    every = len(chosen) == len(table.params)
    pairs = iter(source) if every else source.pairs({meta.name for meta in chosen})
    for meta, tensor in checked(pairs, chosen):
        yield table.number[meta.name], tensor


def steps(
    own: Owned, source: WeightSource, store: Store, rank: int, base: str | None, timeout_s: float
) -> Mapping[str, Callable[[Info], Info | None]]:
    """Return what a rank other than 0 does for each order of `torchrl_ext.data.versions.writer.ChainWriter`.

    Args:
        own: what this rank owns.
        source: what is sent.
        store: where versions are written.
        rank: this one.
        base: the checkpoint directory on which the first version is a delta.
        timeout_s: of each wait for another rank.
    """

    def write(order: Info) -> Info:
        draft = store.join(order["place"]) if order["place"] else None
        return own.write(source, draft, delta=order["delta"], keyframe=order["keyframe"]).to_json()

    return {
        "look": lambda order: {"same": own.look(source)},
        "held": lambda order: own.held.to_json(),
        "share": lambda order: own.share(order["held"], rank, order["owners"], timeout_s),
        "start": lambda order: own.start(base or order["base"]).to_json(),
        "write": write,
    }


def _threads() -> int:
    """Return how many threads code: this rank's share of the cores, where torchrun says how many ranks are here."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, worker_threads() // max(1, int(ranks) if ranks.isdigit() else 1))
