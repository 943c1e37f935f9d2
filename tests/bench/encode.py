"""``python -m tests.bench encode``: finding, coding and writing what changed, beside xor + zstd and a copy."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from rich.table import Table

from torchrl_ext.bench.data import synthetic_pair
from torchrl_ext.bench.delta import SIZES, measure_encode, speeds
from torchrl_ext.codecs.pipeline import worker_threads

__all__ = ["add_arguments", "measure", "tables"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the settings."""
    parser.add_argument("--size", choices=SIZES, default="full", help="full: 418 M parameters")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.01, 0.1, 0.5, 1.0])
    parser.add_argument("--threads", type=int, default=worker_threads())
    parser.add_argument("--dir", default=None, help="where payloads are published while they are timed")


def measure(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure scattered changes of each density, all ways in turns."""
    results: dict[str, Any] = {"threads": args.threads, "cores": worker_threads(), "sets": []}
    for density in args.densities:
        say(f"{density:.1%}")
        pair = synthetic_pair(density, **SIZES[args.size]["pair"])
        found = measure_encode(pair, args.repeats, args.threads, args.dir, density)
        results["sets"].append({"data": f"{density:.1%} scattered", **found})
    return results


def tables(results: dict[str, Any]) -> list[Table]:
    """What a person reads."""
    return [speeds(results)]
