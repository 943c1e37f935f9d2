"""`WeightSender.log_to`: TorchRL's loggers, Prometheus and OpenTelemetry, each as its own reader sees it."""

from __future__ import annotations

import csv
import time

import prometheus_client
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from torch import nn
from torchrl.record.loggers import CSVLogger
from torchrl.record.loggers.common import Logger

import torchrl_ext as tx
from torchrl_ext.errors import ConfigError, UpdateError
from torchrl_ext.landing.loader import TensorsLoader
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.sync.telemetry import OpenTelemetryLog, PrometheusLog


class Loader(TensorsLoader):
    """Notes when it loads, and refuses as long as it is told to."""

    refuses = False

    def load(self, pairs):
        self.loading = time.time_ns()
        if self.refuses:
            raise RuntimeError("the engine ran out of memory")
        super().load(pairs)


class Trainer:
    def __init__(self, root):
        self.loader, self.policy = Loader(nn.Linear(30, 20)), nn.Linear(30, 20)
        engine = InProcessEngine(tx.WeightReceiver(self.loader), url="engine")
        self.sender = tx.WeightSender(tx.make_transport("disk", root=root), engine)
        self.update = lambda: self.sender.update_weights(self.policy)

    def fail(self):
        self.loader.refuses = True
        with pytest.raises(UpdateError) as caught:
            self.update()
        self.loader.refuses = False
        return caught.value.report


@pytest.fixture
def trainer(tmp_path):
    trainer = Trainer(tmp_path / "updates")
    yield trainer
    trainer.sender.shutdown()


def test_a_logger_of_torchrl_has_every_scalar_by_version_and_the_number_of_failures(trainer, tmp_path):
    logger = CSVLogger("run", log_dir=str(tmp_path / "logs"))
    trainer.sender.log_to(logger)
    first = trainer.update()
    failed = trainer.fail()
    last = trainer.update()
    logger.experiment.__del__()  # closes the files

    def column(key):
        with open(tmp_path / "logs" / "run" / "scalars" / f"{key}.csv") as file:
            return {int(step): float(value) for step, value in csv.reader(file)}

    for report in (first, last):
        assert {key: column(key)[report.version] for key in report.scalars()} == report.scalars()
    assert failed.version not in column("sync/bytes")
    versions = first.version, failed.version, last.version
    assert len({*versions}) == 3 and column("sync/failures") == dict(zip(versions, (0.0, 1.0, 1.0), strict=True))
    assert column("sync/engines_serving") == dict(zip(versions, (1.0, 0.0, 1.0), strict=True))


def test_every_logger_that_derives_from_torchrls_base_is_one(trainer):
    class Noting(Logger):
        def __init__(self):
            self.noted = []

        def log_scalar(self, name, value, step=None):
            self.noted.append((name, value, step))

        _create_experiment = log_video = log_hparams = log_histogram = __repr__ = object.__repr__

    noting = Noting()
    trainer.sender.log_to(noting)
    report = trainer.update()
    assert ("sync/bytes", float(report.bytes), 1) in noting.noted


def exposed(registry):
    """What a Prometheus server reads: name and labels -> value."""
    families = text_string_to_metric_families(prometheus_client.generate_latest(registry).decode())
    samples = [sample for family in families for sample in family.samples]
    return {(sample.name, *sorted(sample.labels.items())): sample.value for sample in samples}


def test_prometheus_counts_updates_bytes_seconds_and_failures(trainer, tmp_path):
    registry = prometheus_client.CollectorRegistry()
    trainer.sender.log_to(PrometheusLog(registry))
    reports = [trainer.update(), trainer.update()]
    read = exposed(registry)
    by = ("transport", "disk")
    assert read["torchrl_ext_updates_total", ("outcome", "accepted"), by] == 2
    assert read["torchrl_ext_sent_bytes_total", by] == sum(report.bytes for report in reports)
    paused = sum(report.engines[0].pause_s for report in reports)
    assert read["torchrl_ext_pause_duration_seconds_count", by] == 2
    assert read["torchrl_ext_pause_duration_seconds_sum", by] == pytest.approx(paused)
    prepared = sum(report.spans["prepare"] for report in reports)
    assert read["torchrl_ext_phase_duration_seconds_sum", ("phase", "prepare"), by] == pytest.approx(prepared)
    assert read["torchrl_ext_weights_version", by] == 2 and read["torchrl_ext_engines_serving", by] == 1

    other = Trainer(tmp_path / "other")  # a second sender, the same registry
    other.sender.log_to(PrometheusLog(registry))
    other.update()
    other.sender.shutdown()
    failed = trainer.fail()
    read = exposed(registry)
    assert read["torchrl_ext_updates_total", ("outcome", "accepted"), by] == 3
    assert read["torchrl_ext_updates_total", ("outcome", "failed"), by] == 1
    assert read["torchrl_ext_update_duration_seconds_count", by] == 4
    assert read["torchrl_ext_sent_bytes_total", by] == 3 * failed.model_bytes
    assert read["torchrl_ext_engines_serving", by] == 0


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("test")


def test_opentelemetry_has_a_span_per_update_and_per_phase_at_the_times_when_they_ran(trainer, exporter, tracer):
    trainer.sender.log_to(OpenTelemetryLog(tracer))
    with tracer.start_as_current_span("training step") as step:
        before = time.time_ns()
        trainer.update()
        after = time.time_ns()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    update = spans["weights update"]
    assert update.parent.span_id == step.get_span_context().span_id and update.status.is_ok is True
    slack = 5_000_000  # the clock of spans is not that of durations
    assert before - slack <= update.start_time < update.end_time <= after + slack
    assert update.attributes["sync.version"] == 1 and update.attributes["sync.transport"] == "disk"
    for name, around in (("prepare", update), ("publish", spans["prepare"]), ("pause", update)):
        assert spans[name].parent.span_id == around.context.span_id
        assert around.start_time <= spans[name].start_time <= spans[name].end_time <= around.end_time
    assert spans["publish"].end_time <= spans["pause"].start_time
    assert spans["pause"].start_time - slack <= trainer.loader.loading <= spans["pause"].end_time + slack


def test_a_failed_update_is_a_span_with_the_error(trainer, exporter, tracer):
    trainer.sender.log_to(OpenTelemetryLog(tracer))
    report = trainer.fail()
    [update] = [span for span in exporter.get_finished_spans() if span.name == "weights update"]
    assert update.status.status_code is trace.StatusCode.ERROR
    assert update.status.description == report.error and "ran out of memory" in report.error
    assert {span.name for span in exporter.get_finished_spans()} >= {"prepare", "pause"}


def test_a_function_gets_each_report_and_one_that_raises_is_a_warning(trainer, caplog):
    got = []

    def broken(report):
        raise OSError("no space for logs")

    trainer.sender.log_to(broken, got.append)
    reports = [trainer.update(), trainer.fail()]
    assert got == reports and [report.error is None for report in got] == [True, False]
    warnings = [record for record in caplog.records if "a log did not take the report" in record.message]
    assert len(warnings) == 2 and "no space for logs" in caplog.text
    assert trainer.update().engines[0].state == "serving"


def test_names_are_logs_and_other_things_are_refused(trainer):
    trainer.sender.log_to("prometheus", "opentelemetry")
    trainer.update()
    assert exposed(prometheus_client.REGISTRY)[
        "torchrl_ext_updates_total", ("outcome", "accepted"), ("transport", "disk")
    ]
    for wrong in ("prometheuss", 7, None):
        with pytest.raises(ConfigError, match=r"is no log.*'prometheus', 'opentelemetry'"):
            trainer.sender.log_to(wrong)
