"""Files of deltas, which are safetensors files of blocks: read at once, or on demand if they are many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import final

import numpy as np
import torch
import xxhash

from torchrl_ext.base.errors import IntegrityError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.deltas.blocks import BlockEncoding
from torchrl_ext.data.deltas.streams import Found
from torchrl_ext.data.deltas.table import ParamTable, unit_of
from torchrl_ext.data.stores.manifest import BLOCK, DIGEST, MANIFEST, DeltaManifest
from torchrl_ext.data.stores.store import Store
from torchrl_ext.data.stores.tensorfile import Layout

__all__ = ["HELD_BYTES", "DeltaFiles", "read_blocks"]

FILE_BYTES = 64 << 20
"""About how large a file of blocks is, so that writing runs beside coding."""
HELD_BYTES = 256 << 20
"""Bound on the blocks that are held in memory, of all deltas on a route together."""

Coded = tuple[Found, np.ndarray, str, bytes]
"""A block that was looked at; the units that changed, int64, shape (segments,); and, where some did, kind and bytes."""


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
    """

    def __init__(self, table: ParamTable, encoding: BlockEncoding, rank: int = 0, ranks: int = 1) -> None:
        self._table, self._encoding, self._rank, self._ranks = table, encoding, rank, ranks
        self.sizes: dict[str, int] = {}
        self.kinds: list[str] = []
        self.changed = np.zeros(len(table.params), DIGEST)
        self.words = np.zeros((len(table.params), 2), DIGEST)
        self._rows: list[tuple[int, ...]] = []

    def code(self, found: Found) -> Coded:
        """Code a block; called from any thread (`torchrl_ext.data.deltas.streams.find`)."""
        stream, segments, positions = self._table.streams[found.stream], found.segments, found.positions
        cuts = np.searchsorted(positions, stream.first[segments.start : segments.stop + 1] - found.start)
        kind, payload = self._encoding.encode(unit_of(stream.dtype), found) if positions.size else ("", b"")
        return found._replace(news=()), np.diff(cuts), kind, payload  # `news` hold what the source made

    def files(self, blocks: Iterable[Coded]) -> Iterator[tuple[str, bytes]]:
        """Yield name and content of each file; ``blocks`` are in the order of each stream."""
        waiting, size = list[Coded](), 0
        for block in blocks:
            found, changed, _, payload = block
            params = self._table.streams[found.stream].params[found.segments.start : found.segments.stop]
            self.words[params] += found.words
            self.changed[params] += changed.astype(DIGEST)
            if payload:
                waiting.append(block)
                size += len(payload)
            if size >= FILE_BYTES:
                yield self._file(waiting)
                waiting, size = [], 0
        if waiting:
            yield self._file(waiting)

    def _file(self, blocks: Sequence[Coded]) -> tuple[str, bytes]:
        name = f"delta-{len(self.sizes) * self._ranks + self._rank + 1:05d}.safetensors"
        names = [f"{found.stream}.{found.start}" for found, *_ in blocks]
        pairs = zip(names, blocks, strict=True)
        layout = Layout.of(name, [ParamMeta(one, torch.uint8, (len(payload),)) for one, (*_, payload) in pairs])
        for one, (found, changed, kind, payload) in zip(names, blocks, strict=True):
            if kind not in self.kinds:
                self.kinds.append(kind)
            place = found.stream, len(self.sizes), self.kinds.index(kind), found.start, found.size
            bytes_of = layout.offsets[one], len(payload), xxhash.xxh3_64_intdigest(payload)
            self._rows.append((*place, int(changed.sum()), *bytes_of))
        self.sizes[name] = layout.nbytes
        return name, b"".join([layout.header, *(payload for *_, payload in blocks)])

    @property
    def rows(self) -> np.ndarray:
        """The blocks, of dtype `BLOCK`, in order of stream and start."""
        rows = np.array(self._rows, BLOCK)
        return rows[np.lexsort((rows["start"], rows["stream"]))]


def read_blocks(
    store: Store, folder: str, manifest: DeltaManifest, numbers: Sequence[int], nbytes: int
) -> dict[int, Callable[[], memoryview]]:
    """Read blocks of a delta; return for each a call that returns its bytes, verified, from any thread.

    Where the blocks of a route are more than `HELD_BYTES`, the calls read them one by one. They raise IntegrityError
    where a block is damaged, or is gone from the store; it names a tensor.

    Args:
        store: where the delta is.
        folder: of its files.
        manifest: of the delta.
        numbers: of the blocks, in ``manifest.blocks``.
        nbytes: of all blocks on the route.

    Raises:
        FileNotFoundError: the delta was collected.
        IntegrityError: a file is missing or too short, or a block is damaged; names the tensor and the file.
    """
    if nbytes > HELD_BYTES:
        return {number: partial(_read_later, store, folder, manifest, number) for number in numbers}
    by_file: dict[int, list[int]] = {}
    for number in numbers:
        by_file.setdefault(int(manifest.blocks["file"][number]), []).append(number)
    read = [_loaded(store, folder, manifest, own) for own in by_file.values()]
    return {number: data.toreadonly for found in read for number, data in found.items()}


def _read_later(store: Store, folder: str, manifest: DeltaManifest, number: int) -> memoryview:
    try:
        return _loaded(store, folder, manifest, [number])[number]
    except FileNotFoundError as error:
        file = [*manifest.files][manifest.blocks["file"][number]]
        raise _incomplete(f"{store.url}/{folder}", file, manifest, None, number) from error


def _loaded(store: Store, folder: str, manifest: DeltaManifest, numbers: list[int]) -> dict[int, memoryview]:
    """Return blocks of one file; the file is read as a whole where they are most of it."""
    rows, where = manifest.blocks[numbers], f"{store.url}/{folder}"
    file, size = [*manifest.files.items()][rows["file"][0]]
    whole, begin = 2 * int(rows["nbytes"].sum()) > size, int(rows["offset"].min())
    spans = [(begin, size - begin)] if whole else rows[["offset", "nbytes"]].tolist()
    try:
        read = [memoryview(data) for data in store.ranges(f"{folder}/{file}", spans)]
    except FileNotFoundError as error:
        if MANIFEST not in store.list(folder):  # collected in between
            raise
        raise _incomplete(where, file, manifest, None, numbers[0]) from error
    found = {}
    for at, (number, row) in enumerate(zip(numbers, rows, strict=True)):
        first, nbytes, stated = (int(row[name]) for name in ("offset", "nbytes", "checksum"))
        payload = read[0][first - begin :][:nbytes] if whole else read[at]
        if len(payload) != nbytes:
            raise _incomplete(where, file, manifest, first + len(payload), number)
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


def _incomplete(where: str, file: str, manifest: DeltaManifest, found: int | None, number: int) -> IntegrityError:
    """Return the error for a file that is missing or ends early, after ``found`` bytes, before block ``number``."""
    what = "is missing" if found is None else f"has {found} bytes"
    return IntegrityError(
        f"{where}/{file} {what}, so that tensor {_first(manifest, number)!r} cannot be read",
        expected=f"{manifest.files[file]} bytes, as in the manifest",
        state=f"nothing of version {manifest.version} was used",
        hint="let the trainer publish again, and check the disk",
    )
