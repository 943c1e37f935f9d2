"""Shows the progress of the demonstration on standard error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from torchrl_ext.types import SyncReport

__all__ = ["Progress"]


class Progress:
    """Shows a live bar and table in a terminal, and plain lines elsewhere.

    Args:
        steps: how many there will be.
    """

    def __init__(self, steps: int) -> None:
        self._console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Bar(*columns, console=self._console)
        self._task = self._bar.add_task("starting", total=steps)
        self._table = Table("step", "reward", "loss", "version", "bytes", "pause")
        for column in self._table.columns:
            column.justify = "right"
        self._live = Live(Group(self._table, self._bar), console=self._console, transient=False)

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._live.stop()

    def say(self, what: str) -> None:
        """Show what goes on now."""
        self._bar.update(self._task, description=what)
        if not self._console.is_terminal:
            self._console.print(what, soft_wrap=True)

    def step(self, step: int, reward: float, loss: float, report: SyncReport) -> None:
        """Show one training step and the update after it."""
        pause_s = max((row.pause_s for row in report.engines), default=0.0)
        cells = [str(step), f"{reward:.3f}", f"{loss:+.4f}", str(report.version), f"{report.bytes:,}"]
        cells.append(f"{pause_s * 1e3:.1f} ms")
        self._table.add_row(*cells)
        self._bar.update(self._task, description="training", completed=step)
        if not self._console.is_terminal:
            names = [str(column.header) for column in self._table.columns]
            self._console.print("  ".join(f"{n} {c}" for n, c in zip(names, cells, strict=True)), soft_wrap=True)

    def conclude(self, verified: bool, weights_equal: bool, greedy_equal: bool, rewards: Sequence[float]) -> None:
        """Show rewards, and whether engine and trainer agree."""
        self._live.stop()
        self._console.print(f"reward: {rewards[0]:.3f} in the first step, {rewards[-1]:.3f} in the last")
        self._console.print(f"engine's weights bit-equal to the trainer's: {_answer(weights_equal)}")
        self._console.print(f"engine's greedy continuations equal to the trainer's: {_answer(greedy_equal)}")
        self._console.print("[bold green]verified[/]" if verified else "[bold red]NOT verified[/]")


def _answer(value: bool) -> str:
    return "[green]yes[/]" if value else "[red]no[/]"
