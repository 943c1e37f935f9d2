"""Shows on a terminal how far a long step has come; shows nothing without a terminal or without the package rich."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

__all__ = ["counted", "progress"]

_AFTER_S = 1.0
"""Seconds that a step takes before it is shown."""

T = TypeVar("T")
Advance = Callable[[int], None]


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Advance]:
    """Show a bar on standard error while the block runs, from one second on, if standard error is a terminal.

    Bars of concurrent steps share one display. The bar disappears when the block ends.

    Args:
        what: the step, as the bar's label.
        total: bytes that the step processes; None shows only the time.

    Returns:
        A context; its value takes the number of bytes processed since its last call.
    """
    if not (sys.stderr and sys.stderr.isatty()):
        yield lambda nbytes: None
        return
    step = _Step(what, total)
    _display.begin(step)
    try:
        yield step.advance
    finally:
        _display.end(step)


def counted(items: Iterable[T], nbytes: Callable[[T], int], advance: Advance) -> Iterator[T]:
    """Yield ``items``, and call ``advance`` with the bytes of each once the next one is asked for."""
    for item in items:
        yield item
        advance(nbytes(item))


@dataclass(eq=False)
class _Step:
    what: str
    total: int | None
    done: int = 0
    update: Callable[..., object] | None = None  # once it is shown

    def advance(self, nbytes: int) -> None:
        self.done += nbytes
        if (update := self.update) is not None:
            update(completed=self.done)


class _Display:
    """The bars of this process's running steps, drawn by rich."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: dict[_Step, threading.Timer] = {}  # each with the timer that shows it
        self._bars: Any = None

    def begin(self, step: _Step) -> None:
        timer = threading.Timer(_AFTER_S, self._show, [step])
        timer.daemon = True
        with self._lock:
            self._steps[step] = timer
        timer.start()

    def end(self, step: _Step) -> None:
        with self._lock:
            self._steps.pop(step).cancel()
            if step.update is not None:
                step.update(visible=False)
            if self._bars is not None and all(other.update is None for other in self._steps):
                bars, self._bars = self._bars, None
                bars.stop()

    def _show(self, step: _Step) -> None:
        with suppress(ImportError):  # rich comes with the extra `cli`
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

            console = Console(stderr=True)
            with self._lock:
                if step not in self._steps or not (console.is_terminal and console.is_interactive):
                    return
                if self._bars is None:
                    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
                    self._bars = Progress(*columns, console=console, transient=True)
                    self._bars.start()
                task = self._bars.add_task(step.what, total=step.total, completed=step.done)
                step.update = partial(self._bars.update, task)


_display = _Display()
