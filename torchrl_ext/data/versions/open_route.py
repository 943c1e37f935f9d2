"""A route through a chain, open for reading."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from torch import Tensor

from torchrl_ext.base.errors import IntegrityError, ManifestError
from torchrl_ext.data.deltas.blocks import KINDS, decode_block
from torchrl_ext.data.deltas.streams import StreamPatch, fold, in_threads, worker_threads
from torchrl_ext.data.deltas.table import ParamTable, units
from torchrl_ext.data.stores.chain import Chain, Route
from torchrl_ext.data.stores.manifest import DeltaManifest, Manifest, RunVersion
from torchrl_ext.data.versions.full import PublishedVersion
from torchrl_ext.data.versions.kept import KeptTensors
from torchrl_ext.data.versions.payloads import read_blocks
from torchrl_ext.data.weights.blocks import Block
from torchrl_ext.data.weights.digests import position_digest
from torchrl_ext.data.weights.source import WeightSource

__all__ = ["FullVersion", "OpenBase", "OpenFull", "OpenRoute", "Wanted", "needs_old"]


FullVersion = PublishedVersion | KeptTensors
"""A keyframe, open for reading."""
OpenFull = Callable[[Manifest], FullVersion]
OpenBase = Callable[[], WeightSource]
Wanted = Callable[[str], Sequence[Block] | None]
"""Says which blocks of a parameter are wanted; None where all of it is."""


def needs_old(manifest: DeltaManifest) -> bool:
    """Return whether something in a delta is decoded with the old units of its range."""
    return "context" in manifest.codecs


class _Range(NamedTuple):
    """A range of a stream, in units."""

    stream: int
    start: int
    size: int


@dataclass(frozen=True, kw_only=True)
class _Delta:
    """A delta, open for reading.

    Attributes:
        where: its folder, for messages.
        manifest: of the delta.
        blocks: the kind of each range's block, and a call that returns its bytes.
    """

    where: str
    manifest: DeltaManifest
    blocks: Mapping[_Range, tuple[str, Callable[[], memoryview]]]


class OpenRoute:
    """A route with its keyframe open, and with its deltas read, or read while the route is used where they are many.

    Memory for payloads is bounded by `torchrl_ext.data.versions.payloads`, however many versions the route leads
    through.

    Args:
        chain: the versions.
        route: the route to open.
        target: where it leads.
        open_full: opens a keyframe.
        held: the version that the reader holds.
        base: opens what version 0 is, for a reader that holds nothing that it could start from.
        wanted: which blocks of parameters are read, where the route starts from what the reader holds; None for all.

    Attributes:
        held: the version that the reader holds, where the route starts from it.
        reached: run id and number of the version that it leads to.
        params: every parameter there.
        deltas: in order.
        keyframe: the manifest of the keyframe that it starts from.
        published: that keyframe, its files open.
        base: what stands in for a keyframe where the route starts at version 0.
        digests: digest of every tensor where the route ends, by name; none where it ends at a keyframe.
        read_bytes: bytes of payloads that are read: when the route is opened, or later where they are many.
    """

    def __init__(
        self,
        chain: Chain,
        route: Route,
        target: int,
        open_full: OpenFull,
        held: RunVersion | None,
        base: OpenBase | None,
        wanted: Wanted | None = None,
    ) -> None:
        end = chain.version(target)
        self.held = held if route.start == held else None
        self.reached, self.params = (end.run_id, target), end.params
        self.base = base() if base is not None and route.start is not None and self.held is None else None
        self.keyframe = route.keyframe
        self.published = None if route.keyframe is None else open_full(route.keyframe)
        self.deltas: list[_Delta] = []
        try:
            wanted = wanted if self.held is not None else None
            chosen = [
                [number for number in range(manifest.blocks.size) if _is_wanted(manifest, number, wanted)]
                for _, manifest in route.deltas
            ]
            rows = [manifest.blocks[numbers] for (_, manifest), numbers in zip(route.deltas, chosen, strict=True)]
            self.read_bytes = sum(int(own["nbytes"].sum()) for own in rows)
            for (folder, manifest), numbers in zip(route.deltas, chosen, strict=True):
                where, kinds = f"{chain.store.url}/{folder}", manifest.codecs
                if not {*kinds} <= {*KINDS}:
                    raise ManifestError(
                        f"{where} has blocks of the kinds {', '.join(map(repr, kinds))}",
                        expected=f"some of {', '.join(KINDS)}",
                    )
                read, blocks = read_blocks(chain.store, folder, manifest, numbers, self.read_bytes), {}
                for number, payload in read.items():
                    row = manifest.blocks[number]
                    blocks[_Range(*(int(row[name]) for name in _Range._fields))] = kinds[row["codec"]], payload
                self.deltas.append(_Delta(where=where, manifest=manifest, blocks=blocks))
            self._ranges = sorted({within for delta in self.deltas for within in delta.blocks})
            self._by_stream: dict[int, list[_Range]] = {}
            for within in self._ranges:
                self._by_stream.setdefault(within.stream, []).append(within)
            self._check_layout()
        except BaseException:
            self.close()
            raise
        self._table = self.deltas[0].manifest.table if self.deltas else ParamTable.of(())
        self._needs_old = any(needs_old(delta.manifest) for delta in self.deltas)
        self.digests = self.deltas[-1].manifest.hex_digests if self.deltas else {}

    def _check_layout(self) -> None:
        """Check that changes of all deltas can be folded range by range.

        Raises:
            IntegrityError: the ranges of one are not those of another; not raised for deltas of other models, as
                whoever opens the route says so.
        """
        tables = [delta.manifest.table for delta in self.deltas]
        if any(table.params != self.params for table in tables):
            return
        apart = all(
            one.start + one.size <= other.start
            for ranges in self._by_stream.values()
            for one, other in pairwise(ranges)
        )
        if not apart or not all(tables[0].lays_out_as(table) for table in tables):
            raise IntegrityError(
                f"{self.deltas[-1].where} lays out its blocks otherwise than {self.deltas[0].where}",
                state="nothing was read",
                hint="let the trainer publish a keyframe",
            )

    def first(self, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor as it is where the route starts, from the keyframe or the base.

        Raises:
            IntegrityError: a damaged tensor, or another base; names the tensor.
        """
        if self.published is not None:
            yield from self.published.pairs({} if self.deltas else into)
        elif self.base is not None:
            own, first = {meta.name for meta in self.params}, self.deltas[0]
            for name, tensor in self.base:
                if name in own:
                    known, found = first.manifest.hex_base_digests.get(name), position_digest(tensor).hex()
                    if found != known:
                        raise IntegrityError(
                            f"tensor {name!r} of the base checkpoint is not the one on which {first.where} was taken",
                            expected=f"digest {known}, found {found}",
                            state="nothing was changed",
                            hint="start from the checkpoint that the trainer names as base=",
                        )
                    yield name, tensor
        else:
            raise IntegrityError(f"no full version leads to version {self.reached[1]}")

    def patches(self, copies: Mapping[str, Tensor], wanted: Callable[[str], bool]) -> Iterator[StreamPatch]:
        """Yield what changes, in order of streams; ranges without a wanted tensor are not decoded.

        Args:
            copies: tensors where the route starts, as far as encodings need them.
            wanted: says of a name whether its tensor is wanted; asked once for each tensor that changes.
        """
        if not self.deltas:
            return
        chosen = np.zeros(len(self.params), np.bool_)
        for number in np.flatnonzero(np.any([delta.manifest.changed for delta in self.deltas], 0)).tolist():
            chosen[number] = wanted(self.params[number].name)

        def decoding() -> Iterator[tuple[int, Callable[[], list[StreamPatch]]]]:
            for within in self._ranges:
                stream = self._table.streams[within.stream]
                own = stream.within(within.start, within.start + within.size)
                if chosen[stream.params[own.start : own.stop]].any():
                    yield 0, partial(self._folded, within, copies)

        for found in in_threads(decoding(), threads=worker_threads(beside_model=True)):
            yield from found

    def _folded(self, within: _Range, copies: Mapping[str, Tensor]) -> list[StreamPatch]:
        """Return all changes of a range on the route, as patches that do not meet.

        Raises:
            IntegrityError: a payload is damaged, or cannot be decoded without ``copies``; names a tensor and the delta.
        """
        patches, old = list[StreamPatch](), self._units(within, copies) if self._needs_old else None
        for delta in self.deltas:
            if within not in delta.blocks:
                continue
            kind, payload = delta.blocks[within]
            try:
                patches.append(decode_block(kind, payload(), delta.manifest.table, *within, old))
            except IntegrityError as error:
                name = self._table.at(within.stream, within.start).name
                raise IntegrityError(
                    f"tensor {name!r} in {delta.where} cannot be used: {error.what}",
                    expected=error.expected,
                    state=error.state,
                    hint=error.hint or "let the trainer publish again",
                ) from error
            if old is not None:  # each is decoded against the result of the one before
                patches[-1].apply(old)
        return fold(patches)

    def _units(self, within: _Range, copies: Mapping[str, Tensor]) -> np.ndarray | None:
        """Return the units of a range, where there are copies of all tensors in it."""
        stream, end, parts = self._table.streams[within.stream], within.start + within.size, list[np.ndarray]()
        for segment in stream.within(within.start, end):
            copy, first = copies.get(self.params[stream.params[segment]].name), int(stream.first[segment])
            if copy is None:
                return None
            parts.append(units(copy)[max(0, within.start - first) : end - first])
        return np.concatenate(parts)

    def whole(self, copies: Mapping[str, Tensor], names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors as they are where the route ends, made from host copies of them where it starts."""
        wanted = frozenset(names)
        ranges = {meta.name: self._ranges_of(meta.name) for meta in self.params if meta.name in wanted}
        used = dict.fromkeys(within for own in ranges.values() for within in own)
        decoding = ((0, partial(self._folded, within, copies)) for within in used)  # in the order of their use
        decoded = in_threads(decoding, threads=worker_threads(beside_model=True))
        pairs = ((name, copies[name].clone()) for name in ranges)
        return self._applied(pairs, ranges, lambda within: next(decoded))

    def at_end(self, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors as they are where the route ends, from those where it starts, which may be changed in place.

        Where an encoding needs old units, all have to come first: whoever reads such a route keeps copies of them.
        """
        ranges = {meta.name: self._ranges_of(meta.name) for meta in self.params}
        contiguous = ((name, tensor.contiguous()) for name, tensor in pairs)
        here = dict(contiguous) if self._needs_old else dict[str, Tensor]()

        def complete() -> Iterator[tuple[str, Tensor]]:
            for name in [*here]:
                yield name, here[name]
                del here[name]

        return self._applied(complete() if self._needs_old else contiguous, ranges, lambda one: self._folded(one, here))

    def _applied(
        self,
        pairs: Iterable[tuple[str, Tensor]],
        ranges: Mapping[str, Sequence[_Range]],
        folded: Callable[[_Range], list[StreamPatch]],
    ) -> Iterator[tuple[str, Tensor]]:
        """Change contiguous tensors in place, and yield them; the changes of a range are kept while it has tensors.

        Args:
            pairs: the tensors.
            ranges: those in which each may change.
            folded: returns the changes of a range; called for all ranges of a tensor before that changes.
        """
        uses, known = Counter(within for own in ranges.values() for within in own), dict[_Range, list[StreamPatch]]()
        for name, tensor in pairs:
            known |= {within: folded(within) for within in ranges[name] if within not in known}
            for within in ranges[name]:
                for patch in known[within]:
                    own = patch.segment(self._table.place_of(name)[1])
                    if own.positions.size:
                        own.apply(units(tensor))
                uses[within] -= 1
                if not uses[within]:
                    del known[within]
            yield name, tensor

    def _ranges_of(self, name: str) -> list[_Range]:
        """Return the ranges in which a tensor may change, in order."""
        if not self.deltas:
            return []
        stream, segment = self._table.place_of(name)
        ranges = self._by_stream.get(stream, [])
        first, end = self._table.streams[stream].first[segment : segment + 2].tolist()
        low = bisect_right(ranges, first, key=lambda one: one.start + one.size)
        return ranges[low : bisect_left(ranges, end, key=attrgetter("start"))]

    def verify(self, name: str, tensor: Tensor) -> None:
        """Compare a tensor with the digest that it has where the route ends.

        Raises:
            IntegrityError: it is another one; names it and the deltas that made it.
        """
        expected = self.digests.get(name)
        if expected is None or (found := position_digest(tensor).hex()) == expected:
            return
        number = self._table.number[name]
        made = [delta.where for delta in self.deltas if delta.manifest.changed[number]]
        raise IntegrityError(
            f"tensor {name!r} does not come out as version {self.reached[1]} has it, by "
            f"{', '.join(made) or 'the keyframe'}",
            expected=f"digest {expected}, found {found}",
            state="nothing of it was used",
            hint="the delta builds on another base; let the trainer publish a keyframe",
        )

    def close(self) -> None:
        """Close the files. May be called twice."""
        if self.published is not None:
            self.published.close()


def _is_wanted(manifest: DeltaManifest, number: int, wanted: Wanted | None) -> bool:
    if wanted is None:
        return True
    block = manifest.blocks[number]
    stream, start = manifest.table.streams[block["stream"]], int(block["start"])
    stop = start + int(block["size"])
    for segment in stream.within(start, stop):
        meta = manifest.params[stream.params[segment]]
        blocks, first = wanted(meta.name), int(stream.first[segment])
        spans = (_span(one, meta.shape) for one in blocks or ())
        if blocks is None or any(first + low < stop and start < first + high for low, high in spans):
            return True
    return False


def _span(block: Block, shape: Sequence[int]) -> tuple[int, int]:
    """Return the first element of a block, and the one behind its last, in the C order of its parameter."""
    low = last = 0
    for first, stop, size in zip(*block, shape, strict=True):
        low, last = low * size + first, last * size + stop - 1
    return low, last + 1
