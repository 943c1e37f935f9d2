"""The options of the kit, the outcome of each case, and the table at the end; pytest loads it by an entry point."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import pytest

KIT = "torchrl_ext.testing.engine"
ROWS = pytest.StashKey[dict[str, dict[str, Any]]]()
SUBJECT = pytest.StashKey[Any]()
_OUTCOMES = ("refused", "not applicable")
_COLUMNS = ("kind", "release", "plugin", "transport", "model")


def _chosen(config: Any) -> bool:
    return any(str(argument).partition("::")[0] == KIT for argument in config.invocation_params.args)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the options, to runs that name the kit."""
    if not _chosen(pluginmanager.get_plugin("pytestconfig")):
        return
    group = parser.getgroup("torchrl_ext", "an engine to judge (torchrl_ext.testing.engine)")
    group.addoption("--url", help="address of the engine; without it every case is skipped")
    group.addoption("--kind", default="", help="its kind: vllm, sglang, embedded, ...; by default the one it reports")
    group.addoption("--model", default="", help="checkpoint directory that it was started with; default: as it reports")
    group.addoption("--transport", default="disk", help="how it gets weights: disk, native, delta, collective, ...")
    group.addoption("--root", help="directory for files, which the engine sees at the same path")
    group.addoption("--results", help="file that gets a line of JSON per case")


def pytest_configure(config: pytest.Config) -> None:
    """Begin an empty table."""
    config.stash[ROWS] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note the outcome of a case; a failure after it counts, too."""
    report = yield
    module = getattr(getattr(item, "module", None), "__name__", "")
    if not module.startswith(KIT):
        return report
    if report.when == "call" or not report.passed:
        row = item.config.stash[ROWS].setdefault(item.name, {"case": item.name, "outcome": "passed", "reason": ""})
        row["promise"] = " ".join((getattr(item, "obj", item).__doc__ or "").split())
        row["seconds"] = round(row.get("seconds", 0.0) + report.duration, 2)
        words = "" if call.excinfo is None else str(call.excinfo.value).strip().partition("\n")[0]
        if report.skipped:
            outcome, _, reason = words.removeprefix("Skipped: ").partition(": ")
            row |= {"outcome": outcome, "reason": reason} if outcome in _OUTCOMES else {"outcome": "skipped"}
        elif report.failed and row["outcome"] != "failed":
            row |= {"outcome": "failed", "reason": words}
    subject, path = item.config.stash.get(SUBJECT, None), item.config.getoption("--results")
    if report.when == "teardown" and subject and path:  # now, since a later case may never end
        with open(path, "a") as file:
            file.write(json.dumps({**subject.describe(), **item.config.stash[ROWS][item.name]}) + "\n")
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table."""
    subject = config.stash.get(SUBJECT, None)
    if subject is None:
        return
    named, rows = subject.describe(), config.stash[ROWS].values()
    terminalreporter.section(" ".join(named[column] for column in _COLUMNS))
    for row in rows:
        terminalreporter.write_line(f"{row['outcome']:<14} {row['promise']}")
        if row["reason"]:
            terminalreporter.write_line(f"{'':<14}   {row['reason']}")
    if subject.why_not:
        terminalreporter.write_line(f"Outputs were compared with the engine's own only: {subject.why_not}.")
