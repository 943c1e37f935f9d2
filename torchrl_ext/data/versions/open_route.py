"""A route through a chain, open for reading."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Protocol

import numpy as np
from torch import Tensor

from torchrl_ext.base.errors import IntegrityError, ManifestError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.deltas.blocks import codec_from_json
from torchrl_ext.data.deltas.streams import StreamPatch, decode_tensors, fold, worker_threads
from torchrl_ext.data.deltas.table import apply_patch, units
from torchrl_ext.data.stores.chain import Chain, Route
from torchrl_ext.data.stores.manifest import BLOCKS, MANIFEST, DeltaManifest, Manifest, RunVersion
from torchrl_ext.data.versions.open_delta import OpenDelta, Range, Wanted, needs_old
from torchrl_ext.data.versions.payloads import FileEncoding, Payloads, incomplete
from torchrl_ext.data.weights.digests import position_digest
from torchrl_ext.data.weights.source import WeightSource

__all__ = ["FullVersion", "OpenBase", "OpenFull", "OpenRoute", "same_base"]


class FullVersion(Protocol):
    """A keyframe, open for reading."""

    def params(self) -> tuple[ParamMeta, ...]:
        """Return the parameters that it holds, in order."""

    def pairs(self, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor in order, each verified first, and read into that of ``into`` where it fits."""

    def close(self) -> None:
        """Release its files or its memory. May be called twice."""


