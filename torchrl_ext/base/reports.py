"""`SyncReport`: what an update did, as fields, scalars, a table of plain text or a plot, and the logs that get it."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.base.types import Info

__all__ = ["PROOFS", "EngineRow", "Log", "Logs", "Phase", "Spans", "SyncReport", "least"]

log = logging.getLogger("torchrl_ext")


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


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """One engine's row in a report.

    Attributes:
        engine: URL, or another readable name.
        kind: as in `EngineInfo`.
        state: ``"serving"`` (the new version), ``"paused"`` (the update failed) or ``"unreachable"``.
        version: version in service, or the last known one.
        run: run of the sender that took the engine to this version; "" if the version is only a label that the engine
            reports. Two versions compare only within one run: another run counts anew.
        pause_s: seconds from the pause's acknowledgement to the resume's.
        commit: how the engine took the version: ``"live"``, between two of its steps; ``"paused: <reason>"``; "" if it
            has not.
        error: error message, or None.
        proof: what the engine proves about the version that it serves; see `SyncReport`.
        max_gap, mean_gap: largest and mean absolute difference between the engine's and the trainer's log-probabilities
            of the probe, in nats (`torchrl_ext.sync.outputs`); infinite if one is NaN, None if they were not compared.
    """

    engine: str
    kind: str
    state: str
    version: int | None = None
    run: str = ""
    pause_s: float = 0.0
    commit: str = ""
    error: str | None = None
    proof: str = "sent"
    max_gap: float | None = None
    mean_gap: float | None = None


PROOFS = ("sent", "in place", "rehearsed", "outputs")
"""Levels of proof, weakest first; `SyncReport` defines them."""


def least(proofs: Iterable[str]) -> str:
    """Return the weakest of several proofs; ``"sent"`` if there are none or one is unknown."""
    found = {*proofs}
    if not found <= {*PROOFS}:
        return PROOFS[0]
    return min(found, key=PROOFS.index, default=PROOFS[0])


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """The result of one `update_weights` call: what it sent, and what each engine serves.

    Attributes:
        version: version that the engines serve now.
        run: run of the sender whose version it is.
        transport: name of the transport.
        tensors: number of tensors sent.
        bytes: bytes of weights that the transport sent or published, counted once for all engines.
        model_bytes: bytes of the whole model.
        density: changed elements / all elements; 1.0 for a full update.
        spans: seconds by phase: ``connect`` and ``rehearse`` (before a first update), ``prepare`` (includes
            ``publish``), ``prefetch``, ``commit`` (includes ``transfer``, and the pause where there is one), ``probe``,
            and ``total``.
        engines: one row per engine.
        verified: every engine compared digests with the trainer's, and `proof` is at least ``"in place"``.
        proof: the weakest proof among the engines. ``"sent"``: the engine confirms the bytes that it received.
            ``"in place"``: the engine read them back from the tensors that it computes with; of an update that sends
            changes, it reads back a fraction each time, and all weights within
            `torchrl_ext.data.landing.patcher.READ_BACK_VERSIONS` versions. ``"rehearsed"``: they took a route that a
            rehearsal on this engine showed to give the same state as a cold start. ``"outputs"``: the engine's
            log-probabilities match the trainer's.
        rank_bytes: bytes that each trainer rank sent; empty if the transport does not count them.
        worker_bytes: bytes that each worker received; empty if the transport does not count them.
        encoding: how changes were coded; empty for a full update.
        whole: tensors sent unsharded although the trainer or the engine is sharded -> the reason.
        part: only some tensors were sent (``only=``) and engines kept the others; `proof` covers those that were sent.
        error: why the update failed (the report is `UpdateError.report`); None if every engine serves the version.
        began: Unix time at which the update began, in seconds; 0.0 if unknown.
        timeline: each run of a phase, with its start and end in seconds since ``began``, in the order in which they
            ended. A phase that runs again after a failure appears again.

    Example:
        >>> sender = tx.WeightSender(tx.make_transport("disk", root=root), tx.connect(address))
        >>> sender.register_model(lm)
        >>> report = sender.update_weights()
        >>> [(row.kind, row.state, row.version) for row in report.engines], sorted(report.spans)[:3]
        ([('embedded', 'serving', 1)], ['commit', 'connect', 'prefetch'])
        >>> print(report.table().splitlines()[0])  # print(report) shows the whole table
        version 1 by disk: served by 1 of 1 engine(s), proof: in place
        >>> report.scalars()["sync/engines_serving"]
        1.0
        >>> sender.shutdown()
    """

    version: int
    transport: str
    run: str = ""
    tensors: int = 0
    bytes: int = 0
    model_bytes: int = 0
    density: float = 1.0
    spans: Mapping[str, float] = field(default_factory=dict)
    engines: tuple[EngineRow, ...] = ()
    verified: bool = False
    proof: str = "sent"
    rank_bytes: tuple[int, ...] = ()
    worker_bytes: tuple[int, ...] = ()
    encoding: str = ""
    whole: Mapping[str, str] = field(default_factory=dict)
    part: bool = False
    error: str | None = None
    began: float = 0.0
    timeline: tuple[Phase, ...] = ()

    def scalars(self) -> dict[str, float]:
        """Return the report's numbers under flat keys, for loggers.

        ===========================  ====================================================================
        ``sync/version``             the version
        ``sync/engines``             engines in the report
        ``sync/engines_serving``     engines that serve this version
        ``sync/total_s``             seconds that the update took
        ``sync/pause_s``             the longest pause of an engine, in seconds; with engines only
        ``sync/phase/PHASE_s``       seconds of each phase of `spans`, such as ``sync/phase/prepare_s``
        ``sync/bytes``               as `bytes`; like the next four, left out if the update failed
        ``sync/model_bytes``         as `model_bytes`
        ``sync/tensors``             as `tensors`
        ``sync/density``             as `density`, from 0 to 1
        ``sync/verified``            1.0 if `verified`, else 0.0
        ``sync/max_gap``             the largest `EngineRow.max_gap`, in nats; with ``verify="outputs"`` only
        ===========================  ====================================================================
        """
        known: dict[str, float] = {"version": self.version}
        known["engines"] = len(self.engines)
        served = [row for row in self.engines if (row.state, row.version) == ("serving", self.version)]
        known["engines_serving"] = len(served)
        if self.error is None:
            known |= {"bytes": self.bytes, "model_bytes": self.model_bytes, "tensors": self.tensors}
            known |= {"density": self.density, "verified": self.verified}
        if self.engines:
            known["pause_s"] = max(row.pause_s for row in self.engines)
        gaps = [row.max_gap for row in self.engines if row.max_gap is not None]
        if gaps:
            known["max_gap"] = max(gaps)
        known |= {f"phase/{name}_s" if name != "total" else "total_s": took for name, took in self.spans.items()}
        return {f"sync/{name}": float(value) for name, value in known.items()}

    def table(self) -> str:
        """Return the report as plain text: bytes, proof, a line per phase, and a line per engine with its address."""
        served = sum((row.state, row.version) == ("serving", self.version) for row in self.engines)
        lines = [f"version {self.version} by {self.transport}"]
        if self.error is not None:
            lines[0] += f" failed: {self.error}"
        elif self.engines:
            lines[0] += f": served by {served} of {len(self.engines)} engine(s), proof: {self.proof}"
        if self.error is None:
            share = f", {self.density:.4%} of all elements" if self.density != 1.0 else ""
            lines.append(f"{self.bytes:,} of {self.model_bytes:,} bytes, {self.tensors} tensor(s){share}")
            lines += [self.encoding] if self.encoding else []
            lines += ["only some tensors were sent"] if self.part else []
        lines += [f"{name:<10}{took:>10.3f} s" for name, took in self.spans.items()]
        width = max((len(row.engine) for row in self.engines), default=0)
        for row in self.engines:
            version = "" if row.version is None else f" {row.version}"
            gap = "" if row.max_gap is None else f", {row.max_gap:.2g} nats"
            pause = "live" if row.commit == "live" else f"{1e3 * row.pause_s:.0f} ms paused"
            lines.append(f"{row.engine:<{width}}  {row.kind}  {row.state}{version}, {pause}, {row.proof}{gap}")
            lines += [] if row.error is None else [f"    {row.error}"]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def plot(self, ax: Any = None) -> Any:
        """Draw when each phase ran, one row per phase; the commit is red.

        Args:
            ax: matplotlib axes to draw on; None makes a figure.

        Returns:
            The axes.

        Raises:
            ConfigError: matplotlib, which the extra ``plot`` installs, is missing.
        """
        try:
            from matplotlib import pyplot
        except ImportError:
            raise ConfigError.missing("matplotlib", "plot") from None
        ax = pyplot.subplots(layout="constrained")[1] if ax is None else ax
        phases = sorted(self.timeline, key=lambda phase: (phase.start_s, -phase.end_s))
        names = list(dict.fromkeys(phase.name for phase in phases))
        for at, name in enumerate(names):
            bars = [(phase.start_s, phase.end_s - phase.start_s) for phase in phases if phase.name == name]
            ax.broken_barh(bars, (at - 0.4, 0.8), facecolors="tab:red" if name == "commit" else "tab:blue")
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        ax.set_xlim(0.0, self.spans.get("total"))
        ax.set_xlabel("seconds since the update began")
        ax.set_title(f"version {self.version} by {self.transport}")
        return ax

    def to_json(self) -> Info:
        """Return all fields as a JSON-safe dict; an infinite gap becomes ``"inf"``, because JSON has no infinity."""
        rest = {"spans": dict(self.spans), "whole": dict(self.whole)}
        return dataclasses.asdict(self, dict_factory=_finite) | rest


def _finite(fields: Iterable[tuple[str, Any]]) -> Info:
    return {name: str(value) if value in (math.inf, -math.inf) else value for name, value in fields}


Log = Callable[[SyncReport], object] | Any
"""A function that takes a report, or a `torchrl.record.loggers.common.Logger`."""


@final
class Logs:
    """Several logs as one, which never raises."""

    def __init__(self) -> None:
        self._logs: list[tuple[Log, Any]] = []  # each with the method by which it takes numbers, if it has one
        self._failures = 0

    def add(self, *logs: Log) -> None:
        """Add logs; see `WeightSender.log_to`.

        Raises:
            ConfigError: one is neither a logger nor a function.
        """
        for one in logs:
            log_scalar = getattr(one, "log_scalar", None)
            if not callable(log_scalar or one):
                raise ConfigError(f"{one!r} is no log", expected="a TorchRL logger, or a function that takes a report")
            self._logs.append((one, log_scalar))

    def __call__(self, report: SyncReport) -> None:
        """Hand a report to every log."""
        self._failures += report.error is not None
        numbers = report.scalars() | {"sync/failures": float(self._failures)}
        for one, log_scalar in self._logs:
            try:
                if log_scalar is None:
                    one(report)
                for name, value in numbers.items() if log_scalar is not None else ():
                    log_scalar(name, value, step=report.version)
            except Exception:
                log.warning("a log did not take the report of version %d", report.version, exc_info=True)
