"""Timing of several ways side by side, in one run on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

__all__ = ["figures", "ratio", "rounds", "seconds"]


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def rounds(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each way in each round.

    One round before them is not counted. Every round starts with another way.
    """
    names = list(ways)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            spent = seconds(ways[name])
            if turn:
                taken[name].append(spent)
    return taken


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
