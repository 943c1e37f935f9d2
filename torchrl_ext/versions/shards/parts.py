"""Decoding the parts of a delta that are wanted, in whatever blocks trainer ranks wrote them, as one patch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from torch import Tensor

from torchrl_ext.codecs.base import Codec, codec_from_json
from torchrl_ext.codecs.patch import DensePatch, Patch, SparsePatch, StepPatch, index_dtype
from torchrl_ext.codecs.units import unit_of
from torchrl_ext.errors import IntegrityError
from torchrl_ext.stores.manifest import DeltaManifest, DeltaParam, DeltaPart
from torchrl_ext.types import ParamMeta
from torchrl_ext.versions.containers import Decode
from torchrl_ext.versions.payloads import Payloads
from torchrl_ext.weights.shards.blocks import Block

__all__ = ["CONTAINER", "Wanted", "flat_positions", "read_parts"]

CONTAINER = "shards"
"""The name of the layout in manifests: as ``packed``, each rank with files of its own."""

Wanted = Callable[[str], Sequence[Block] | None]
"""Says which blocks of a parameter are wanted; None where all of it is."""


class _Part(NamedTuple):
    """A part of a parameter's change; ``payload`` returns its bytes."""

    block: Block
    codec: Codec
    payload: Callable[[], memoryview]


def read_parts(payloads: Payloads, folder: str, manifest: DeltaManifest, wanted: Wanted) -> Mapping[str, Decode]:
    """Return what decodes the payloads of a delta that meet what is wanted.

    Args:
        payloads: takes the payloads, and reads them.
        folder: of the delta's files.
        manifest: of the delta.
        wanted: which blocks of each parameter.

    Returns:
        For each parameter of which something is wanted, a call that decodes that.

    Raises:
        ManifestError: an encoding that is not known here.
    """
    codecs = list(map(codec_from_json, manifest.codecs))
    rows: list[tuple[ParamMeta, DeltaParam | DeltaPart, Codec]] = []
    for row in manifest.params:
        blocks = wanted(row.meta.name)
        for one in row.payloads:
            if blocks is None or any(_block(row.meta, one).meet(block) for block in blocks):
                rows.append((row.meta, one, codecs[one.codec]))
    found: dict[str, tuple[ParamMeta, list[_Part]]] = {}
    for meta, one, codec, payload in payloads.add(folder, manifest, rows):
        found.setdefault(meta.name, (meta, []))[1].append(_Part(_block(meta, one), codec, payload))
    return {name: partial(_decode, *row) for name, row in found.items()}


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


def _block(meta: ParamMeta, one: DeltaParam | DeltaPart) -> Block:
    if isinstance(one, DeltaParam):
        return Block.whole(meta.shape)
    return Block(one.start, tuple(first + size for first, size in zip(one.start, one.sizes, strict=True)))


def _decode(meta: ParamMeta, parts: Sequence[_Part], base: Tensor | None) -> Patch:
    """Decode the parts of one parameter, and return them as one patch of the parameter."""
    whole, patches = Block.whole(meta.shape), list[tuple[Block, Patch]]()
    for block, codec, payload in parts:
        own = None if base is None else base[block.within(whole)].contiguous()
        patches.append((block, codec.decode(payload(), ParamMeta(meta.name, meta.dtype, block.shape), own)))
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
