"""Takes the reports of updates to TorchRL's loggers, Prometheus, OpenTelemetry and functions.

`WeightSender.log_to` takes what is here, or the names ``"prometheus"`` and ``"opentelemetry"``.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torchrl_ext
from torchrl_ext.errors import ConfigError, UpdateError
from torchrl_ext.reports import nested
from torchrl_ext.types import SyncReport

__all__ = ["Log", "Logs", "OpenTelemetryLog", "PrometheusLog", "TorchRLLog"]

log = logging.getLogger("torchrl_ext")

Log = Callable[[SyncReport], object] | str | Any
"""A function that takes a report, the name of a log, or a `torchrl.record.loggers.common.Logger`."""

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 600.0)
"""Upper bounds of the buckets of Prometheus histograms."""


@final
class Logs:
    """Several logs as one, which never raises."""

    def __init__(self) -> None:
        self._logs: list[Callable[[SyncReport], object]] = []

    def add(self, *logs: Log) -> None:
        """Add logs; see `WeightSender.log_to`."""
        self._logs += list(map(_as_function, logs))

    def __call__(self, report: SyncReport) -> None:
        """Hand a report to every log."""
        for one in self._logs:
            try:
                one(report)
            except Exception:
                log.warning("a log did not take the report of version %d", report.version, exc_info=True)

    @contextmanager
    def of_failures(self) -> Iterator[None]:
        """Return a context that logs the report of an `UpdateError`, which it raises again."""
        try:
            yield
        except UpdateError as error:
            if error.report is not None:
                self(error.report)
            raise


def _as_function(given: Log) -> Callable[[SyncReport], object]:
    """Return the log that ``given`` stands for; raises ConfigError as `WeightSender.log_to`."""
    if isinstance(given, str) and given in _NAMED:
        return _NAMED[given]()
    if callable(getattr(given, "log_scalar", None)):
        return TorchRLLog(given)
    if callable(given):
        return given
    raise ConfigError(
        f"{given!r} is no log",
        expected=f"a TorchRL logger, a function that takes a report, or one of {', '.join(map(repr, _NAMED))}",
    )


@final
class TorchRLLog:
    """Logs `SyncReport.scalars`, and the number of failed updates so far as ``sync/failures``; the step is the version.

    Args:
        logger: a `torchrl.record.loggers.common.Logger`, or anything with its ``log_scalar(name, value, step)``.
    """

    def __init__(self, logger: Any) -> None:
        self._logger, self._failures = logger, 0

    def __call__(self, report: SyncReport) -> None:
        self._failures += report.error is not None
        for name, value in (report.scalars() | {"sync/failures": float(self._failures)}).items():
            self._logger.log_scalar(name, value, step=report.version)


@final
class PrometheusLog:
    """Counts updates in a registry of `prometheus_client`; serve it with ``prometheus_client.start_http_server(port)``.

    ============================================  =========  ==================================================
    ``torchrl_ext_updates_total``                 counter    updates, by ``outcome``: ``accepted`` or ``failed``
    ``torchrl_ext_sent_bytes_total``              counter    bytes of accepted updates
    ``torchrl_ext_update_duration_seconds``       histogram  whole updates, failed ones too
    ``torchrl_ext_phase_duration_seconds``        histogram  each ``phase`` of them
    ``torchrl_ext_pause_duration_seconds``        histogram  one pause per engine and accepted update
    ``torchrl_ext_weights_version``               gauge      the newest accepted version
    ``torchrl_ext_changed_ratio``                 gauge      `SyncReport.density` of that version
    ``torchrl_ext_engines_serving``               gauge      engines that serve the version of the last update
    ============================================  =========  ==================================================

    All have the label ``transport``. Logs with the same registry share them.

    Args:
        registry: a `prometheus_client.CollectorRegistry`; None for the default one.

    Raises:
        ConfigError: prometheus_client, which the extra ``prometheus`` installs, is missing.
    """

    def __init__(self, registry: Any = None) -> None:
        try:
            import prometheus_client
        except ImportError:
            raise ConfigError.missing("prometheus_client", "prometheus") from None
        registry = prometheus_client.REGISTRY if registry is None else registry
        with _lock:
            if registry not in _metrics:
                _metrics[registry] = _Metrics(prometheus_client, registry)
            self._metrics = _metrics[registry]

    def __call__(self, report: SyncReport) -> None:
        to, by = self._metrics, report.transport
        to.updates.labels(by, "accepted" if report.error is None else "failed").inc()
        for phase, took in report.spans.items():
            (to.update.labels(by) if phase == "total" else to.phase.labels(by, phase)).observe(took)
        serving = [row for row in report.engines if (row.state, row.version) == ("serving", report.version)]
        to.serving.labels(by).set(len(serving))
        if report.error is None:
            to.sent.labels(by).inc(report.bytes)
            to.version.labels(by).set(report.version)
            to.changed.labels(by).set(report.density)
            for row in report.engines:
                to.pause.labels(by).observe(row.pause_s)


class _Metrics:
    """The metrics of one registry, which refuses a second one of the same name."""

    def __init__(self, client: Any, registry: Any) -> None:
        def made(kind: Any, name: str, what: str, *labels: str, **more: Any) -> Any:
            return kind(f"torchrl_ext_{name}", what, ("transport", *labels), registry=registry, **more)

        count, histogram, gauge = client.Counter, client.Histogram, client.Gauge
        self.updates = made(count, "updates", "Updates of engines' weights", "outcome")
        self.sent = made(count, "sent_bytes", "Bytes of accepted updates, counted once for all engines")
        seconds = {"buckets": _SECONDS}
        self.update = made(histogram, "update_duration_seconds", "Duration of an update", **seconds)
        self.phase = made(histogram, "phase_duration_seconds", "Duration of a phase of an update", "phase", **seconds)
        self.pause = made(histogram, "pause_duration_seconds", "Pause of an engine in an update", **seconds)
        self.version = made(gauge, "weights_version", "Newest accepted version")
        self.changed = made(gauge, "changed_ratio", "Changed elements of all, in the newest accepted version")
        self.serving = made(gauge, "engines_serving", "Engines that serve the version of the last update")


_metrics: weakref.WeakKeyDictionary[Any, _Metrics] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@final
class OpenTelemetryLog:
    """Records each update as a span ``weights update`` with one span per run of a phase, at the times when they ran.

    The parent is the span that is current where `WeightSender.update_weights` runs. A failed update has the status
    ERROR. The attributes are `SyncReport.scalars`, ``sync/transport`` and ``sync/proof``, with dots for slashes.

    Args:
        tracer: an `opentelemetry.trace.Tracer`; None for that of the global tracer provider.

    Raises:
        ConfigError: opentelemetry-api, which the extra ``opentelemetry`` installs, is missing.
    """

    def __init__(self, tracer: Any = None) -> None:
        try:
            from opentelemetry import trace
        except ImportError:
            raise ConfigError.missing("opentelemetry-api", "opentelemetry") from None
        self._trace = trace
        self._tracer = trace.get_tracer("torchrl_ext", torchrl_ext.__version__) if tracer is None else tracer

    def __call__(self, report: SyncReport) -> None:
        trace = self._trace
        facts = report.scalars() | {"sync/transport": report.transport, "sync/proof": report.proof}
        attributes = {name.replace("/", "."): value for name, value in facts.items()}
        update = self._tracer.start_span("weights update", attributes=attributes, start_time=_ns(report.began))
        if report.error is not None:
            update.set_status(trace.Status(trace.StatusCode.ERROR, report.error))
        ends, phases = [(update, report.spans["total"])], list[Any]()
        for phase, around in nested(report.timeline):
            parent = phases[around[-1]] if around else update
            began = _ns(report.began + phase.start_s)
            span = self._tracer.start_span(phase.name, trace.set_span_in_context(parent), start_time=began)
            phases.append(span)
            ends.append((span, phase.end_s))
        for span, end_s in reversed(ends):
            span.end(_ns(report.began + end_s))


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)


_NAMED: dict[str, Callable[[], Callable[[SyncReport], object]]] = {
    "prometheus": PrometheusLog,
    "opentelemetry": OpenTelemetryLog,
}
