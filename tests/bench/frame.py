"""What benchmarks of this folder share: progress, and processes that work together."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

PROCESSES_S = 900.0


def say(step: str) -> None:
    """Print a step to standard error."""
    print(step, file=sys.stderr, flush=True)


def together(work: Callable[[int], Any], count: int) -> list[Any]:
    """Call ``work`` with 0 to ``count - 1`` in processes beside each other, and return what they return.

    All of them end after the last has returned: what one of them leaves open stays open for the others until then. The
    packages are imported once, by the process that forks them.

    Raises:
        multiprocessing.TimeoutError: one of them takes too long, or was killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.bench.owners"])
    with context.Pool(count) as pool:
        rows = pool.imap_unordered(partial(_numbered, work), range(count))
        found = dict(rows.next(PROCESSES_S) for _ in range(count))
    return [found[number] for number in range(count)]


def _numbered(work: Callable[[int], Any], number: int) -> tuple[int, Any]:
    return number, work(number)
