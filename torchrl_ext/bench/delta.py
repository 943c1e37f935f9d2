"""``torchrl-ext bench delta``: size and speed of every encoding, each beside its reference in the same run.

Data: pairs of bfloat16 models, from 0.1 to 100 % of whose elements differ. References: a plain copy of the same bytes,
xor in zstd with a checksum of every tensor (what others publish), and int32 + bf16 (what most others send).
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
import xxhash
import zstandard
from torch import Tensor

from torchrl_ext.bench.data import SIZES, Pair, synthetic_pair
from torchrl_ext.bench.runner import ratio, rounds
from torchrl_ext.codecs.base import make_codec
from torchrl_ext.codecs.pipeline import worker_threads
from torchrl_ext.codecs.streams import find
from torchrl_ext.codecs.units import units
from torchrl_ext.stores import Chain
from torchrl_ext.stores.base import MemoryStore
from torchrl_ext.stores.delta_manifest import BLOCKS
from torchrl_ext.stores.table import ParamTable
from torchrl_ext.transports.delta.broadcast import KeptTensors
from torchrl_ext.types import Info, ParamMeta
from torchrl_ext.versions.containers import BlockFiles, Coded, code
from torchrl_ext.versions.owned import FlatCopies, Owned
from torchrl_ext.versions.writer import ChainWriter
from torchrl_ext.weights.source import MappingSource

__all__ = ["DENSITIES", "coded", "copies_of", "measure", "measure_encode", "measure_sizes"]

DENSITIES = (0.001, 0.01, 0.03, 0.1, 0.5, 1.0)
ENCODINGS = ("ulp", "context", "auto", "deltas_zstd")
KINDS = ("ulp", "context", "bitmap")
"""Kinds of blocks whose speed is measured."""


def measure(
    say: Callable[[str], None],
    *,
    size: str = "small",
    densities: Sequence[float] = DENSITIES,
    threads: int | None = None,
    repeats: int = 7,
    folder: str | None = None,
) -> Info:
    """Measure scattered changes of each density, and clustered ones of up to 10 %.

    Args:
        say: called with each step.
        size: of `SIZES`.
        densities: shares of the elements that change, 0 to 1.
        threads: worker threads of every way; default: what an update would take.
        repeats: rounds.
        folder: where deltas are written while they are timed; default: the system's temporary directory.
    """
    threads = threads or worker_threads()
    found: Info = {"size": size, "cores": worker_threads(), "threads": threads, "torch": torch.__version__}
    for density in densities:
        for clustered in (False, True) if density < 0.5 else (False,):
            label = f"{density:.1%} {'clustered' if clustered else 'scattered'}"
            say(label)
            pair = synthetic_pair(SIZES[size]["model"], density, clustered=clustered)
            found[label] = measure_sizes(pair) | measure_encode(pair, repeats, threads, folder)
    return found


# sizes


def measure_sizes(pair: Pair) -> Info:
    """Count the bytes of every encoding of a bfloat16 pair, with all framing."""
    changed = sum(int((units(old) != units(new)).sum()) for _, old, new in pair)
    total = sum(new.nbytes for _, _, new in pair)
    sizes = {"int32 + bf16": 6 * changed} | {name: _published_bytes(pair, name) for name in ENCODINGS}
    return {
        "parameters": total // 2,
        "density": changed / (total // 2),
        "bits per changed": {name: 8 * size / max(1, changed) for name, size in sizes.items()},
    }


def _published_bytes(pair: Pair, encoding: str) -> int:
    """Return the bytes of a delta's files: with the manifest, where the files are ours."""
    codec, store = make_codec(encoding), MemoryStore()
    writer = ChainWriter(
        store,
        Chain(store),
        "0" * 32,
        Owned(codec, KeptTensors()),
        keyframe_every=0,
        base=None,
        keep_files=True,
    )
    writer.publish(MappingSource({name: old for name, old, _ in pair}), 1)
    writer.acknowledge()
    delta = writer.publish(MappingSource({name: new for name, _, new in pair}), 2)
    assert delta is not None
    return sum(delta.files.values()) + (len(delta.to_bytes()) if delta.container == BLOCKS else 0)


# speeds


def measure_encode(pair: Pair, repeats: int, threads: int, folder: str | None = None) -> Info:
    """Time each way to find, code, check and write changes to a file, in turns.

    Args:
        pair: any dtype.
        repeats: rounds.
        threads: worker threads, the same for every way.
        folder: where the file is written; default: the system's temporary directory.
    """
    total = sum(new.nbytes for _, _, new in pair)
    targets = [torch.zeros_like(new) for _, _, new in pair]  # touched, so that no page fault is timed
    old, new = ({name: sides[side] for name, *sides in pair} for side in (0, 1))
    olds = copies_of(old)

    def blocks(kind: str) -> Iterator[bytes]:
        yield from (data for _, data in BlockFiles(olds.table).laid(coded(olds, new, kind, threads)))

    def xor() -> Iterator[bytes]:
        with ThreadPoolExecutor(threads) as pool:
            yield from pool.map(_xor, pair)

    def copies() -> Iterator[bytes]:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(_copy, targets, (new for _, _, new in pair)))
        return iter(())

    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-", dir=folder) as place:

        def publish(payloads: Callable[[], Iterator[bytes]]) -> float:
            began = time.perf_counter()
            with open(Path(place) / "payloads", "wb") as file:
                for payload in payloads():
                    file.write(payload)
            return time.perf_counter() - began

        ways = {"copy": copies, "xor": xor} | {kind: partial(blocks, kind) for kind in KINDS}
        seconds = rounds({name: partial(publish, way) for name, way in ways.items()}, repeats)
    return {
        "seconds": seconds,
        "gb_per_s": {way: total / median(taken) / 1e9 for way, taken in seconds.items()},
        "ulp / xor": ratio(seconds["ulp"], seconds["xor"]),
        "ulp / copy": ratio(seconds["ulp"], seconds["copy"]),
    }


def copies_of(old: Mapping[str, Tensor]) -> FlatCopies:
    """Return copies of ``old`` on the host, against which changes are found."""
    olds = FlatCopies(ParamTable.of(itertools.starmap(ParamMeta.of, old.items())), pinned=False)
    for name, copy in olds.by_name().items():
        copy.copy_(old[name])
    return olds


def coded(olds: FlatCopies, new: Mapping[str, Tensor], kind: str, threads: int) -> Iterator[Coded]:
    """Find what changed since ``olds``, which stay as they are, and yield it in blocks of one kind."""
    rows = zip(*olds.table.place, new.values(), strict=True)
    then = partial(code, olds.table, make_codec(kind))
    return find(olds.table, olds.bits, rows, then, threads=threads)


def _copy(target: Tensor, source: Tensor) -> None:
    np.copyto(units(target), units(source))


def _xor(row: tuple[str, Tensor, Tensor]) -> bytes:
    """Return what others publish of a tensor: both versions' difference in zstd, and the checksum of the new one."""
    old, new = (units(tensor).reshape(-1).view(np.uint8) for tensor in row[1:])
    xxhash.xxh3_128_digest(new.data)
    return zstandard.ZstdCompressor(level=1).compress((old ^ new).data)
