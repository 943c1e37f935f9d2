"""The options of the kit, the outcome of each case, and the table at the end; pytest loads it by an entry point."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import pytest

KIT = "torchrl_ext.testing.engine"
SUBJECT = pytest.StashKey[Any]()
ROWS = pytest.StashKey[dict[str, dict[str, Any]]]()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the options, to runs that name the kit."""
    config: Any = pluginmanager.get_plugin("pytestconfig")
    if not any(str(argument).partition("::")[0] == KIT for argument in config.invocation_params.args):
        return
    group = parser.getgroup("torchrl_ext", "an engine to judge (torchrl_ext.testing.engine)")
    group.addoption("--url", help="address of the engine; without it every case is skipped")
    group.addoption("--kind", default="", help="its kind: vllm, sglang, embedded, ...; by default the one it reports")
    group.addoption("--model", default="", help="checkpoint directory that it was started with; default: as it reports")
    group.addoption("--transport", default="disk", help="how it gets weights; stock engines follow by disk and native")
    group.addoption("--root", help="directory for files, which the engine sees at the same path; default: temporary")
    group.addoption("--results", help="file that gets a line of JSON per case")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Note the outcome of a case; a failure after it counts, too."""
    report = yield
    subject = item.config.stash.get(SUBJECT, None)
    if subject is None or KIT not in str(getattr(item, "module", "")):
        return report
    rows = item.config.stash.setdefault(ROWS, {})
    if report.when == "call" or not report.passed:
        new = {"case": item.name, "promise": item.obj.__doc__, "outcome": "passed", "reason": ""}
        row = rows.setdefault(item.name, subject.describe() | new)
        words = "" if call.excinfo is None else str(call.excinfo.value).strip().partition("\n")[0]
        if report.skipped:
            row["outcome"], _, row["reason"] = words.partition(": ")
        elif report.failed and row["outcome"] != "failed":
            row |= {"outcome": "failed", "reason": words}
    if report.when == "teardown" and item.config.option.results:  # now, since a later case may never end
        with open(item.config.option.results, "a") as file:
            file.write(json.dumps(rows[item.name]) + "\n")
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table."""
    subject = config.stash.get(SUBJECT, None)
    if subject is None or ROWS not in config.stash:  # the run ended before its first case
        return
    terminalreporter.section(" ".join(filter(None, subject.describe().values())))
    for row in config.stash[ROWS].values():
        terminalreporter.write_line(f"{row['outcome']:<14} {row['promise']}")
        if row["reason"]:
            terminalreporter.write_line(f"{'':<14}   {row['reason']}")
    if subject.why_not:
        terminalreporter.write_line(f"Outputs were not compared with those of transformers: {subject.why_not}")
