"""``torchrl-ext bench delta``: size and speed of every encoding, each beside its reference in the same run.

Data: consecutive checkpoints of a fine-tuning run that is trained here, and synthetic pairs from 0.1 to 100 % density.
References: a plain copy of the same bytes, xor in zstd with a checksum of every tensor (what others publish),
int32 + bf16 (what most others send), and two entropy bounds. Also what the first versions of a fresh
trainer and a fresh engine take, beside the time that their compiled loops take.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import xxhash
import zstandard
from rich.table import Table
from torch import Tensor

from torchrl_ext.bench.data import Pair, bounds, real_chain, synthetic_pair
from torchrl_ext.bench.first_use import measure_first_use, table
from torchrl_ext.bench.runner import at_most, ratio, rounds, track_peak
from torchrl_ext.codecs.base import make_codec
from torchrl_ext.codecs.pipeline import worker_threads
from torchrl_ext.codecs.streams import find
from torchrl_ext.codecs.units import units
from torchrl_ext.kernels.base import LINEAR
from torchrl_ext.stores import Chain
from torchrl_ext.stores.base import MemoryStore
from torchrl_ext.stores.delta_manifest import BLOCKS
from torchrl_ext.stores.table import ParamTable
from torchrl_ext.transports.delta.broadcast import KeptTensors
from torchrl_ext.types import ParamMeta
from torchrl_ext.versions.containers import BlockFiles, Coded, code
from torchrl_ext.versions.writer import ChainWriter, Copies, FlatCopies
from torchrl_ext.weights.source import MappingSource

__all__ = [
    "SIZES",
    "add_arguments",
    "coded",
    "copies_of",
    "measure",
    "measure_encode",
    "measure_sizes",
    "speeds",
    "tables",
]

FAST, TIGHT, DENSE = 1.03, 1.06, 1.01
OURS = ("ulp", "context", "auto")
WAYS = ("copy", "xor", "ulp", "context", "bitmap")
TARGETS = {0.01: (4.0, 0.65), 0.1: (None, 0.30)}
"""By density, how many times as fast as xor, and as a copy, `ulp` is to be."""
BITMAP = 0.5
"""The same for `bitmap`, as a copy, at any density."""
SIZES = {
    "small": {"chain": {"hidden": 384, "layers": 8}, "pair": {"hidden": 512, "layers": 8, "vocabulary": 8000}},
    "full": {"chain": {"hidden": 512, "layers": 8}, "pair": {"hidden": 1024, "layers": 28, "vocabulary": 32_000}},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--size", choices=SIZES, default="small", help="full: pairs of 418 M parameters")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.001, 0.01, 0.03, 0.1, 0.5, 1.0])
    parser.add_argument("--threads", type=int, default=worker_threads())
    parser.add_argument("--dir", default=None, help="where payloads are published while they are timed")
    parser.add_argument("--skip-chain", action="store_true", help="only synthetic pairs")
    parser.add_argument(
        "--first-use",
        choices=("also", "only", "skip"),
        default="also",
        help="the first versions of fresh processes, with an empty cache for compiled loops and with a warm one",
    )


def measure(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure every data set in turn."""
    results = {"cores": worker_threads(), "threads": args.threads, "torch": torch.__version__, "sets": []}

    def one(label: str, pair: Pair, density: float = 0.0) -> None:
        say(f"{label}: sizes")
        found = {"data": label, **measure_sizes(pair, args.threads)}
        say(f"{label}: speeds")
        found |= measure_encode(pair, args.repeats, args.threads, args.dir, density)
        results["sets"].append(found)

    if args.first_use != "skip":
        results["first_use"] = measure_first_use(say)
    if args.first_use == "only":
        return results
    if not args.skip_chain:
        say("training a small language model")
        chain = real_chain(syncs=4, **SIZES[args.size]["chain"])
        for steps in (1, 4):
            one(f"fine-tuning, {steps} step", [(n, chain[4 - steps][n], new) for n, new in chain[4].items()])
    for density in args.densities:
        for clustered in (False, True) if density < 0.5 else (False,):
            label = f"{density:.1%} {'clustered' if clustered else 'scattered'}"
            say(f"{label}: weights")
            one(label, synthetic_pair(density, clustered=clustered, **SIZES[args.size]["pair"]), density)
    return results


# sizes


