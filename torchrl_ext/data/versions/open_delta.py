"""A delta, open for reading: what it changes, range by range of its streams, in whatever container it lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from torchrl_ext.base.errors import ManifestError
from torchrl_ext.base.types import Info
from torchrl_ext.data.deltas.blocks import KINDS, BlockCodec
from torchrl_ext.data.deltas.streams import StreamPatch
from torchrl_ext.data.deltas.table import ParamTable, SparsePatch, unit_bytes
from torchrl_ext.data.stores.manifest import BLOCKS, DeltaManifest
from torchrl_ext.data.versions.payloads import Payloads
from torchrl_ext.data.weights.blocks import Block

__all__ = ["OpenDelta", "Range", "Wanted", "needs_old"]

Wanted = Callable[[str], Sequence[Block] | None]
"""Says which blocks of a parameter are wanted; None where all of it is."""

_Change = Callable[[np.ndarray | None], StreamPatch]
"""Decodes what changes in a range; takes the old units of it, where they are known."""


class Range(NamedTuple):
    """A range of a stream, in units."""

    stream: int
    start: int
    size: int


class OpenDelta:
    """What one delta changes.

    Attributes:
        where: its folder, for messages.
        manifest: of the delta.
        table: whose streams the ranges are of.
        changes: what decodes the change of each range.
        changed: bool, shape (parameters,): which parameters change.
    """

    def __init__(self, where: str, manifest: DeltaManifest) -> None:
        self.where, self.manifest, self.table = where, manifest, manifest.table
        self.changed = manifest.changed > 0
        self.changes: dict[Range, _Change] = {}

    @classmethod
    def of_blocks(cls, payloads: Payloads, folder: str, manifest: DeltaManifest, wanted: Wanted | None) -> OpenDelta:
        """Return the delta of which blocks are read as far as they are wanted.

        Raises:
            ManifestError: a kind of block that is not known here.
        """
        found = cls(f"{payloads.store.url}/{folder}", manifest)
        numbers = [number for number in range(manifest.blocks.size) if _is_wanted(manifest, number, wanted)]
        calls = payloads.add(folder, manifest, numbers)
        codecs = [_kind(info) for info in manifest.codecs]
        for number in numbers:
            block = manifest.blocks[number]
            within = Range(*(int(block[name]) for name in Range._fields))
            found.changes[within] = partial(_of_block, codecs[block["codec"]], calls[number], found.table, within)
        return found

    @classmethod
    def of_patches(cls, where: str, manifest: DeltaManifest, patches: Mapping[str, SparsePatch]) -> OpenDelta:
        """Return the delta of which the change of each parameter is read."""
        found = cls(where, manifest)
        streams, segments = found.table.place
        for name, patch in patches.items():
            stream, segment = streams[number := found.table.number[name]], segments[number]
            first, end = found.table.streams[stream].first[segment : segment + 2].tolist()
            within = Range(stream, first, end - first)
            change = StreamPatch(found.table, *within, patch.indices, patch.values, False)
            found.changes[within] = partial(_as_read, change)
        return found

    def names(self, within: Range) -> Iterator[str]:
        """Yield the parameters that change in a range."""
        stream = self.table.streams[within.stream]
        for segment in stream.within(within.start, within.start + within.size):
            param = stream.params[segment]
            if self.changed[param]:
                yield self.table.params[param].name

    def decode(self, within: Range, old: np.ndarray | None) -> StreamPatch | None:
        """Return what changes in a range; None where nothing does.

        Raises:
            IntegrityError: a payload is damaged, or cannot be decoded without ``old``.
        """
        return self.changes[within](old) if within in self.changes else None


def needs_old(manifest: DeltaManifest) -> bool:
    """Return whether something in a delta is decoded with the old units of its range."""
    return manifest.container == BLOCKS and any(_kind(info).whole_base for info in manifest.codecs)


def _kind(info: Info) -> BlockCodec:
    kind = KINDS.get(info["name"])
    if kind is None:
        raise ManifestError(f"a delta has blocks of kind {info['name']!r}", expected=f"one of {', '.join(KINDS)}")
    return kind


def _is_wanted(manifest: DeltaManifest, number: int, wanted: Wanted | None) -> bool:
    if wanted is None:
        return True
    block = manifest.blocks[number]
    stream, start = manifest.table.streams[block["stream"]], int(block["start"])
    stop = start + int(block["size"])
    for segment in stream.within(start, stop):
        meta, scale = manifest.params[stream.params[segment]], stream.dtype.itemsize // unit_bytes(stream.dtype)
        blocks, first = wanted(meta.name), int(stream.first[segment])
        spans = (_span(one, meta.shape) for one in blocks or ())
        if blocks is None or any(first + scale * low < stop and start < first + scale * high for low, high in spans):
            return True
    return False


def _span(block: Block, shape: Sequence[int]) -> tuple[int, int]:
    """Return the first element of a block, and the one behind its last, in the C order of its parameter."""
    low = last = 0
    for first, stop, size in zip(*block, shape, strict=True):
        low, last = low * size + first, last * size + stop - 1
    return low, last + 1


def _of_block(
    codec: BlockCodec, payload: Callable[[], memoryview], table: ParamTable, within: Range, old: np.ndarray | None
) -> StreamPatch:
    return codec.decode(payload(), table, *within, old if codec.whole_base else None)


def _as_read(change: StreamPatch, old: np.ndarray | None) -> StreamPatch:
    return change
