"""Files of deltas: written as blocks or whole parameters, the manifest last; read at once, or on demand if many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import ClassVar, NamedTuple, final

import numpy as np
import xxhash

from torchrl_ext.base.errors import IntegrityError
from torchrl_ext.data.deltas.blocks import BlockEncoding
from torchrl_ext.data.deltas.streams import Found, StreamPatch
from torchrl_ext.data.deltas.table import ParamTable, unit_of
from torchrl_ext.data.stores.manifest import BLOCK, DIGEST, MANIFEST, DeltaManifest
from torchrl_ext.data.stores.store import Store

__all__ = ["HELD_BYTES", "DeltaFiles", "FileEncoding", "Files", "Payloads", "incomplete"]

FILE_BYTES = 64 << 20
"""About how large a file of blocks is, so that writing runs beside coding."""
HELD_BYTES = 256 << 20
"""Bound on the blocks that are held in memory, of all deltas on a route together."""

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
        found: what changed; its lists are another block's by now.
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
        counted = found._replace(news=())  # which hold what the source made
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


@final
class Payloads:
    """Reads the blocks of deltas, and verifies each.

    Up to `HELD_BYTES` in all are read at once, and need the store no longer. More are read one by one, when they are
    asked for.

    Args:
        store: where the deltas are.

    Attributes:
        nbytes: bytes of all blocks that were added.
    """

    def __init__(self, store: Store) -> None:
        self.store, self.nbytes = store, 0
        self._added: list[tuple[str, DeltaManifest, list[int]]] = []
        self._held: dict[tuple[str, int], memoryview] = {}

    def add(self, folder: str, manifest: DeltaManifest, numbers: list[int]) -> dict[int, Callable[[], memoryview]]:
        """Add blocks of a delta; return for each a call that returns its bytes, from any thread.

        The calls raise IntegrityError where a block is damaged, or is gone from the store; it names a tensor.

        Args:
            folder: of the delta's files.
            manifest: of the delta.
            numbers: of the blocks, in ``manifest.blocks``.
        """
        self._added.append((folder, manifest, numbers))
        self.nbytes += int(manifest.blocks["nbytes"][numbers].sum())
        return {number: partial(self._payload, folder, manifest, number) for number in numbers}

    def read(self) -> None:
        """Read everything, unless it takes more than the bound.

        Raises:
            FileNotFoundError: a delta was collected.
            IntegrityError: a file is missing or too short, or a block is damaged; names the tensor and the file.
        """
        for folder, manifest, numbers in self._added if self.nbytes <= HELD_BYTES else ():
            by_file: dict[int, list[int]] = {}
            for number in numbers:
                by_file.setdefault(int(manifest.blocks["file"][number]), []).append(number)
            for own in by_file.values():
                self._held |= {(folder, number): data for number, data in self._loaded(folder, manifest, own).items()}

    def _payload(self, folder: str, manifest: DeltaManifest, number: int) -> memoryview:
        if (folder, number) in self._held:
            return self._held[folder, number]
        try:
            return self._loaded(folder, manifest, [number])[number]
        except FileNotFoundError as error:
            file = [*manifest.files][manifest.blocks["file"][number]]
            where = f"{self.store.url}/{folder}"
            raise incomplete(where, file, manifest, None, _first(manifest, number)) from error

    def _loaded(self, folder: str, manifest: DeltaManifest, numbers: list[int]) -> dict[int, memoryview]:
        """Return blocks of one file; the file is read as a whole where they are most of it."""
        rows, where = manifest.blocks[numbers], f"{self.store.url}/{folder}"
        file, size = [*manifest.files.items()][rows["file"][0]]
        whole = 2 * int(rows["nbytes"].sum()) > size
        spans = [(0, size)] if whole else list(zip(rows["offset"].tolist(), rows["nbytes"].tolist(), strict=True))
        try:
            read = [memoryview(data) for data in self.store.ranges(f"{folder}/{file}", spans)]
        except FileNotFoundError as error:
            if MANIFEST not in self.store.list(folder):  # collected in between
                raise
            raise incomplete(where, file, manifest, None, _first(manifest, numbers[0])) from error
        found = {}
        for at, (number, row) in enumerate(zip(numbers, rows, strict=True)):
            first, nbytes, stated = (int(row[name]) for name in ("offset", "nbytes", "checksum"))
            payload = read[0][first : first + nbytes] if whole else read[at]
            if len(payload) != nbytes:
                raise incomplete(where, file, manifest, first + len(payload), _first(manifest, number))
            if xxhash.xxh3_64_intdigest(payload) != stated:
                raise IntegrityError(
                    f"tensor {_first(manifest, number)!r} in {where}/{file} is damaged",
                    expected=f"xxh3-64 {stated:016x}, found {xxhash.xxh3_64_hexdigest(payload)}",
                    state=f"nothing of version {manifest.version} was used",
                    hint="let the trainer publish again, and check the disk",
                )
            found[number] = payload
        return found


def _first(manifest: DeltaManifest, number: int) -> str:
    """Return the name of the first tensor of a block."""
    return manifest.table.at(int(manifest.blocks["stream"][number]), int(manifest.blocks["start"][number])).name


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
