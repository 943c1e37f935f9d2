"""A delta, open for reading: what it changes, range by range of its streams, in whatever format it was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.codecs.base import codec_from_json
from torchrl_ext.codecs.blocks import KINDS, BlockCodec
from torchrl_ext.codecs.patch import Patch, StepPatch
from torchrl_ext.codecs.rows import RowCodec, row_codec
from torchrl_ext.codecs.streams import StreamPatch
from torchrl_ext.errors import ManifestError
from torchrl_ext.stores.delta_manifest import BLOCKS, ROWS, DeltaManifest
from torchrl_ext.stores.table import ParamTable, Stream
from torchrl_ext.types import Info, ParamMeta
from torchrl_ext.versions.containers import Decode
from torchrl_ext.versions.payloads import Payloads
from torchrl_ext.weights.shards.blocks import Block

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
        changes: what decodes the change of each range, in order; several of one range do not meet.
        changed: bool, shape (parameters,): which parameters change.
    """

    def __init__(self, where: str, manifest: DeltaManifest, table: ParamTable) -> None:
        self.where, self.manifest, self.table = where, manifest, table
        self.changed = manifest.changed > 0
        self.changes: dict[Range, list[_Change]] = {}

    @classmethod
    def of_blocks(cls, payloads: Payloads, folder: str, manifest: DeltaManifest, wanted: Wanted | None) -> OpenDelta:
        """Return the delta of which blocks, or the payloads of formats 1 to 3, are read as far as they are wanted.

        Raises:
            ManifestError: a kind of block, or an encoding, that is not known here.
        """
        ours = manifest.container == BLOCKS
        found = cls(
            f"{payloads.store.url}/{folder}", manifest, manifest.table if ours else ParamTable.of(manifest.params)
        )
        numbers = [number for number in range(manifest.blocks.size) if _is_wanted(manifest, number, wanted)]
        calls = payloads.add(folder, manifest, numbers)
        codecs: list[Any] = [_kind(info) if ours else row_codec(info) for info in manifest.codecs]
        for number in numbers:
            block = manifest.blocks[number]
            stream, start, size = (int(block[name]) for name in Range._fields)
            codec, payload = codecs[block["codec"]], calls[number]
            if ours:
                change = partial(_of_block, codec, payload, found.table, Range(stream, start, size))
                found.changes.setdefault(Range(stream, start, size), []).append(change)
            else:
                part = manifest.table.streams[stream]
                meta = found.table.params[part.params[0]]
                own = ParamMeta(meta.name, meta.dtype, part.box(0).shape)
                found._add(partial(_of_payload, codec, payload, own), part)
        return found

    @classmethod
    def of_tensors(cls, where: str, manifest: DeltaManifest, decoders: Mapping[str, Decode]) -> OpenDelta:
        """Return the delta of another library's container, which decodes the change of each parameter."""
        found = cls(where, manifest, ParamTable.of(manifest.params))
        for name, decode in decoders.items():
            ((stream, segment),) = found.table.places[number := found.table.number[name]]
            found.changed[number] = True  # of files without a manifest of ours this is known only now
            found._add(decode, found.table.streams[stream], segment)
        return found

    def _add(self, decode: Decode, part: Stream, segment: int = 0) -> None:
        """Add the change of a segment: all of a parameter, or a box of it, which becomes a change of the parameter."""
        param = int(part.params[segment])
        ((stream, number),) = self.table.places[param]
        first, end = self.table.streams[stream].first[number : number + 2].tolist()
        within = Range(stream, first, end - first)
        change = partial(_of_parameter, self.table, within, self.table.params[param], decode, part, segment)
        self.changes.setdefault(within, []).append(change)

    def names(self, within: Range) -> Iterator[str]:
        """Yield the parameters that change in a range."""
        stream = self.table.streams[within.stream]
        for segment in stream.within(within.start, within.start + within.size):
            param = stream.params[segment]
            if self.changed[param]:
                yield self.table.params[param].name

    def decode(self, within: Range, old: np.ndarray | None) -> list[StreamPatch]:
        """Return what changes in a range: patches that do not meet; none where nothing does.

        Raises:
            IntegrityError: a payload is damaged, or cannot be decoded without ``old``.
        """
        return [change(old) for change in self.changes.get(within, ())]


def needs_old(manifest: DeltaManifest) -> bool:
    """Return whether something in a delta is decoded with the old units of its range."""
    if manifest.container == BLOCKS:
        return any(_kind(info).whole_base for info in manifest.codecs)
    read = row_codec if manifest.container == ROWS else codec_from_json
    return any(read(info).whole_base for info in manifest.codecs)


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
        blocks = wanted(manifest.params[stream.params[segment]].name)
        if blocks is None or any(stream.has(segment, one, start, stop) for one in blocks):
            return True
    return False


def _of_block(
    codec: BlockCodec, payload: Callable[[], memoryview], table: ParamTable, within: Range, old: np.ndarray | None
) -> StreamPatch:
    return codec.decode(payload(), table, *within, old if codec.whole_base else None)


def _of_payload(codec: RowCodec, payload: Callable[[], memoryview], meta: ParamMeta, base: Tensor | None) -> Patch:
    return codec.decode(payload(), meta, base)


def _of_parameter(
    table: ParamTable,
    within: Range,
    meta: ParamMeta,
    decode: Decode,
    part: Stream,
    segment: int,
    old: np.ndarray | None,
) -> StreamPatch:
    """Decode the change of a segment, and return it as one of the range that is its parameter."""
    box, base = part.box(segment), None
    if old is not None:
        base = torch.from_numpy(old.view(np.uint8)).view(meta.dtype).reshape(meta.shape)
        base = base[box.within(Block.whole(meta.shape))].contiguous()
    patch = decode(base)
    positions = part.positions(segment, patch.indices)
    return StreamPatch(table, *within, positions, patch.values, isinstance(patch, StepPatch))
