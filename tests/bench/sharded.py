"""``torchrl-ext bench sharded``: what an update from shard to shard moves, holds and takes, beside our own broadcast.

Trainer ranks share a model by FSDP2, and engines have two tensor-parallel workers. All are processes on this machine,
over gloo. The ranks send to synthetic workers, or with ``--engine`` to a running vLLM or SGLang.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table

from torchrl_ext.bench.runner import at_most
from torchrl_ext.bench.sharded.ends import ENDED, MODELS, WORKERS, Case, Seat, needed_bytes
from torchrl_ext.errors import DeadlineError, TransportError
from torchrl_ext.serving.processes import GuardedProcess, free_port
from torchrl_ext.transports.sharded.transport import BUCKET_BYTES

__all__ = ["add_arguments", "measure", "tables"]

LONGEST_S = 900.0
RECEIVED, BALANCE, REPLICAS, WALL = 1.02, 1.10, 1.10, 0.6
"""Bounds: bytes of a worker / its own; busiest rank / mean; bytes for four engines / one; seconds / a broadcast's."""

_ENGINES = 4
_LM = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--size", choices=sorted(MODELS), default="full", help="full: 340 MB of float32")
    parser.add_argument("--bucket-bytes", type=int, default=BUCKET_BYTES, help="of every transport")
    parser.add_argument("--engine", choices=("vllm", "sglang"), help="send to an engine of two workers instead")
    parser.add_argument("--python", help="with --engine: an interpreter that has it (default: this one)")
    parser.add_argument("--ranks", type=int, default=2, help="with --engine: trainer ranks")
    parser.add_argument("--layers", type=int, default=2, help="with --engine: of 45 M parameters each")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32", help="with --engine")
    parser.add_argument("--turns", type=int, default=4, help="with --engine: how often each transport connects")


