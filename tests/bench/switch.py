"""``python -m tests.bench switch``: what an in-process switch of vLLM's weights does to 32 requests that stream."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

from rich.table import Table

from tests.bench.models import SIZES, in_vllm, make_model

__all__ = ["add_arguments", "measure", "tables"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the settings."""
    parser.add_argument("--size", choices=SIZES, default="small", help="full: 418 M parameters")
    parser.add_argument("--requests", type=int, default=32, help="streams at the same time")
    parser.add_argument("--tokens", type=int, default=64, help="of each request")
    parser.add_argument("--switches", type=int, default=3, help="while they stream")
    parser.add_argument("--way", choices=["path", "state dict"], default="state dict", help="where weights come from")


def measure(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """The same streams without and with switches, in turns.

    Raises:
        EngineError: the process with vLLM failed.
    """
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-") as folder:
        say("making two models")
        models = [str(make_model(f"{folder}/model{seed}", args.size, seed=seed)) for seed in range(2)]
        say("vLLM streams and switches")
        asked = {
            "models": models,
            "requests": args.requests,
            "tokens": args.tokens,
            "switches": args.switches,
            "repeats": args.repeats,
            "way": args.way,
        }
        found = in_vllm("vllm_switch.py", asked)
    rounds = found["rounds"]
    gaps = {
        which: {at: statistics.median(turn[which][f"{at}_s"] for turn in rounds) for at in ("p50", "p95", "max")}
        for which in ("without", "with")
    }
    return {
        "cores": os.cpu_count(),
        "size": args.size,
        "way": args.way,
        "gaps_s": gaps,
        "ratios": {at: gaps["with"][at] / gaps["without"][at] for at in gaps["with"]},
        "pause_s": statistics.median(pause for turn in rounds for pause in turn["pauses_s"]),
        "requests": sum(turn["with"]["requests"] for turn in rounds),
        "complete_with_versions": sum(turn["with"]["complete_with_versions"] for turn in rounds),
        "spanned_a_switch": sum(turn["with"]["spanned_a_switch"] for turn in rounds),
        **found,
    }


def tables(results: dict[str, Any]) -> list[Table]:
    """What a person reads."""
    table = Table(title="gap between two tokens of a stream")
    for heading in ("", "p50", "p95", "max"):
        table.add_column(heading, justify="right")
    for which, gaps in results["gaps_s"].items():
        table.add_row(f"{which} switches", *(f"{1e3 * gap:.1f} ms" for gap in gaps.values()))
    table.add_row("ratio", *(f"{ratio:.2f}" for ratio in results["ratios"].values()))
    table.caption = (
        f"{results['complete_with_versions']} of {results['requests']} streams complete, every token's version known; "
        f"{results['spanned_a_switch']} saw a switch; pause {1e3 * results['pause_s']:.0f} ms"
    )
    return [table]
