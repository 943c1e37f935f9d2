"""Files of deltas: written as blocks or whole parameters, the manifest last; read at once, or on demand if many."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple, final

import numpy as np
import xxhash

from torchrl_ext.base.errors import IntegrityError
from torchrl_ext.data.deltas.blocks import BlockEncoding
from torchrl_ext.data.deltas.streams import Found, StreamPatch
from torchrl_ext.data.deltas.table import ParamTable, unit_of
from torchrl_ext.data.stores.delta_manifest import BLOCK, DIGEST, DeltaManifest
from torchrl_ext.data.stores.manifest import MANIFEST
from torchrl_ext.data.stores.store import Store

__all__ = ["HELD_BYTES", "SPAN_BYTES", "DeltaFiles", "FileEncoding", "Files", "Payloads", "incomplete"]

FILE_BYTES = 64 << 20
"""About how large a file of blocks is, so that writing runs beside coding."""
HELD_BYTES = 256 << 20
"""Bound on the payloads in memory, of all deltas on a route together; one larger payload may exceed it."""
SPAN_BYTES = 1 << 20
"""Bound on the neighbouring payloads that are read at once: `HELD_BYTES` have room for a span of each of 256 deltas."""
_GAP_BYTES = 4096  # between two payloads, that are faster read than skipped

Files = Mapping[str, memoryview]
"""The content of every payload file of a delta, by name."""


class FileEncoding(ABC):
    """An encoding of whole parameters, many of which lie in each file.

    Attributes:
        name: of the encoding.
    """

    container: ClassVar[str] = "flushes"
    whole_base: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def files(self, version: int, patches: Iterable[StreamPatch]) -> Iterator[tuple[str, bytes, list[str]]]:
        """Yield the name of each file of a delta, its content, and the parameters that it changes.

        Args:
            version: to which the delta leads.
            patches: the change of every parameter that changes, as new bits; in order for each dtype.

        Raises:
            ConfigError: the files cannot carry a parameter; names it.
        """

    @abstractmethod
    def read(self, manifest: DeltaManifest, files: Files, where: str) -> Iterable[StreamPatch]:
        """Return the change of each parameter that changes.

        Args:
            manifest: of the delta.
            files: what it consists of.
            where: the folder, for messages.

        Raises:
            IntegrityError: a file is not what the manifest says; names it and a tensor in it.
        """


class _Coded(NamedTuple):
    """A block that was looked at.

    Attributes:
        found: what changed; without its lists, which belong to the thread that found it.
        changed: int64, shape (segments,): units that changed.
        kind, payload: the block as bytes; none where nothing changed, or for a `FileEncoding`.
        patch: new bits, for a `FileEncoding`.
    """

    found: Found
    changed: np.ndarray
    kind: str = ""
    payload: bytes = b""
    patch: StreamPatch | None = None


@final
class DeltaFiles:
    """Codes what a trainer rank found, lays it into files, and gathers what a manifest says of them.

    Args:
        table: has the streams in which changes are found.
        encoding: of the delta.
        rank: the trainer rank that writes.
        ranks: as many write files of the version, and count these in turns.

    Attributes:
        sizes: bytes of each file.
        kinds: names of what changes are coded with, as rows number them.
        changed: uint64, shape (parameters,): units that changed.
        words: uint64, shape (parameters, 2): what the change adds to the digests.
        placed: the file that holds the change of a parameter, by a `FileEncoding`.
    """

    def __init__(
        self, table: ParamTable, encoding: BlockEncoding | FileEncoding, rank: int = 0, ranks: int = 1
    ) -> None:
        self._table, self._encoding, self._rank, self._ranks = table, encoding, rank, ranks
        self.sizes: dict[str, int] = {}
        self.kinds: list[str] = [] if isinstance(encoding, BlockEncoding) else [encoding.name]
        self.changed = np.zeros(len(table.params), DIGEST)
        self.words = np.zeros((len(table.params), 2), DIGEST)
        self.placed: dict[str, str] = {}
        self._rows: list[tuple[int, ...]] = []

    def code(self, found: Found) -> _Coded:
        """Code a block; called from any thread (`torchrl_ext.data.deltas.streams.find`)."""
        stream, segments, positions = self._table.streams[found.stream], found.segments, found.positions
        cuts = np.searchsorted(positions, stream.first[segments.start : segments.stop + 1] - found.start)
        counted = found._replace(before=found.before[:0], after=found.after[:0], old=found.old[:0], news=())
        if not positions.size:
            return _Coded(counted, np.diff(cuts))
        if isinstance(self._encoding, BlockEncoding):
            return _Coded(counted, np.diff(cuts), *self._encoding.encode(unit_of(stream.dtype), found))
        place, lists = (self._table, found.stream, found.start, found.size), (positions.copy(), found.after.copy())
        return _Coded(counted, np.diff(cuts), patch=StreamPatch(*place, *lists))

    def files(self, version: int, blocks: Iterable[_Coded]) -> Iterator[tuple[str, bytes]]:
        """Yield name and content of each file.

        Args:
            version: to which the delta leads.
            blocks: in the order of each stream.
        """
        counted = self._counted(blocks)
        if isinstance(self._encoding, BlockEncoding):
            yield from self._of_blocks(counted)
            return
        patches = (one.patch for one in counted if one.patch is not None)
        for name, data, own in self._encoding.files(version, _whole(patches)):
            self.sizes[name] = len(data)
            self.placed |= dict.fromkeys(own, name)
            yield name, data

    def _counted(self, blocks: Iterable[_Coded]) -> Iterator[_Coded]:
        for one in blocks:
            segments = one.found.segments
            params = self._table.streams[one.found.stream].params[segments.start : segments.stop]
            self.words[params] += one.found.words
            self.changed[params] += one.changed.astype(DIGEST)
            yield one

    def _of_blocks(self, blocks: Iterable[_Coded]) -> Iterator[tuple[str, bytes]]:
        waiting, size = list[bytes](), 0
        for found, changed, kind, payload, _ in blocks:
            if not payload:
                continue
            if kind not in self.kinds:
                self.kinds.append(kind)
            place = found.stream, len(self.sizes), self.kinds.index(kind), found.start, found.size
            counts = int(changed.sum()), size, len(payload), xxhash.xxh3_64_intdigest(payload)
            self._rows.append((*place, *counts))
            waiting.append(payload)
            size += len(payload)
            if size >= FILE_BYTES:
                yield self._file(waiting)
                waiting, size = [], 0
        if waiting:
            yield self._file(waiting)

    def _file(self, waiting: list[bytes]) -> tuple[str, bytes]:
        name, data = f"delta-{len(self.sizes) * self._ranks + self._rank + 1:05d}.bin", b"".join(waiting)
        self.sizes[name] = len(data)
        return name, data

    @property
    def rows(self) -> np.ndarray:
        """The blocks, of dtype `BLOCK`, in order of stream and start."""
        rows = np.array(self._rows, BLOCK)
        return rows[np.lexsort((rows["start"], rows["stream"]))]


def _whole(patches: Iterable[StreamPatch]) -> Iterator[StreamPatch]:
    """Yield changes of ranges, in the order of each stream, as those of whole parameters."""
    begun = dict[int, list[StreamPatch]]()
    for patch in patches:
        for own in patch.split():
            parts = begun.setdefault(own.stream, [])
            if parts and parts[0].start != own.start:
                yield _joined(parts)
                parts.clear()
            parts.append(own)
    yield from map(_joined, begun.values())


def _joined(parts: list[StreamPatch]) -> StreamPatch:
    positions, values = (np.concatenate([getattr(one, name) for one in parts]) for name in ("positions", "values"))
    return StreamPatch.of(parts[0].table, parts[0].meta.name, positions, values)


@dataclass(kw_only=True, eq=False)
class _Span:
    """Neighbouring payloads of a file, which are read at once: from ``first`` to ``end``, in bytes."""

    manifest: DeltaManifest
    folder: str
    file: str
    first: int
    end: int
    blocks: list[np.void]

    def of(self, block: np.void, data: memoryview) -> memoryview:
        """Return the bytes of a block from those of the span."""
        return data[int(block["offset"]) - self.first :][: int(block["nbytes"])]

    def name(self, block: np.void) -> str:
        """Return the name of the first tensor that a block changes."""
        stream = self.manifest.table.streams[block["stream"]]
        return self.manifest.params[stream.params[stream.within(int(block["start"]), int(block["start"]) + 1)[0]]].name


class Payloads:
    """Reads payloads in spans, verifies each one, and holds no more than `HELD_BYTES` of them.

    A route whose payloads take no more than the bound is read when it is opened, and needs the store no longer. On a
    longer one, spans are read when a payload in them is asked for, and those that were used longest ago are dropped.

    Args:
        store: where the deltas are.

    Attributes:
        nbytes: bytes of all spans that were added.
    """

    def __init__(self, store: Store) -> None:
        self.store, self.nbytes = store, 0
        self._spans: list[_Span] = []
        self._held: dict[_Span, memoryview] = {}  # the one that was used last comes last
        self._lock = threading.Lock()

    def add(self, folder: str, manifest: DeltaManifest, numbers: Iterable[int]) -> dict[int, Callable[[], memoryview]]:
        """Add blocks of a delta; return for each a call that returns its bytes.

        The calls raise IntegrityError where a payload is damaged, or is gone from the store; it names a tensor.

        Args:
            folder: of the delta's files.
            manifest: of the delta.
            numbers: of the blocks, in ``manifest.blocks``.
        """
        found, last, names = dict[int, Callable[[], memoryview]](), None, [*manifest.files]
        places = ((number, manifest.blocks[number]) for number in numbers)
        for number, block in sorted(places, key=lambda row: (int(row[1]["file"]), int(row[1]["offset"]))):
            file, first = names[block["file"]], int(block["offset"])
            end = first + int(block["nbytes"])
            if last is None or file != last.file or first - last.end > _GAP_BYTES or end - last.first > SPAN_BYTES:
                last = _Span(manifest=manifest, folder=folder, file=file, first=first, end=first, blocks=[])
                self._spans.append(last)
            self.nbytes += max(0, end - last.end)
            last.end = max(last.end, end)
            last.blocks.append(block)
            found[number] = partial(self._payload, last, block)
        return found

    def read(self) -> None:
        """Read everything, unless it takes more than the bound.

        Raises:
            FileNotFoundError: a delta was collected.
            IntegrityError: a file is missing or too short, or a payload is damaged; names the tensor and the file.
        """
        by_file: dict[tuple[str, str], list[_Span]] = {}
        for span in self._spans if self.nbytes <= HELD_BYTES else ():
            by_file.setdefault((span.folder, span.file), []).append(span)
        for spans in by_file.values():
            self._load(spans)

    def _payload(self, span: _Span, block: np.void) -> memoryview:
        with self._lock:
            if span not in self._held:
                used = sum(map(len, self._held.values())) + span.end - span.first
                while self._held and used > HELD_BYTES:
                    used -= len(self._held.pop(next(iter(self._held))))
                try:
                    self._load([span])
                except FileNotFoundError as error:
                    raise self._incomplete(span, None, block) from error
            data = self._held[span] = self._held.pop(span)
        return span.of(block, data)

    def _load(self, spans: list[_Span]) -> None:
        """Read spans of one file, and verify the payloads in them."""
        folder, file, manifest = spans[0].folder, spans[0].file, spans[0].manifest
        try:
            read = self.store.ranges(f"{folder}/{file}", [(span.first, span.end - span.first) for span in spans])
        except FileNotFoundError as error:
            if MANIFEST not in self.store.list(folder):  # collected in between
                raise
            raise self._incomplete(spans[0], None, spans[0].blocks[0]) from error
        for span, data in zip(spans, read, strict=True):
            view = memoryview(data)
            for block in span.blocks:
                payload, stated = span.of(block, view), int(block["checksum"])
                if len(payload) != block["nbytes"]:
                    raise self._incomplete(span, span.first + len(data), block)
                if xxhash.xxh3_64_intdigest(payload) != stated:
                    raise IntegrityError(
                        f"tensor {span.name(block)!r} in {self.store.url}/{folder}/{file} is damaged",
                        expected=f"xxh3-64 {stated:016x}, found {xxhash.xxh3_64_hexdigest(payload)}",
                        state=f"nothing of version {manifest.version} was used",
                        hint="let the trainer publish again, and check the disk",
                    )
            self._held[span] = view

    def _incomplete(self, span: _Span, found: int | None, block: np.void) -> IntegrityError:
        where = f"{self.store.url}/{span.folder}"
        return incomplete(where, span.file, span.manifest, found, span.name(block))


def incomplete(where: str, file: str, manifest: DeltaManifest, found: int | None, name: str | None) -> IntegrityError:
    """Return the error for a file of a delta that is missing or ends early.

    Args:
        where: the folder, for messages.
        file: its name.
        manifest: of the delta.
        found: the bytes that there are; None where the file is missing.
        name: a tensor that cannot be read; None where the file holds none.
    """
    what = "is missing" if found is None else f"has {found} bytes"
    return IntegrityError(
        f"{where}/{file} {what}" + (f", so that tensor {name!r} cannot be read" if name else ""),
        expected=f"{manifest.files[file]} bytes, as in the manifest",
        state=f"nothing of version {manifest.version} was used",
        hint="let the trainer publish again, and check the disk",
    )