def measure_sizes(pair: Pair, threads: int) -> dict[str, Any]:
    """Count the bytes of every encoding with all framing, beside both bounds.

    Args:
        pair: bfloat16 tensors.
        threads: worker threads.
    """
    with ThreadPoolExecutor(threads) as pool:
        counted = list(pool.map(lambda row: bounds(row[1], row[2]), pair))
    changed, plain, inside = (sum(column) for column in zip(*counted, strict=True))
    total = sum(new.nbytes for _, _, new in pair)
    sizes = {"int32 + bf16": 6 * changed} | {name: published_bytes(pair, name) for name in ("xor", "overwrite", *OURS)}
    return {
        "parameters": total // 2,
        "changed": changed,
        "density": changed / (total // 2),
        "dense_bytes": total,
        "bytes": sizes,
        "bits_per_changed": {name: 8 * size / max(1, changed) for name, size in sizes.items()},
        "bound_bits": {"plain": plain / max(1, changed), "conditional": inside / max(1, changed)},
        "ratios": {
            "ulp / bound": at_most(8 * sizes["ulp"] / max(1.0, plain), FAST),
            "context / conditional bound": at_most(8 * sizes["context"] / max(1.0, inside), TIGHT),
            "largest of ours / dense": at_most(max(sizes[name] for name in OURS) / total, DENSE),
        },
    }


def published_bytes(pair: Pair, encoding: str) -> int:
    """Return the bytes of a delta's files: with the manifest, where the files are ours."""
    codec, store = make_codec(encoding), MemoryStore()
    writer = ChainWriter(
        store,
        Chain(store),
        "0" * 32,
        container=codec.container,
        full=KeptTensors(),
        keyframe_every=0,
        base=None,
        keep_files=True,
        baseline=partial(Copies, codec),
    )
    writer.publish(MappingSource({name: old for name, old, _ in pair}), 1)
    writer.acknowledge()
    delta = writer.publish(MappingSource({name: new for name, _, new in pair}), 2)
    assert delta is not None
    return sum(delta.files.values()) + (len(delta.to_bytes()) if delta.container == BLOCKS else 0)


# speeds


def measure_encode(
    pair: Pair, repeats: int, threads: int, folder: str | None = None, density: float = 0.0
) -> dict[str, Any]:
    """Time each way to diff, code, check and write to a file, in turns; and measure the memory that `ulp` adds.

    Args:
        pair: any dtype.
        repeats: rounds.
        threads: worker threads, the same for every way.
        folder: where the file is written; default: the system's temporary directory.
        density: what was asked for; some have `TARGETS`.
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

        ways = {"copy": copies, "xor": xor} | {kind: partial(blocks, kind) for kind in WAYS[2:]}
        seconds = rounds({name: partial(publish, way) for name, way in ways.items()}, repeats)
        with track_peak() as extra:
            publish(ways["ulp"])
    faster, as_fast = TARGETS.get(density, (None, None))
    memory = None if not extra else 1 + extra[0] / total  # one copy is the baseline
    return {
        "seconds": seconds,
        "gb_per_s": {way: total / median(taken) / 1e9 for way, taken in seconds.items()},
        "ulp_vs_xor": ratio(seconds["ulp"], seconds["xor"], faster),
        "ulp_vs_copy": ratio(seconds["ulp"], seconds["copy"], as_fast),
        "bitmap_vs_copy": ratio(seconds["bitmap"], seconds["copy"], BITMAP),
        "context_vs_xor": ratio(seconds["context"], seconds["xor"]),
        "memory": None if memory is None else at_most(memory, 1.2),
    }


def copies_of(old: Mapping[str, Tensor], *, pinned: bool = False) -> FlatCopies:
    """Return copies of ``old``, against which changes are found: where it is, or in pinned memory of the host."""
    first = next(iter(old.values()))
    olds = FlatCopies(
        ParamTable.of(itertools.starmap(ParamMeta.of, old.items())), None if pinned else first.device, pinned=pinned
    )
    for name, copy in olds.by_name().items():
        copy.copy_(old[name])
    return olds


def coded(olds: FlatCopies, new: Mapping[str, Tensor], kind: str, threads: int) -> Iterator[Coded]:
    """Find what changed since ``olds``, which stay as they are, and yield it in blocks of one kind."""
    places = (place for (place,) in olds.table.places)
    rows = ((*place, tensor) for place, tensor in zip(places, new.values(), strict=True))
    then = partial(code, olds.table, make_codec(kind), False)
    return find(olds.table, olds.bits, rows, then, threads=threads, digest=LINEAR)


def _copy(target: Tensor, source: Tensor) -> None:
    np.copyto(units(target), units(source))


def _xor(row: tuple[str, Tensor, Tensor]) -> bytes:
    """Return what others publish of a tensor: both versions' difference in zstd, and the checksum of the new one."""
    old, new = (units(tensor).reshape(-1).view(np.uint8) for tensor in row[1:])
    xxhash.xxh3_128_digest(new.data)
    return zstandard.ZstdCompressor(level=1).compress((old ^ new).data)


# what is shown


def tables(results: Mapping[str, Any]) -> list[Table]:
    """Show first uses, sizes and speeds, as far as they were measured."""
    first = [table(results["first_use"])] if "first_use" in results else []
    if not results["sets"]:
        return first
    names = ("int32 + bf16", "xor", "overwrite", *OURS)
    sizes = Table(
        "data", "density", *names, "bound", "cond.", "ulp/bound", "context/cond.", title="bits per changed element"
    )
    for row in results["sets"]:
        bits, ratios = row["bits_per_changed"], row["ratios"]
        sizes.add_row(
            row["data"],
            f"{row['density']:.2%}",
            *(f"{bits[name]:.2f}" for name in names),
            *(f"{bound:.2f}" for bound in row["bound_bits"].values()),
            _marked(ratios["ulp / bound"], "found"),
            _marked(ratios["context / conditional bound"], "found"),
        )
    return [*first, sizes, speeds(results)]


def speeds(results: Mapping[str, Any]) -> Table:
    """Show the speeds of every data set."""
    title = f"GB of weights per second, {results['threads']} threads on {results['cores']} cores"
    shown = Table("data", *WAYS, "ulp/xor", "ulp/copy", "bitmap/copy", "memory / weights", title=title)
    for row in results["sets"]:
        shown.add_row(
            row["data"],
            *(f"{row['gb_per_s'][way]:.2f}" for way in WAYS),
            *(_marked(row[name], "median") for name in ("ulp_vs_xor", "ulp_vs_copy", "bitmap_vs_copy")),
            "not known" if row["memory"] is None else _marked(row["memory"], "found"),
        )
    return shown


def _marked(found: Mapping[str, Any], key: str) -> str:
    return f"[{'green' if found['met'] else 'red'}]{found[key]:.3f}[/]"
