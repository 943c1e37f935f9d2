"""Shows a report as scalars, as a table of plain text and as a plot; `Spans` times the phases that it shows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, final

from torchrl_ext.base.errors import ConfigError

if TYPE_CHECKING:
    from torchrl_ext.base.types import SyncReport

__all__ = ["Phase", "Spans", "nested", "plot", "plot_history", "scalars", "table"]

Rows = list[tuple[str, ...]]


class Phase(NamedTuple):
    """One run of a phase of an update.

    Attributes:
        name: a key of `SyncReport.spans`.
        start_s, end_s: when it started and ended, in seconds since the update began.
    """

    name: str
    start_s: float
    end_s: float


@final
class Spans(dict[str, float]):
    """Seconds that each phase of an update took.

    Attributes:
        phases: each run of a phase, with times of `time.perf_counter`, in the order in which they ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phases: list[Phase] = []

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Add the duration of the block to ``phase``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.since(phase, began)

    def since(self, phase: str, began: float) -> None:
        """Add the seconds since ``began``, a time of `time.perf_counter`, to ``phase``."""
        ended = time.perf_counter()
        self[phase] = self.get(phase, 0.0) + ended - began
        self.phases.append(Phase(phase, began, ended))


def nested(timeline: Sequence[Phase]) -> list[tuple[Phase, tuple[int, ...]]]:
    """Return the phases in order of their start, each with the indices of the phases that contain it, outermost first.

    Example:
        >>> nested([Phase("publish", 0.1, 0.9), Phase("prepare", 0.0, 1.0)])[1]
        (Phase(name='publish', start_s=0.1, end_s=0.9), (0,))
    """
    found: list[tuple[Phase, tuple[int, ...]]] = []
    for phase in sorted(timeline, key=lambda one: (one.start_s, -one.end_s)):
        outer = found[-1][1] + (len(found) - 1,) if found else ()
        around = tuple(at for at in outer if found[at][0].end_s >= phase.end_s)
        found.append((phase, around))
    return found


def scalars(report: SyncReport) -> dict[str, float]:
    """Return the numbers of a report, by the keys that `SyncReport.scalars` lists."""
    known: dict[str, float] = {"version": report.version}
    known["engines"] = len(report.engines)
    served = [row for row in report.engines if (row.state, row.version) == ("serving", report.version)]
    known["engines_serving"] = len(served)
    if report.error is None:
        known |= {"bytes": report.bytes, "model_bytes": report.model_bytes, "tensors": report.tensors}
        known |= {"density": report.density, "verified": report.verified}
    if report.engines:
        known["pause_s"] = max(row.pause_s for row in report.engines)
    gaps = [row.max_gap for row in report.engines if row.max_gap is not None]
    if gaps:
        known["max_gap"] = max(gaps)
    known |= {f"phase/{name}_s" if name != "total" else "total_s": took for name, took in report.spans.items()}
    return {f"sync/{name}": float(value) for name, value in known.items()}


def table(report: SyncReport) -> str:
    """Return a report as lines of plain text: bytes, proof, phases, and a row per engine; nothing is cut."""
    served = sum((row.state, row.version) == ("serving", report.version) for row in report.engines)
    head = f"version {report.version} by {report.transport}"
    if report.error is not None:
        head += f" failed: {report.error}"
    elif report.engines:
        head += f": served by {served} of {len(report.engines)} engine(s), proof: {report.proof}"
    facts: Rows = [("bytes", f"{report.bytes:,} of {report.model_bytes:,}, {report.tensors} tensor(s)")]
    if report.density != 1.0:
        facts.append(("changed", f"{report.density:.4%} of all elements"))
    if report.encoding:
        facts.append(("encoding", report.encoding))
    if report.part:
        facts.append(("part", "only some tensors were sent"))
    timed = nested(report.timeline)
    rows: Rows = [("phase", "starts at", "seconds")]
    rows += [(f"{'  ' * len(a)}{p.name}", f"{p.start_s:.3f}", f"{p.end_s - p.start_s:.3f}") for p, a in timed]
    untimed = [name for name in report.spans if name not in {phase.name for phase, _ in timed}]
    rows += [(name, "", f"{report.spans[name]:.3f}") for name in untimed]
    lines = [head, *_aligned(facts if report.error is None else [], "<<")]
    lines += ["", *_aligned(rows, "<>>")] if len(rows) > 1 else []
    if report.engines:
        rows = [("engine", "kind", "state", "version", "pause", "proof", "gap")]
        for row in report.engines:
            gap = "" if row.max_gap is None else f"{row.max_gap:.2g}"
            version = "" if row.version is None else str(row.version)
            cells = row.engine, row.kind, row.state, version, f"{1e3 * row.pause_s:.0f} ms", row.proof, gap
            rows.append(cells)
        if not any(row[-1] for row in rows[1:]):
            rows = [row[:-1] for row in rows]
        shown = iter(_aligned(rows, "<<<>><>"))
        lines += ["", next(shown)]
        for row, line in zip(report.engines, shown, strict=True):
            lines += [line] if row.error is None else [line, f"    {row.error}"]
    return "\n".join(lines)


def _aligned(rows: Rows, how: str) -> list[str]:
    """Return rows of cells as lines, with columns aligned as ``how`` says, by one of "<" and ">" for each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(f"{cell:{at}{width}}" for cell, at, width in zip(row, how, widths, strict=False)) for row in rows
    )
    return [line.rstrip() for line in lines]


def plot(report: SyncReport, ax: Any = None) -> Any:
    """Draw a report's phases in time; see `SyncReport.plot`."""
    ax = _axes(1)[0] if ax is None else ax
    phases = [phase for phase, _ in nested(report.timeline)]
    names = list(dict.fromkeys(phase.name for phase in phases))
    for at, name in enumerate(names):
        bars = [(phase.start_s, phase.end_s - phase.start_s) for phase in phases if phase.name == name]
        ax.broken_barh(bars, (at - 0.4, 0.8), facecolors="tab:red" if name == "pause" else "tab:blue")
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xlim(0.0, report.spans.get("total"))
    ax.set_xlabel("seconds since the update began")
    ax.set_title(f"version {report.version} by {report.transport}")
    return ax


def plot_history(reports: Sequence[SyncReport], axes: Any = None) -> Any:
    """Draw bytes and pauses over versions; see `SyncReport.plot_history`."""
    above, below = axes = _axes(2) if axes is None else axes
    good = [report for report in reports if report.error is None]
    versions = [report.version for report in good]
    above.plot(versions, [report.bytes for report in good], marker="o")
    above.set(ylabel="bytes sent", yscale="log")
    pauses = [1e3 * max((row.pause_s for row in report.engines), default=0.0) for report in good]
    below.plot(versions, pauses, marker="o", color="tab:red")
    below.set(ylabel="longest pause (ms)", xlabel="version", ylim=(0.0, None))
    for report in reports:
        if report.error is not None:
            for one in axes:
                one.axvline(report.version, color="tab:gray", linestyle=":")
    return axes


def _axes(count: int) -> Any:
    """Return ``count`` axes, one above the other, of a new figure.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ConfigError.missing("matplotlib", "plot") from None
    _, axes = pyplot.subplots(count, sharex=True, squeeze=False, layout="constrained")
    return list(axes[:, 0])
