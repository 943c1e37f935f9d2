"""``torchrl-ext bench WHAT``: measure on this machine, in one run, side by side."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from torchrl_ext.errors import ConfigError

__all__ = ["SUBJECTS", "add_parser", "add_subjects", "at_most", "ratio", "rounds", "run", "track_peak"]

SUBJECTS = {
    "transport": ("torchrl_ext.bench.transport", "full updates: collective and disk against the plainest way"),
    "carriers": ("torchrl_ext.bench.carriers", "bytes from one rank to another, by gloo and NIXL, beside a copy"),
    "delta": ("torchrl_ext.bench.delta", "size and speed of every encoding, beside bounds, a copy and xor + zstd"),
    "by_shard": ("torchrl_ext.bench.ranks.by_shard", "deltas by shard: memory of FSDP2 ranks, and what workers read"),
    "gpu": ("torchrl_ext.bench.gpu", "on a GPU: shared memory and deltas that are listed there, beside copies"),
    "plan": ("torchrl_ext.bench.plan", "how long a transfer plan of very many tensors takes, and its memory"),
    "sharded": ("torchrl_ext.bench.sharded.command", "from shard to shard: bytes, memory and time, beside a broadcast"),
    "scheme": ("torchrl_ext.bench.scheme", "an update of a collector's workers, beside TorchRL's own scheme"),
}
"""Each module has ``add_arguments(parser)``, ``measure(args, say) -> dict`` (JSON-safe) and ``tables(results)``."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the command and what it can measure."""
    parser = subparsers.add_parser("bench", help="measure transports on this machine")
    add_subjects(parser, SUBJECTS)
    return parser


def add_subjects(parser: argparse.ArgumentParser, subjects: Mapping[str, tuple[str, str]]) -> None:
    """Declare a command for each subject, given as name -> (module, line of help)."""
    commands = parser.add_subparsers(required=True, metavar="what")
    for name, (module, summary) in subjects.items():
        own = commands.add_parser(name, help=summary, description=summary)
        own.set_defaults(module=module)
        own.add_argument("--repeats", type=_positive, default=7, help="rounds of each comparison")
        own.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document on standard output"
        )
        importlib.import_module(module).add_arguments(own)


def run(args: argparse.Namespace) -> int:
    """Measure, and print tables, or with ``--json`` the numbers behind them. Progress goes to standard error.

    Raises:
        ConfigError: ``--dir`` is no directory.
    """
    folder = getattr(args, "dir", None)
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"--dir {folder} is no directory", state="nothing was measured", hint="make it first")
    subject = importlib.import_module(args.module)
    progress = Console(stderr=True)
    with progress.status("starting") as status:

        def say(what: str) -> None:
            status.update(what)
            if not progress.is_terminal:
                print(what, file=sys.stderr, flush=True)

        results = subject.measure(args, say)
    if args.json:
        print(json.dumps(results))
    else:
        console = Console()
        for table in subject.tables(results):
            console.print(table)
    return 0


def rounds(ways: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Time each way in each round, after one round that is not counted; every round starts with another way."""
    names = list(ways)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            taken = ways[name]()
            if turn:
                seconds[name].append(taken)
    return seconds


def ratio(fast_s: Sequence[float], slow_s: Sequence[float], target: float | None = None) -> dict[str, Any]:
    """Compare two ways round by round, as other jobs of the machine weigh on both sides of a round alike.

    Returns:
        Median, lowest and highest ratio of the rounds (above 1 the first way is faster), the ratio that was promised if
        any was, and whether the median reaches it; JSON-safe.
    """
    found = [slow / fast for fast, slow in zip(fast_s, slow_s, strict=True)]
    middle = statistics.median(found)
    met = target is None or middle >= target
    return {"median": middle, "low": min(found), "high": max(found), "target": target, "met": met}


def at_most(found: float, bound: float | None) -> dict[str, Any]:
    """Compare a figure with the most that it should be; JSON-safe."""
    return {"found": found, "target": bound, "met": bound is None or found <= bound}


@contextlib.contextmanager
def track_peak() -> Iterator[list[int]]:
    """Note the most resident memory that the block adds, in bytes; the list stays empty where it cannot be known.

    Linux: writing 5 to ``/proc/self/clear_refs`` resets the high-water mark in ``/proc/self/status`` (proc(5)).
    """
    extra: list[int] = []
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # what glibc keeps of earlier work would hide the block's own
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident_bytes("VmRSS")
    except OSError:
        yield extra
        return
    yield extra
    extra.append(_resident_bytes("VmHWM") - before)


def _resident_bytes(field: str) -> int:
    """Return a field of ``/proc/self/status``, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("expected 1 or more")
    return value
