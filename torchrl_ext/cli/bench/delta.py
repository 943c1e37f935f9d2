"""``torchrl-ext bench delta``: size and speed of encodings, each beside its reference in the same run.

Data: pairs of bfloat16 models, a share of whose elements differs. References: a plain copy of the same bytes, xor in
zstd with a checksum of every tensor (what others publish), and int32 + bf16 (what most others send).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import xxhash
import zstandard
from torch import Tensor

from torchrl_ext.base.registry import encodings
from torchrl_ext.base.types import Info, ParamMeta
from torchrl_ext.cli.bench.data import SIZES, Pair, synthetic_pair
from torchrl_ext.cli.bench.runner import ratio, rounds
from torchrl_ext.data.deltas.streams import find, worker_threads
from torchrl_ext.data.deltas.table import ParamTable, units
from torchrl_ext.data.transports.delta import DeltaTransport
from torchrl_ext.data.versions.owned import FlatCopies
from torchrl_ext.data.versions.payloads import DeltaFiles

__all__ = ["OTHERS", "OURS", "changes", "compare", "measure"]

OURS = ("ulp", "context")
"""Kinds of blocks whose speed is measured."""
_ENCODINGS = (*OURS, "auto", "deltas_zstd")
_POOLED = 1 << 16  # elements of a tensor on average, from which threads pay off for layouts that code tensor by tensor

Layout = tuple[Callable[[str, Tensor, Tensor], Any], Callable[[list[Any]], int]]
"""What is done with each tensor (its name, before, after), and the bytes of all results."""


def measure(size: str, densities: Sequence[float], repeats: int) -> Info:
    """Return what `compare` finds, by density: shares of the elements that change, 0 to 1; ``size`` is of `SIZES`."""
    found: Info = {"size": size, "threads": worker_threads(), "torch": torch.__version__}
    return found | {f"{density:.1%}": compare(synthetic_pair(SIZES[size], density), repeats) for density in densities}


def changes(name: str, old: Tensor, new: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the flat places of what changed in a bfloat16 tensor, int32, and the new bits there."""
    before, after = units(old).reshape(-1), units(new).reshape(-1)
    where = np.flatnonzero(before != after)
    return where.astype(np.int32), after[where]


def _xor(name: str, old: Tensor, new: Tensor) -> bytes:
    """Return what others publish of a tensor: both versions' difference in zstd, and the checksum of the new one."""
    before, after = (units(tensor).reshape(-1).view(np.uint8) for tensor in (old, new))
    xxhash.xxh3_128_digest(after.data)
    return zstandard.ZstdCompressor(level=1).compress((before ^ after).data)


OTHERS: Mapping[str, Layout] = {
    "int32 + bf16": (changes, lambda found: sum(where.nbytes + values.nbytes for where, values in found)),
    "xor + zstd": (_xor, lambda found: sum(map(len, found))),
}


def compare(pair: Pair, repeats: int, others: Mapping[str, Layout] = OTHERS) -> Info:
    """Count the bytes of every layout with all framing, and time each way to find and code the changes, in turns.

    Every way has the same threads. Ours also sums a digest of every tensor; ``xor + zstd`` a checksum of every tensor.

    Args:
        pair: bfloat16.
        repeats: rounds.
        others: layouts beside ours.

    Returns:
        JSON-safe: ``bits_per_changed`` and ``bytes`` by layout; ``seconds`` by way, ``copy`` among them; ratios.
    """
    total = sum(new.numel() for _, _, new in pair)
    changed = sum(changes(*row)[0].size for row in pair)
    targets = {name: torch.zeros_like(new) for name, _, new in pair}  # touched, so that no page fault is timed
    olds = FlatCopies(ParamTable.of([ParamMeta.of(name, old) for name, old, _ in pair]), pinned=False)
    for (_, old, _), copy in zip(pair, olds.by_name().values(), strict=True):
        copy.copy_(old)

    def over(work: Callable[[str, Tensor, Tensor], Any]) -> list[Any]:
        if total < _POOLED * len(pair):  # a pool would take longer
            return list(itertools.starmap(work, pair))
        with ThreadPoolExecutor(worker_threads()) as pool:
            return list(pool.map(work, *zip(*pair, strict=True)))

    def theirs(layout: Layout) -> int:
        return layout[1](over(layout[0]))

    def ours(kind: str) -> int:
        rows = zip(*olds.table.place, (new for _, _, new in pair), strict=True)
        made = DeltaFiles(olds.table, encodings.make(kind))
        blocks = find(olds.table, olds.bits, rows, made.code, threads=worker_threads())
        return sum(len(data) for _, data in made.files(1, blocks))

    sizes = {name: theirs(layout) for name, layout in others.items()}
    sizes |= {name: _published_bytes(pair, name) for name in _ENCODINGS}
    ways: dict[str, Callable[[], object]] = {
        "copy": lambda: over(lambda name, _, new: np.copyto(units(targets[name]), units(new))),
        **{name: partial(theirs, layout) for name, layout in others.items()},
        **{kind: partial(ours, kind) for kind in OURS},
    }
    taken = rounds(ways, repeats)
    return {
        "parameters": total,
        "tensors": len(pair),
        "density": changed / total,
        "bytes": sizes,
        "bits_per_changed": {name: 8 * size / max(1, changed) for name, size in sizes.items()},
        "seconds": taken,
        "gb_per_s": {way: 2 * total / median(spent) / 1e9 for way, spent in taken.items()},
        **{f"ulp / {other}": ratio(taken["ulp"], taken[other]) for other in ("xor + zstd", "copy")},
    }


def _published_bytes(pair: Pair, encoding: str) -> int:
    """Return the bytes of a published delta's files, its manifest among them."""
    with TemporaryDirectory() as root, DeltaTransport(root, encoding=encoding, keyframe_every=0) as transport:
        transport.send_weights({name: old for name, old, _ in pair})
        transport.send_weights({name: new for name, _, new in pair})
        return sum(file.stat().st_size for file in Path(root, "weight_v000002").iterdir())