OpenFull = Callable[[int, Manifest], FullVersion]
OpenBase = Callable[[], WeightSource]


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
        self.published = None if route.keyframe is None else open_full(route.keyframe.version, route.keyframe)
        self.deltas: list[OpenDelta] = []
        self._payloads, self._whole_bytes = Payloads(chain.store), 0
        try:
            for folder, manifest in route.deltas:
                self.deltas.append(self._opened(chain, folder, manifest, wanted if self.held is not None else None))
            self._payloads.read()
        except BaseException:
            self.close()
            raise
        self._needs_old = any(needs_old(delta.manifest) for delta in self.deltas)
        self._ranges = sorted({within for delta in self.deltas for within in delta.changes})
        self._by_stream: dict[int, list[Range]] = {}
        for within in self._ranges:
            self._by_stream.setdefault(within.stream, []).append(within)
        other = self._other_layout()
        if other is not None:
            self.close()
            raise IntegrityError(
                f"{other.where} lays out its blocks otherwise than {self.deltas[0].where}",
                state="nothing was read",
                hint="let the trainer publish a keyframe",
            )
        self.digests = self.deltas[-1].manifest.hex_digests if self.deltas else {}

    def _opened(self, chain: Chain, folder: str, manifest: DeltaManifest, wanted: Wanted | None) -> OpenDelta:
        """Open a delta.

        Raises:
            FileNotFoundError: it was collected.
            IntegrityError, ManifestError: as `torchrl_ext.data.versions.payloads.FileEncoding.read`.
        """
        where, files, name = f"{chain.store.url}/{folder}", dict[str, memoryview](), ""
        if manifest.container == BLOCKS:
            return OpenDelta.of_blocks(self._payloads, folder, manifest, wanted)
        encoding = codec_from_json(next(iter(manifest.codecs), {}))
        if not isinstance(encoding, FileEncoding) or encoding.container != manifest.container:
            raise ManifestError(
                f"{where} is coded as {encoding.name!r}, and laid out as {manifest.container!r}",
                expected=f"an encoding of that layout, or {BLOCKS!r}",
            )
        try:
            for name in manifest.files:
                files[name] = memoryview(chain.store.get(f"{folder}/{name}"))
        except FileNotFoundError as error:
            if MANIFEST not in chain.store.list(folder):  # collected in between
                raise
            raise incomplete(where, name, manifest, None) from error
        for name, size in manifest.files.items():
            self._whole_bytes += size
            if len(files[name]) != size:
                raise incomplete(where, name, manifest, len(files[name]))
        return OpenDelta.of_patches(where, manifest, encoding.read(manifest, files, where))

    def _other_layout(self) -> OpenDelta | None:
        """Return a delta whose ranges are not those of the first one; None for deltas of other models, too."""
        if any(delta.table.params != self.params for delta in self.deltas):  # whoever opens the route says so
            return None
        for delta in self.deltas[1:]:
            if not self.deltas[0].table.lays_out_as(delta.table):
                return delta
        for ranges in self._by_stream.values():
            if any(one.start + one.size > other.start for one, other in pairwise(ranges)):
                return self.deltas[-1]
        return None

    @property
    def read_bytes(self) -> int:
        """Bytes of payloads that are read: when the route is opened, or later where they are many."""
        return self._payloads.nbytes + self._whole_bytes

    def first(self, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor as it is where the route starts, from the keyframe or the base.

        Raises:
            IntegrityError: a damaged tensor, or another base; names the tensor.
        """
        if self.published is not None:
            yield from self.published.pairs({} if self.deltas else into)
        elif self.base is not None:
            own = {meta.name for meta in self.params}
            for name, tensor in self.base:
                if name in own:
                    first = self.deltas[0]
                    same_base({name: position_digest(tensor).hex()}, first.manifest, first.where)
                    yield name, tensor
        else:
            raise IntegrityError(f"no full version leads to version {self.reached[1]}")

    def patches(self, copies: Mapping[str, Tensor], wanted: Callable[[str], bool]) -> Iterator[StreamPatch]:
        """Return an iterator over what changes, in order of streams; ranges without a wanted tensor are not decoded.

        Args:
            copies: tensors where the route starts, as far as encodings need them.
            wanted: says of a name whether its tensor is wanted; asked once for each tensor that changes.
        """
        chosen = dict[str, bool]()
        decoding = []
        for within in self._ranges:
            names = {name: None for delta in self.deltas for name in delta.names(within)}
            for name in names:
                if name not in chosen:
                    chosen[name] = wanted(name)
            if any(map(chosen.__getitem__, names)):
                decoding.append(partial(self._folded, within, copies))
        for found in decode_tensors(decoding, threads=worker_threads(beside_model=True)):
            yield from found

    def _folded(self, within: Range, copies: Mapping[str, Tensor]) -> list[StreamPatch]:
        """Return all changes of a range on the route, as patches that do not meet.

        Raises:
            IntegrityError: a payload is damaged, or cannot be decoded without ``copies``; names a tensor and the delta.
        """
        patches, old = list[StreamPatch](), self._units(within, copies) if self._needs_old else None
        for delta in self.deltas:
            try:
                found = delta.decode(within, old)
            except IntegrityError as error:
                name = next(delta.names(within), "")
                placed = delta.manifest.placed.get(name)
                where = delta.where if placed is None else f"{delta.where}/{placed}"
                raise IntegrityError(
                    f"tensor {name!r} in {where} cannot be used: {error.what}",
                    expected=error.expected,
                    state=error.state,
                    hint=error.hint or "let the trainer publish again",
                ) from error
            if found is None:
                continue
            if old is not None:  # each is decoded against the result of the one before
                old = old.copy()
                found.apply(old)
            patches.append(found)
        return fold(patches) if len(patches) > 1 else patches

    def _units(self, within: Range, copies: Mapping[str, Tensor]) -> np.ndarray | None:
        """Return the units of a range, where there are copies of all tensors in it."""
        table = self.deltas[0].table
        stream, end = table.streams[within.stream], within.start + within.size
        parts = []
        for segment in stream.within(within.start, end):
            copy = copies.get(table.params[stream.params[segment]].name)
            if copy is None:
                return None
            parts.append(units(copy))
        first = int(stream.first[stream.within(within.start, end)[0]])
        return np.concatenate(parts)[within.start - first :][: within.size]

    def whole(self, copies: Mapping[str, Tensor], names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors as they are where the route ends, made from host copies of them where it starts."""
        wanted = frozenset(names)
        chosen = {meta.name: self._ranges_of(meta.name) for meta in self.params if meta.name in wanted}
        uses = Counter(within for own in chosen.values() for within in own)
        decoding = [partial(self._folded, within, copies) for within in uses]  # in the order in which they are used
        decoded = zip(uses.copy(), decode_tensors(decoding, threads=worker_threads(beside_model=True)), strict=True)
        folded = dict[Range, list[StreamPatch]]()
        for name, own in chosen.items():
            while not folded.keys() >= set(own):
                folded.update((next(decoded),))
            yield name, self._applied(name, copies[name].clone(), folded)
            _release(folded, own, uses)

    def at_end(self, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors as they are where the route ends, from those where it starts, which may be changed in place.

        Where an encoding needs the old units of a block, its tensors wait until all of them have come.
        """
        ranges = {meta.name: self._ranges_of(meta.name) for meta in self.params}
        uses = Counter(within for own in ranges.values() for within in own)
        missing = uses.copy() if any(needs_old(delta.manifest) for delta in self.deltas) else Counter[Range]()
        waiting, here, folded = deque[str](), dict[str, Tensor](), dict[Range, list[StreamPatch]]()

        def ended(name: str) -> tuple[str, Tensor]:
            for within in ranges[name]:  # all of them, before the tensor changes
                if within not in folded:
                    folded[within] = self._folded(within, here)
            tensor = self._applied(name, here.pop(name), folded)
            _release(folded, ranges[name], uses)
            return name, tensor

        for name, tensor in pairs:
            waiting.append(name)
            here[name] = tensor if tensor.is_contiguous() else tensor.contiguous()
            missing.subtract(ranges[name])
            while waiting and not any(missing[within] > 0 for within in ranges[waiting[0]]):
                yield ended(waiting.popleft())
        for name in waiting:  # of a block whose other tensors never came, which the caller will miss
            yield ended(name)

    def _ranges_of(self, name: str) -> list[Range]:
        """Return the ranges in which a tensor may change, in order."""
        if not self.deltas:
            return []
        table = self.deltas[0].table
        stream, segment = self._place(name)
        ranges = self._by_stream.get(stream, [])
        first, end = table.streams[stream].first[segment : segment + 2].tolist()
        low = bisect_right(ranges, first, key=lambda one: one.start + one.size)
        return ranges[low : bisect_left(ranges, end, key=attrgetter("start"))]

    def _place(self, name: str) -> tuple[int, int]:
        """Return the stream of a tensor, and its segment there."""
        table = self.deltas[0].table
        streams, segments = table.place
        return streams[table.number[name]], segments[table.number[name]]

    def _applied(self, name: str, tensor: Tensor, folded: Mapping[Range, list[StreamPatch]]) -> Tensor:
        """Return a contiguous tensor, changed in place, as it is where the route ends."""
        for within in self._ranges_of(name):
            for patch in folded[within]:
                own = patch.of(self._place(name)[1])
                if own is not None:
                    apply_patch(own, tensor)
        return tensor

    def verify(self, name: str, tensor: Tensor) -> None:
        """Compare a tensor with the digest that it has where the route ends.

        Raises:
            IntegrityError: it is another one; names it and the deltas that made it.
        """
        expected = self.digests.get(name)
        if expected is None or (found := position_digest(tensor).hex()) == expected:
            return
        number = self.deltas[0].table.number[name]
        made = [delta.where for delta in self.deltas if delta.changed[number]]
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


def _release(folded: dict[Range, list[StreamPatch]], own: Iterable[Range], uses: Counter[Range]) -> None:
    """Note that one of the tensors in some ranges is done, and forget the changes of ranges whose last one is."""
    for within in own:
        uses[within] -= 1
        if not uses[within]:
            del folded[within]


def same_base(digests: Mapping[str, str], delta: DeltaManifest, where: str) -> None:
    """Compare what a worker holds with the base of the first delta.

    Args:
        digests: digests of what it holds, by name; of some of its tensors.
        delta: the first delta, which names those of its base.
        where: its folder, for messages.

    Raises:
        IntegrityError: it holds something else; names the first tensor.
    """
    known = delta.hex_base_digests
    for name, found in digests.items():
        if found != known.get(name):
            raise IntegrityError(
                f"tensor {name!r} of the base checkpoint is not the one on which {where} was taken",
                expected=f"digest {known.get(name)}, found {found}",
                state="nothing was changed",
                hint="start from the checkpoint that the trainer names as base=",
            )
