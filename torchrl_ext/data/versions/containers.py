"""A delta that is being written: its blocks or whole parameters in files, and the manifest last."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, NamedTuple, final

import numpy as np
import xxhash

from torchrl_ext.base.errors import IntegrityError
from torchrl_ext.base.types import Info
from torchrl_ext.data.deltas.blocks import BlockEncoding
from torchrl_ext.data.deltas.patch import SparsePatch
from torchrl_ext.data.deltas.streams import Found
from torchrl_ext.data.deltas.table import ParamTable
from torchrl_ext.data.deltas.units import unit_of
from torchrl_ext.data.stores.delta_manifest import BLOCK, DIGEST, DeltaManifest

__all__ = [
    "BlockFiles",
    "Coded",
    "FileEncoding",
    "Files",
    "code",
    "damaged",
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
        """Return ``{"name": ...}``, from which `torchrl_ext.data.deltas.codec.codec_from_json` makes it again."""
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
