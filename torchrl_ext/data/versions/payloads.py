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
from torchrl_ext.base.types import Info
from torchrl_ext.data.deltas.blocks import BlockEncoding
from torchrl_ext.data.deltas.streams import Found
from torchrl_ext.data.deltas.table import ParamTable, SparsePatch, unit_of
from torchrl_ext.data.stores.manifest import BLOCK, DIGEST, MANIFEST, DeltaManifest
from torchrl_ext.data.stores.store import Store

__all__ = [
    "HELD_BYTES",
    "SPAN_BYTES",
    "BlockFiles",
    "Coded",
    "FileEncoding",
    "Files",
    "Payloads",
    "code",
    "damaged",
    "incomplete",
]

FILE_BYTES = 64 << 20
"""About how large a file of blocks is, so that writing runs beside coding."""

Files = Mapping[str, memoryview]
"""The content of every payload file of a delta, by name."""


class Coded(NamedTuple):
    """A block that was looked at, and what changed in it as bytes; none where nothing did.

    Attributes:
        stream, start, size: the block.
        params, words: int32, shape (k,); uint64, shape (k, 2): what is added to the digest of which parameter.
        changed: int64, shape (k,): units of it that changed.
        total: units that the payload changes.
        kind: name of the block codec.
        payload: the block.
    """

    stream: int
    start: int
    size: int
    params: np.ndarray
    words: np.ndarray
    changed: np.ndarray
    total: int
    kind: str
    payload: bytes


def code(table: ParamTable, codec: BlockEncoding, found: Found) -> Coded:
    """Code what was found in a block, in any thread.

    Args:
        table: whose stream it is.
        codec: the encoding.
        found: what changed.
    """
    stream, segments = table.streams[found.stream], found.segments
    cuts = np.searchsorted(found.positions, stream.first[segments.start : segments.stop + 1] - found.start)
    kind, payload = codec.encode(unit_of(stream.dtype), found) if found.positions.size else ("", b"")
    params = stream.params[segments.start : segments.stop]
    place = found.stream, found.start, found.size
    return Coded(*place, params, found.words, np.diff(cuts), found.positions.size, kind, payload)


@final
class BlockFiles:
    """Lays blocks one after the other into files, and gathers what a manifest says of them.

    Args:
        table: whose streams the blocks are of.
        rank: the trainer rank that writes them.
        ranks: as many write files of the version, and count these in turns.

    Attributes:
        sizes: bytes of each file.
        kinds: names of block codecs, as rows number them.
        changed: uint64, shape (parameters,): units that changed.
        words: uint64, shape (parameters, 2): what the change adds to the digests.
    """

    def __init__(self, table: ParamTable, rank: int = 0, ranks: int = 1) -> None:
        self._rank, self._ranks = rank, ranks
        self.sizes: dict[str, int] = {}
        self.kinds: list[str] = []
        self.changed = np.zeros(len(table.params), DIGEST)
        self.words = np.zeros((len(table.params), 2), DIGEST)
        self._rows: list[tuple[int, ...]] = []

    def laid(self, blocks: Iterable[Coded]) -> Iterator[tuple[str, bytes]]:
        """Yield name and content of each file."""
        waiting, size = list[bytes](), 0
        for block in blocks:
            np.add.at(self.words, block.params, block.words)
            np.add.at(self.changed, block.params, block.changed.astype(DIGEST))
            if not block.payload:
                continue
            if block.kind not in self.kinds:
                self.kinds.append(block.kind)
            place = (block.stream, len(self.sizes), self.kinds.index(block.kind), block.start, block.size)
            counts = (block.total, size, len(block.payload), xxhash.xxh3_64_intdigest(block.payload))
            self._rows.append((*place, *counts))
            waiting.append(block.payload)
            size += len(block.payload)
            if size >= FILE_BYTES:
                yield from self._file(waiting, size)
                waiting, size = [], 0
        if waiting:
            yield from self._file(waiting, size)

    def _file(self, waiting: list[bytes], size: int) -> Iterator[tuple[str, bytes]]:
        name = f"delta-{len(self.sizes) * self._ranks + self._rank + 1:05d}.bin"
        self.sizes[name] = size
        yield name, b"".join(waiting)

    @property
    def rows(self) -> np.ndarray:
        """The blocks, of dtype `BLOCK`, in order of stream and start."""
        rows = np.array(self._rows, BLOCK)
        return rows[np.lexsort((rows["start"], rows["stream"]))]


class FileEncoding(ABC):
    """An encoding of whole parameters, many of which lie in each file.

    Attributes:
        name: of the encoding.
    """

    container: ClassVar[str] = "flushes"
    whole_base: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        self.name = name

    def to_json(self) -> Info:
        """Return ``{"name": ...}``, from which `torchrl_ext.data.deltas.blocks.codec_from_json` makes it again."""
        return {"name": self.name}

    @abstractmethod
    def files(self, version: int, patches: Iterable[SparsePatch]) -> Iterator[tuple[str, bytes, list[str]]]:
        """Yield the name of each file of a delta, its content, and the parameters that it changes.

        Args:
            version: to which the delta leads.
            patches: the change of every parameter, in order.

        Raises:
            ConfigError: the files cannot carry a parameter; names it.
        """

    @abstractmethod
    def read(self, manifest: DeltaManifest, files: Files, where: str) -> Mapping[str, SparsePatch]:
        """Return the change of each parameter that changes, by name.

        Args:
            manifest: of the delta.
            files: what it consists of.
            where: the folder, for messages.

        Raises:
            IntegrityError: a file is not what the manifest says; names it and a tensor in it.
        """