def measure(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Run every comparison.

    Raises:
        TransportError: a process failed.
        DeadlineError: they did not end in time.
    """
    common = {"bucket_bytes": args.bucket_bytes, "repeats": args.repeats, "torch": torch.__version__}
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-") as folder:
        found = _with_engine(args, folder, say) if args.engine else _synthetic(args, folder, say)
    return common | found


def _synthetic(args: argparse.Namespace, folder: str, say: Callable[[str], None]) -> dict[str, Any]:
    cases = tuple(
        Case(name=name, ranks=ranks, engines=count, ways=ways, repeats=repeats, ports=_ports(*ways, "memory"))
        for name, ranks, count, ways, repeats in (
            ("fsdp4", 4, 1, ("sharded",), 1),  # first: ranks match their transports by the order of making them
            ("fsdp2", 2, 1, ("collective", "sharded"), args.repeats),
            ("replicas", 2, _ENGINES, ("sharded",), 1),
        )
    )
    more: dict[str, Any] = {"folder": folder, "model": args.size, "cases": cases, "bucket_bytes": args.bucket_bytes}
    seats = [Seat(number=rank, **more) for rank in range(max(case.ranks for case in cases))]
    seats += [Seat(worker=True, number=worker, **more) for worker in range(WORKERS)]
    say("2 and 4 trainer ranks, and the workers of 1 and 4 engines")
    _run(seats, folder)
    own = needed_bytes(args.size)
    found: dict[str, Any] = {"size": args.size, "model_bytes": 0, "needed_bytes": own}
    for case in cases:
        ranks, workers = _read(folder, case.name, "rank"), _read(folder, case.name, "worker")
        report = ranks[0]["report"]
        found["model_bytes"] = report["model_bytes"]
        said = report["worker_bytes"]
        found[case.name] = {
            "rank_bytes": report["rank_bytes"],
            "worker_bytes": said,
            "balance": at_most(max(report["rank_bytes"]) * case.ranks / sum(report["rank_bytes"]), BALANCE),
            "received": at_most(max(got / own[at % WORKERS] for at, got in enumerate(said)), RECEIVED),
        }
        if case.engines == 1:
            found[case.name] |= {
                "rank_extra": _extra([one["extra_bytes"] for one in ranks], args),
                "worker_extra": _extra([one[0]["extra_bytes"] for one in workers], args),
            }
        if len(case.ways) > 1:
            found[case.name] |= _compared(
                {way: taken[1:] for way, taken in ranks[0]["seconds"].items()},
            ) | {"cpu_s": [one["cpu_s"] for one in ranks]}
    sent = (sum(found[name]["rank_bytes"]) for name in ("replicas", "fsdp2"))
    found["replicas"]["sent"] = at_most(next(sent) / next(sent), REPLICAS)
    return found


def _with_engine(args: argparse.Namespace, folder: str, say: Callable[[str], None]) -> dict[str, Any]:
    from torchrl_ext.registry import engines
    from torchrl_ext.serving.server import start
    from torchrl_ext.testing.tiny import make_tiny_lm

    say("making a checkpoint")
    dtype = getattr(torch, args.dtype)
    model = make_tiny_lm(Path(folder, "model"), dtype=dtype, num_hidden_layers=args.layers, **_LM)
    say(f"starting {args.engine}")
    settings = {"dtype": args.dtype, "tensor_parallel_size": WORKERS, "max_model_len": 256, "python": args.python}
    with start(engines.part(args.engine, "server")(model, **settings)) as server:
        say("both transports in turns")
        more: dict[str, Any] = {"folder": folder, "model": str(model), "bucket_bytes": args.bucket_bytes}
        more |= {"engine": args.engine, "url": server.url, "turns": args.turns, "repeats": args.repeats}
        _run([Seat(number=rank, ranks=args.ranks, **more) for rank in range(args.ranks)], folder)
    ranks = _read(folder, "engine", "rank")
    rows = [row for row in ranks[0] if row["counted"]]
    ways = {way: [row for row in rows if row["way"] == way] for way in ("collective", "sharded")}
    spans = {
        way: {name: [row["report"]["spans"][name] for row in own] for name in ("total", "pause", "transfer")}
        for way, own in ways.items()
    }
    cpu_s = {way: [median(row["cpu_s"] for row in one if row["way"] == way) for one in ranks] for way in ways}
    last = ways["sharded"][-1]["report"]
    return {
        "engine": args.engine, "ranks": args.ranks, "model_bytes": last["model_bytes"],
        "rank_bytes": last["rank_bytes"], "worker_bytes": last["worker_bytes"], "whole": last["whole"],
        "proof": {way: own[-1]["report"]["proof"] for way, own in ways.items()}, "cpu_s": cpu_s, "spans": spans,
        **_compared({way: taken["total"] for way, taken in spans.items()}),
        "pause": _compared({way: taken["pause"] for way, taken in spans.items()})["vs_collective"],
    }  # fmt: skip


def _compared(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Compare the medians of both ways, and the rounds: below 1 the sharded one is faster."""
    each = [own / other for own, other in zip(seconds["sharded"], seconds["collective"], strict=True)]
    found = median(seconds["sharded"]) / median(seconds["collective"])
    return {"seconds": seconds, "vs_collective": {**at_most(found, WALL), "low": min(each), "high": max(each)}}


def _extra(found: Sequence[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """Hold resident memory that an update added against two buckets and the largest piece."""
    if not all(found):
        return {"found": None, "target": None, "met": None}
    shapes = MODELS[args.size].values()
    largest = max(torch.Size(shape).numel() * 4 // 2 for shape in shapes)
    return at_most(max(max(one) for one in found), 2 * args.bucket_bytes + largest)


# processes


def _run(seats: Sequence[Seat], folder: str) -> None:
    """Have a process take each seat, and wait until all have ended well."""
    command = [sys.executable, "-m", "torchrl_ext.bench.sharded.ends", *(seat.to_json() for seat in seats)]
    environ = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with GuardedProcess(command, name="bench", log_path=Path(folder, "log"), environ=environ) as process:
        if not process.wait(LONGEST_S):
            raise DeadlineError(f"trainer ranks and workers did not end within {LONGEST_S:g} s", state="all were ended")
        if not Path(folder, ENDED).exists():
            said = process.errors() or process.log()[-1000:]
            raise TransportError(f"a trainer rank or a worker failed; what they printed: {said}")


def _read(folder: str, name: str, kind: str) -> list[Any]:
    paths = sorted(Path(folder).glob(f"{name}.{kind}*.json"))
    return [json.loads(path.read_text()) for path in paths]


def _ports(*ways: str) -> dict[str, int]:
    return {way: free_port() for way in ways}


# what is shown


def tables(results: dict[str, Any]) -> list[Table]:
    """Show everything that was promised, with what was found."""
    table = Table("measured in one run", "found", "spread", "at most", "", title=f"torch {results['torch']}")
    for name, what, one in _rows(results):
        shown = _shown(what, one)
        spread = f"{one['low']:.2f} - {one['high']:.2f}" if "low" in one else ""
        mark = "" if one["met"] is None else "[green]met[/]" if one["met"] else "[red]missed[/]"
        table.add_row(f"{name}: {what.replace('_', ' ')}", shown[0], spread, shown[1], mark)
    return [table]


def _rows(results: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    parts = (
        {results["engine"]: results}
        if "engine" in results
        else {name: results[name] for name in ("fsdp2", "fsdp4", "replicas")}
    )
    for name, part in parts.items():
        for what, one in part.items():
            if isinstance(one, dict) and "met" in one:
                yield name, what, one


def _shown(what: str, one: dict[str, Any]) -> tuple[str, str]:
    if one["found"] is None:
        return "not known here", ""
    if what.endswith("_extra"):
        return f"{one['found'] / 2**20:.1f} MiB", f"{one['target'] / 2**20:.1f} MiB"
    return f"{one['found']:.3f}", f"{one['target']:.2f}"
