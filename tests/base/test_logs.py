"""`WeightSender.log_to`: TorchRL's loggers, as their own reader sees them, and functions."""

from __future__ import annotations

import csv

import pytest
from torch import nn
from torchrl.record.loggers import CSVLogger

import torchrl_ext as tx
from torchrl_ext.base.errors import ConfigError, UpdateError
from torchrl_ext.data.landing.loader import TensorsLoader
from torchrl_ext.sync.local.inprocess import InProcessEngine


class Loader(TensorsLoader):
    """Refuses to load as long as it is told to."""

    refuses = False

    def load(self, pairs):
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


def test_torchrl_logger_gets_scalars_and_failures_by_version(trainer, tmp_path):
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


def test_log_function_gets_reports_and_an_error_is_a_warning(trainer, caplog):
    got = []

    def broken(report):
        raise OSError("no space for logs")

    trainer.sender.log_to(broken, got.append)
    reports = [trainer.update(), trainer.fail()]
    assert got == reports and [report.error is None for report in got] == [True, False]
    warnings = [record for record in caplog.records if "a log did not take the report" in record.message]
    assert len(warnings) == 2 and "no space for logs" in caplog.text
    assert trainer.update().engines[0].state == "serving"
    with pytest.raises(ConfigError, match="is no log"):
        trainer.sender.log_to("csv")
