"""Reading a delta that trainer ranks wrote block by block: only the parts that are wanted, and those as one patch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from torch import Tensor

from torchrl_ext.codecs.base import Codec, codec_from_json
from torchrl_ext.codecs.patch import DensePatch, Patch, SparsePatch, StepPatch, index_dtype
from torchrl_ext.codecs.units import unit_of
from torchrl_ext.errors import IntegrityError
from torchrl_ext.stores import Store
from torchrl_ext.stores.manifest import DeltaManifest, DeltaPart
from torchrl_ext.types import ParamMeta
from torchrl_ext.versions.containers import Decode, compare_payload
from torchrl_ext.weights.shards.blocks import Block

__all__ = ["CONTAINER", "Wanted", "flat_positions", "incomplete", "read_parts"]

CONTAINER = "shards"
"""The name of the layout in manifests: as ``packed``, each rank with files of its own."""

Wanted = Callable[[str], Sequence[Block] | None]
"""Says which blocks of a parameter are wanted; None where all of it is."""


class _Part(NamedTuple):
    """A part of a parameter's change, which was read."""

    block: Block
    codec: Codec
    payload: memoryview


@dataclass
class _Span:
    """Neighbouring payloads of a file, which are read at once: from ``first`` to ``end``, in bytes."""

    first: int
    end: int
    rows: list[tuple[ParamMeta, DeltaPart]]


def read_parts(store: Store, folder: str, manifest: DeltaManifest, wanted: Wanted) -> tuple[Mapping[str, Decode], int]:
    """Read the parts of a delta that meet what is wanted.

    Args:
        store: where it is.
        folder: of its files there.
        manifest: of the delta.
        wanted: which blocks of each parameter.

    Returns:
        For each parameter of which something was read a call that decodes that; and how many bytes were read.

    Raises:
        FileNotFoundError: a file is gone.
        IntegrityError: a file is shorter than the manifest says, or a part is damaged; names the tensor and the file.
        ManifestError: an encoding that is not known here.
    """
    where, codecs = f"{store.url}/{folder}", list(map(codec_from_json, manifest.codecs))
    by_file: dict[str, list[tuple[ParamMeta, DeltaPart]]] = {}
    for row in manifest.params:
        blocks = wanted(row.meta.name)
        for part in row.parts:
            if blocks is None or any(_block(part).meet(block) for block in blocks):
                by_file.setdefault(part.file, []).append((row.meta, part))
    found, total = dict[str, list[_Part]](), 0
    for file, rows in by_file.items():
        spans = _spans(rows, store.gap_bytes)
        read = store.ranges(f"{folder}/{file}", [(span.first, span.end - span.first) for span in spans])
        for span, data in zip(spans, read, strict=True):
            total += len(data)
            view = memoryview(data)
            for meta, part in span.rows:
                payload = view[part.offset - span.first :][: part.nbytes]
                if len(payload) != part.nbytes:
                    raise incomplete(where, file, manifest, span.first + len(data), meta.name)
                compare_payload(payload, codecs[part.codec], part, meta, where, manifest.version)
                found.setdefault(meta.name, []).append(_Part(_block(part), codecs[part.codec], payload))
    metas = {row.meta.name: row.meta for row in manifest.params}
    return {name: partial(_decode, metas[name], parts) for name, parts in found.items()}, total


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
        rows = [(row, one) for row in manifest.params for one in row.payloads if one.file == file]
        lost = (row.meta.name for row, one in rows if one.offset + one.nbytes > (found or 0))
        name = next(lost, rows[0][0].meta.name if rows else None)
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


def flat_positions(meta: ParamMeta, block: Block, indices: np.ndarray) -> np.ndarray:
    """Return flat unit positions in a parameter for those in a block of it, which is taken as a contiguous tensor.

    Args:
        meta: the parameter.
        block: which of its elements.
        indices: shape (k,), increasing; the result increases too.
    """
    parts = unit_of(meta.dtype).parts
    shape, starts, sizes = (*meta.shape, parts), (*block.start, 0), (*block.shape, parts)
    runs, offset, stride = list[tuple[int, int]](), 0, 1  # sizes and strides of dimensions, the innermost first
    for whole, first, size in zip(reversed(shape), reversed(starts), reversed(sizes), strict=True):
        if runs and runs[-1][0] * runs[-1][1] == stride:  # the one inside runs on into this one
            runs[-1] = runs[-1][0] * size, runs[-1][1]
        elif size != 1:
            runs.append((size, stride))
        offset, stride = offset + first * stride, stride * whole
    left, found = indices.astype(np.int64), np.full(indices.size, offset, np.int64)
    for size, stride in runs[:-1]:
        left, place = np.divmod(left, size)
        found += place * stride
    found += left * (runs[-1][1] if runs else 1)
    return found.astype(index_dtype(meta.numel * parts))


def _block(part: DeltaPart) -> Block:
    return Block(part.start, tuple(first + size for first, size in zip(part.start, part.sizes, strict=True)))


def _spans(rows: list[tuple[ParamMeta, DeltaPart]], gap_bytes: int) -> list[_Span]:
    spans: list[_Span] = []
    for meta, part in sorted(rows, key=lambda row: row[1].offset):
        if not spans or part.offset - spans[-1].end > gap_bytes:
            spans.append(_Span(part.offset, part.offset, []))
        spans[-1].end = max(spans[-1].end, part.offset + part.nbytes)
        spans[-1].rows.append((meta, part))
    return spans


def _decode(meta: ParamMeta, parts: Sequence[_Part], base: Tensor | None) -> Patch:
    """Decode the parts of one parameter, and return them as one patch of the parameter."""
    whole, patches = Block.whole(meta.shape), list[tuple[Block, Patch]]()
    for block, codec, payload in parts:
        own = None if base is None else base[block.within(whole)].contiguous()
        patches.append((block, codec.decode(payload, ParamMeta(meta.name, meta.dtype, block.shape), own)))
    if len(patches) == 1 and patches[0][0] == whole:
        return patches[0][1]
    kinds = {isinstance(patch, StepPatch) for _, patch in patches}
    if len(kinds) > 1:
        raise IntegrityError(
            f"some parts of {meta.name!r} are steps from the base, and others are new bits",
            expected="one of both, as every trainer rank writes them",
            state="nothing was written",
        )
    where, values = list[np.ndarray](), list[np.ndarray]()
    for block, patch in patches:
        local = np.arange(patch.values.size) if isinstance(patch, DensePatch) else patch.indices
        where.append(flat_positions(meta, block, local))
        values.append(patch.values)
    indices, bits = np.concatenate(where), np.concatenate(values)
    if indices.size and not (indices[1:] > indices[:-1]).all():  # blocks that lie side by side take turns
        order = np.argsort(indices, kind="stable")
        indices, bits = indices[order], bits[order]
    return StepPatch(meta, indices, bits) if kinds == {True} else SparsePatch(meta, indices, bits)