def damaged(name: str, path: str, stated: str, found: str, version: int) -> IntegrityError:
    """Return the error for a payload with another xxh3-64 than is stated."""
    return IntegrityError(
        f"tensor {name!r} in {path} is damaged",
        expected=f"xxh3-64 {stated}, found {found}",
        state=f"nothing of version {version} was used",
        hint="let the trainer publish again, and check the disk",
    )


HELD_BYTES = 256 << 20
"""Bound on the payloads in memory, of all deltas on a route together; one larger payload may exceed it."""

SPAN_BYTES = 1 << 20
"""Bound on the neighbouring payloads that are read at once: `HELD_BYTES` have room for a span of each of 256 deltas."""


_GAP_BYTES = 4096  # between two payloads, that are faster read than skipped


@dataclass(kw_only=True, eq=False)
class _Span:
    """Neighbouring payloads of a file, which are read at once: from ``first`` to ``end``, in bytes."""

    manifest: DeltaManifest
    folder: str
    file: str
    first: int
    end: int
    blocks: list[np.void]


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

    @property
    def streamed(self) -> bool:
        """Whether payloads are read from the store when they are asked for."""
        return self.nbytes > HELD_BYTES

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
        for span in () if self.streamed else self._spans:
            by_file.setdefault((span.folder, span.file), []).append(span)
        for spans in by_file.values():
            self._load(spans)

    def _payload(self, span: _Span, block: np.void) -> memoryview:
        with self._lock:
            if span not in self._held:
                used, size = sum(map(len, self._held.values())), span.end - span.first
                while self._held and used + size > HELD_BYTES:
                    used -= len(self._held.pop(next(iter(self._held))))
                try:
                    self._load([span])
                except FileNotFoundError as error:
                    raise incomplete(f"{self.store.url}/{span.folder}", span.file, span.manifest, None) from error
            data = self._held[span] = self._held.pop(span)
        return _bytes_of(block, data, span)

    def _load(self, spans: list[_Span]) -> None:
        """Read spans of one file, and verify the payloads in them."""
        folder, file, manifest = spans[0].folder, spans[0].file, spans[0].manifest
        where = f"{self.store.url}/{folder}"
        try:
            ranges = [(span.first, span.end - span.first) for span in spans]
            read = self.store.ranges(f"{folder}/{file}", ranges)
        except FileNotFoundError as error:
            if MANIFEST not in self.store.list(folder):  # collected in between
                raise
            raise incomplete(where, file, manifest, None) from error
        for span, data in zip(spans, read, strict=True):
            view = memoryview(data)
            for block in span.blocks:
                payload, stated = _bytes_of(block, view, span), int(block["checksum"])
                if len(payload) != block["nbytes"]:
                    raise incomplete(where, file, manifest, span.first + len(data), _name(manifest, block))
                if xxhash.xxh3_64_intdigest(payload) != stated:
                    found, path = xxhash.xxh3_64_hexdigest(payload), f"{where}/{file}"
                    raise damaged(_name(manifest, block), path, f"{stated:016x}", found, manifest.version)
            self._held[span] = view


def _bytes_of(block: np.void, data: memoryview, span: _Span) -> memoryview:
    return data[int(block["offset"]) - span.first :][: int(block["nbytes"])]


def _name(manifest: DeltaManifest, block: np.void) -> str:
    """Return the name of the first tensor that a block changes."""
    stream = manifest.table.streams[block["stream"]]
    return manifest.params[stream.params[stream.within(int(block["start"]), int(block["start"]) + 1)[0]]].name


def incomplete(
    where: str, file: str, manifest: DeltaManifest, found: int | None, name: str | None = None
) -> IntegrityError:
    """Return the error for a file of a delta that is missing or ends early; it names a tensor in the file.

    Args:
        where: the folder, for messages.
        file: its name.
        manifest: of the delta.
        found: the bytes that there are; None where the file is missing.
        name: the tensor; by default the first one that cannot be read.
    """
    if name is None:
        rows = manifest.blocks[manifest.blocks["file"] == [*manifest.files].index(file)]
        lost = rows[rows["offset"] + rows["nbytes"] > (found or 0)]
        placed = (tensor for tensor, one in manifest.placed.items() if one == file)
        name = _name(manifest, lost[0]) if lost.size else next(placed, None)
    if found is None:
        what = f"{where}/{file} is missing" + (f", which holds tensor {name!r}" if name else "")
        expected, hint = "every file that the manifest names", "let the trainer publish again"
    else:
        what = f"{where}/{file} has {found} bytes" + (f", so that tensor {name!r} cannot be read" if name else "")
        expected, hint = (
            f"{manifest.files[file]}, as in the manifest",
            "let the trainer publish again, and check the disk",
        )
    return IntegrityError(what, expected=expected, state=f"nothing of version {manifest.version} was used", hint=hint)
