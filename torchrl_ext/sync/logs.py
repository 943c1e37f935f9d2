"""`Logs` takes the reports of updates to TorchRL's loggers and to functions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, final

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.base.types import SyncReport

__all__ = ["Log", "Logs"]

log = logging.getLogger("torchrl_ext")

Log = Callable[[SyncReport], object] | Any
"""A function that takes a report, or a `torchrl.record.loggers.common.Logger`."""


@final
class Logs:
    """Several logs as one, which never raises."""

    def __init__(self) -> None:
        self._logs: list[Callable[[SyncReport], object]] = []
        self._failures = 0

    def add(self, *logs: Log) -> None:
        """Add logs; see `WeightSender.log_to`."""
        self._logs += list(map(self._as_function, logs))

    def __call__(self, report: SyncReport) -> None:
        """Hand a report to every log."""
        self._failures += report.error is not None
        for one in self._logs:
            try:
                one(report)
            except Exception:
                log.warning("a log did not take the report of version %d", report.version, exc_info=True)

    def _as_function(self, given: Log) -> Callable[[SyncReport], object]:
        """Return the function that ``given`` stands for; raises ConfigError as `WeightSender.log_to`."""
        log_scalar: Any = getattr(given, "log_scalar", None)
        if callable(log_scalar):

            def to_logger(report: SyncReport) -> None:
                for name, value in (report.scalars() | {"sync/failures": float(self._failures)}).items():
                    log_scalar(name, value, step=report.version)

            return to_logger
        if not callable(given):
            raise ConfigError(f"{given!r} is no log", expected="a TorchRL logger, or a function that takes a report")
        function: Callable[[SyncReport], object] = given
        return function
