"""``python -m tests.bench coding``: blocks of changes, beside the entropy of the changes and a copy of the units.

The bound of `ulp` is that of Bernoulli positions and of steps by their order-0 entropy; the bound of `context` is the
same for each exponent of the base apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.bench.data import bounds, real_chain
from tests.bench.frame import say
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.cli.bench.data import model_shapes, synthetic_pair
from torchrl_ext.cli.bench.runner import rounds
from torchrl_ext.data.deltas.blocks import KINDS, decode_block, encode_block
from torchrl_ext.data.deltas.streams import Found, StreamPatch
from torchrl_ext.data.deltas.table import ParamTable, unit_of, units

_BLOCK = 1 << 22
_DENSITIES = (0.001, 0.01, 0.03, 0.1, 0.5, 1.0)
_Pair = tuple[Tensor, Tensor]


def measure(*, repeats: int = 7, hidden: int = 384, steps: int = 40) -> dict[str, Any]:
    """Code the changes of whole models of width --hidden as one bucket each, from lists of changes; one thread.

    A model is trained for --steps before it is fine-tuned.
    """
    cases: dict[str, Callable[[], _Pair]] = {}
    for density in _DENSITIES:
        cases[f"{density:.1%}"] = partial(_scattered, density, hidden)
    chain = real_chain(hidden=256, layers=4, syncs=4, pretrain_steps=steps)
    for count in (1, 4):
        old, new = chain[-1 - count], chain[-1]
        flat = [torch.cat([side[name].reshape(-1) for name in new]) for side in (old, new)]
        cases[f"fine-tuning, {count} steps"] = partial(lambda *pair: pair, *flat)
    found = {}
    for name, make in cases.items():
        say(name)
        found[name] = _case(*make(), repeats)
    return found


def _scattered(density: float, hidden: int) -> _Pair:
    pair = synthetic_pair(model_shapes(4, hidden, 8000), density)
    old, new = (torch.cat([each.reshape(-1) for each in side]) for side in list(zip(*pair, strict=True))[1:])
    return old, new


def _case(before: Tensor, after: Tensor, repeats: int) -> Any:
    old, new, dtype, blocks = units(before), units(after), before.dtype, []
    unit = unit_of(dtype)
    for start in range(0, old.size, _BLOCK):
        a, b = old[start : start + _BLOCK], new[start : start + _BLOCK]
        where = np.flatnonzero(a != b).astype(np.int32)
        blocks.append(Found(0, start, where, a[where], b[where], range(1), np.zeros((1, 2), np.uint64), a))
    table, changed = ParamTable.of([ParamMeta("w", dtype, old.shape)]), sum(block.positions.size for block in blocks)

    def write(kind: str) -> list[bytes]:
        return [encode_block(kind, unit, block) for block in blocks]

    coded = {kind: write(kind) for kind in KINDS}

    def read(kind: str) -> list[StreamPatch]:
        rows = zip(coded[kind], blocks, strict=True)
        return [decode_block(kind, data, table, 0, own.start, own.size, own.old) for data, own in rows]

    for kind in KINDS:
        for block, patch in zip(blocks, read(kind), strict=True):
            now = block.old.copy()
            patch.apply(now)
            assert np.array_equal(now, new[block.start : block.start + now.size])
    target = np.empty_like(old)
    ways: dict[str, Callable[[], object]] = {"copy": partial(np.copyto, target, old)}
    ways |= {f"{kind} {way}": partial(call, kind) for way, call in (("write", write), ("read", read)) for kind in KINDS}
    spent = {way: statistics.median(taken) for way, taken in rounds(ways, repeats).items()}
    _, plain, conditional = bounds(before, after)
    limits = {"ulp": plain, "context": conditional}
    return {
        kind: {
            "density": changed / old.size,
            "bits": 8 * sum(map(len, coded[kind])) / changed,
            "over_bound": 8 * sum(map(len, coded[kind])) / limits[kind] if kind in limits else None,
            "ns": {way: spent[f"{kind} {way}"] / changed * 1e9 for way in ("write", "read")},
            "of_copy": {way: spent["copy"] / spent[f"{kind} {way}"] for way in ("write", "read")},
        }
        for kind in KINDS
    }
