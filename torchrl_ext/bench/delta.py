"""``torchrl-ext bench delta``: size and speed of every encoding, each beside its reference in the same run.

Data: consecutive checkpoints of a fine-tuning run that is trained here, and synthetic pairs from 0.1 to 100 % density.
References: a plain copy of the same bytes, xor and overwrite in zstd with a checksum of every tensor (what others
publish), int32 + bf16 (what most others send), and two entropy bounds. Also what the first versions of a fresh
trainer and a fresh engine take, beside the time that their compiled loops take.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, cast, final

import numpy as np
import torch
import xxhash
from rich.table import Table
from torch import Tensor

from torchrl_ext.bench.data import Pair, bounds, real_chain, synthetic_pair
from torchrl_ext.bench.first_use import measure_first_use, table
from torchrl_ext.bench.runner import at_most, ratio, rounds, track_peak
from torchrl_ext.codecs.base import Block, Buffer, Codec, Needs, Reads, make_codec
from torchrl_ext.codecs.patch import Patch
from torchrl_ext.codecs.pipeline import encode_tensors, worker_threads
from torchrl_ext.codecs.units import Unit, units
from torchrl_ext.registry import containers
from torchrl_ext.stores import version_name
from torchrl_ext.stores.base import MemoryStore
from torchrl_ext.types import ParamMeta
from torchrl_ext.versions.containers import Container, NewDelta
from torchrl_ext.weights.digests import position_digest

__all__ = ["add_arguments", "measure", "measure_encode", "measure_sizes", "tables"]

FAST, TIGHT, DENSE = 1.08, 1.10, 1.01
OURS = ("ulp", "context", "auto")
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

    def one(label: str, pair: Pair) -> None:
        say(f"{label}: sizes")
        found = {"data": label, **measure_sizes(pair, args.threads)}
        say(f"{label}: speeds")
        found |= measure_encode(pair, args.repeats, args.threads, args.dir)
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
            one(label, synthetic_pair(density, clustered=clustered, **SIZES[args.size]["pair"]))
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
    sizes = {"int32 + bf16": 6 * changed}
    sizes |= {name: _whole_bytes(pair, name, threads) for name in ("xor", "overwrite")}
    sizes |= {name: _packed_bytes(pair, make_codec(name), threads) for name in OURS}
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


def _delta(pair: Pair, codec: Codec) -> NewDelta:
    return NewDelta(
        version=2,
        base=("0" * 32, 1),
        run_id="0" * 32,
        codec=codec,
        params=tuple(ParamMeta.of(name, new) for name, _, new in pair),
        tensors={name: new for name, _, new in pair},
        digests={name: position_digest(old) for name, old, _ in pair},  # real ones, since a manifest is compressed
    )


def _packed_bytes(pair: Pair, codec: Codec, threads: int) -> int:
    """Return the bytes of files and manifest of a version in our own container."""
    with MemoryStore().draft(version_name(2)) as draft:
        manifest = _delta(pair, codec).write(encode_tensors(pair, codec, threads=threads), draft)
    return sum(manifest.files.values()) + len(manifest.to_bytes())


def _whole_bytes(pair: Pair, name: str, threads: int) -> int:
    """Return the bytes of payloads and index in the container ``whole``, which has no manifest of ours."""
    codec = make_codec(name)
    container: Container = containers.make(codec.container)
    files = container.files(_delta(pair, codec), encode_tensors(pair, codec, threads=threads))
    return sum(len(data) for _, data, _ in files)


# speeds


def measure_encode(pair: Pair, repeats: int, threads: int, folder: str | None = None) -> dict[str, Any]:
    """Time each way to diff, code, check and write to a file, in turns; and measure the memory that `ulp` adds.

    Args:
        pair: any dtype.
        repeats: rounds.
        threads: worker threads, the same for every way.
        folder: where the file is written; default: the system's temporary directory.
    """
    targets = [torch.zeros_like(new) for _, _, new in pair]  # touched, so that no page fault is timed

    def copy() -> float:
        with ThreadPoolExecutor(threads) as pool:
            began = time.perf_counter()
            list(pool.map(_copy, targets, (new for _, _, new in pair)))
            return time.perf_counter() - began

    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-", dir=folder) as place:

        def publish(codec: Codec) -> float:
            began = time.perf_counter()
            with open(Path(place) / "payloads", "wb") as file:
                for one in encode_tensors(pair, codec, threads=threads):
                    file.write(one.payload)
            return time.perf_counter() - began

        ways: dict[str, Callable[[], float]] = {
            "copy": copy,
            "xor": partial(publish, _Summed(inner=make_codec("xor"))),
            "overwrite": partial(publish, _Summed(inner=make_codec("overwrite"))),
            "ulp": partial(publish, make_codec("ulp")),
            "context": partial(publish, make_codec("context")),
        }
        seconds = rounds(ways, repeats)
        with track_peak() as extra:
            publish(make_codec("ulp"))
    total = sum(new.nbytes for _, _, new in pair)
    memory = None if not extra else 1 + extra[0] / total  # one copy is the baseline
    return {
        "seconds": seconds,
        "gb_per_s": {way: total / median(taken) / 1e9 for way, taken in seconds.items()},
        "ulp_vs_xor": ratio(seconds["ulp"], seconds["xor"], 3.0),
        "ulp_vs_copy": ratio(seconds["ulp"], seconds["copy"], 0.4),
        "context_vs_xor": ratio(seconds["context"], seconds["xor"]),
        "memory": None if memory is None else at_most(memory, 1.2),
    }


def _copy(target: Tensor, source: Tensor) -> None:
    np.copyto(units(target), units(source))


@final
@dataclass(frozen=True, kw_only=True)
class _Summed(Codec):
    """Runs another codec and, in the same thread, takes the checksum of the new tensor that others' files carry.

    Our own format needs none: the tensor's digest comes from the pass that finds the changes.
    """

    name: ClassVar[str] = "summed"
    needs: ClassVar[Needs] = "all"
    reads: ClassVar[Reads] = "either"
    inner: Codec

    def encode_block(self, unit: Unit, block: Block) -> bytes:
        new = cast("np.ndarray[Any, Any]", block.new)  # every unit is there for a codec that needs "all"
        xxhash.xxh3_128_hexdigest(new.view(np.uint8).data)
        return self.inner.encode_block(unit, block)

    def join(self, count: int, blocks: list[bytes]) -> bytes:
        return self.inner.join(count, blocks)

    def decode(self, payload: Buffer, meta: ParamMeta, base: Tensor | None = None) -> Patch:
        return self.inner.decode(payload, meta, base)


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
    ways = ("copy", "xor", "overwrite", "ulp", "context")
    title = f"GB of weights per second, {results['threads']} threads on {results['cores']} cores"
    speeds = Table("data", *ways, "ulp/xor", "ulp/copy", "memory / weights", title=title)
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
        speeds.add_row(
            row["data"],
            *(f"{row['gb_per_s'][way]:.2f}" for way in ways),
            _marked(row["ulp_vs_xor"], "median"),
            _marked(row["ulp_vs_copy"], "median"),
            "not known" if row["memory"] is None else _marked(row["memory"], "found"),
        )
    return [*first, sizes, speeds]


def _marked(found: Mapping[str, Any], key: str) -> str:
    return f"[{'green' if found['met'] else 'red'}]{found[key]:.3f}[/]"
