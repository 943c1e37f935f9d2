"""``python -m tests.bench sharded``: bytes, memory and time of an update from shard to shard, beside a broadcast.

Trainer ranks share a model by FSDP2, and engines have two tensor-parallel workers. All are processes on this machine,
over gloo. The ranks send to synthetic workers, or with ``--engine`` to a running vLLM or SGLang.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tests.bench.sharded_ends import ENDED, MODELS, WORKERS, Case, Seat, needed_bytes
from torchrl_ext.bench.runner import ratio
from torchrl_ext.errors import DeadlineError, TransportError
from torchrl_ext.serving.processes import GuardedProcess, free_port
from torchrl_ext.transports.sharded.transport import BUCKET_BYTES

LONGEST_S = 900.0

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
            "balance": max(report["rank_bytes"]) * case.ranks / sum(report["rank_bytes"]),
            "received": max(got / own[at % WORKERS] for at, got in enumerate(said)),
        }
        if case.engines == 1:
            found[case.name] |= {
                "rank_extra": [each["extra_bytes"] for each in ranks],
                "worker_extra": [each[0]["extra_bytes"] for each in workers],
            }
        if len(case.ways) > 1:
            found[case.name] |= _compared(
                {way: taken[1:] for way, taken in ranks[0]["seconds"].items()},
            ) | {"cpu_s": [one["cpu_s"] for one in ranks]}
    sent = (sum(found[name]["rank_bytes"]) for name in ("replicas", "fsdp2"))
    found["replicas"]["sent"] = next(sent) / next(sent)
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
        "pause": _compared({way: taken["pause"] for way, taken in spans.items()})["sharded / collective"],
    }  # fmt: skip


def _compared(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Compare the rounds of both ways: above 1 the sharded one is faster."""
    return {"seconds": seconds, "sharded / collective": ratio(seconds["sharded"], seconds["collective"])}


# processes


def _run(seats: Sequence[Seat], folder: str) -> None:
    """Have a process take each seat, and wait until all have ended well."""
    command = [sys.executable, "-m", "tests.bench.sharded_ends", *(seat.to_json() for seat in seats)]
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
