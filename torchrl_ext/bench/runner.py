"""Timing of several ways side by side, in one run on this machine."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["figures", "ratio", "rounds", "track_peak"]


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


def ratio(fast_s: Sequence[float], slow_s: Sequence[float]) -> dict[str, float]:
    """Compare two ways round by round, as other jobs of the machine weigh on both sides of a round alike.

    Returns:
        Median, lowest and highest ratio of the rounds; above 1 the first way is faster.
    """
    return _spread([slow / fast for fast, slow in zip(fast_s, slow_s, strict=True)])


def figures(results: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield each figure of nested results with its path; several numbers show as their median and range."""
    if isinstance(results, list) and results and all(isinstance(each, float) for each in results):
        results = _spread(results)
    if isinstance(results, Mapping) and results.keys() == {"median", "low", "high"}:
        yield name, "{median:.4g} ({low:.4g} to {high:.4g})".format(**results)
    elif isinstance(results, (Mapping, list)):
        for key, value in results.items() if isinstance(results, Mapping) else enumerate(results):
            yield from figures(value, f"{name}: {key}" if name else str(key))
    else:
        yield name, f"{results:.4g}" if isinstance(results, float) else str(results)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "low": min(values), "high": max(values)}


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
