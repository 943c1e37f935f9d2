"""The runner of the acceptance on a GPU, with steps that fail, hang, cannot run, or have no time."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from tests.gpu import acceptance
from tests.gpu.acceptance import SKIPPED, Skipped, Step, main

HANG = "import time; print('hanging', flush=True); time.sleep(600)"


def passes(scale):
    return {"compared": scale}


def finds(scale):
    return {"failures": ["one bit differs"]}


def breaks(scale):
    print("{not a record}")
    raise ValueError("the source broke")


def dies(scale):
    os.abort()


def shows_nothing(scale):
    raise Skipped("no GPU")


def hangs(scale):
    """With a child, whose process id is left in a file."""
    child = subprocess.Popen([sys.executable, "-c", HANG])
    with open(os.environ["TORCHRL_EXT_CHILD"], "w") as file:
        file.write(str(child.pid))
    time.sleep(600)


def step(function, limit_s=30, **how):
    return Step(function.__name__, limit_s, f"{__name__}:{function.__name__}", "nothing", **how)


@pytest.fixture
def taken(tmp_path, monkeypatch, capsys):
    """Runs the command over steps; returns its status, the records by step, and the lines of the table."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("TORCHRL_EXT_CHILD", str(tmp_path / "child"))
    for name in ("TORCHRL_EXT_TEST_DEVICE", "NUMBA_CACHE_DIR"):  # which the command sets
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def run(*steps, options=()):
        status = main(["--device", "cpu", "--out", str(tmp_path), *options], steps)
        written = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
        table = (tmp_path / "table.txt").read_text()
        printed = capsys.readouterr().out
        assert printed.endswith(table)
        assert [json.loads(line) for line in printed.splitlines() if line.startswith("{")] == written
        return status, {record["step"]: record for record in written}, table.splitlines()

    yield run
    signal.signal(signal.SIGTERM, before)


def test_steps_after_a_failed_one_run_and_the_status_says_so(taken, tmp_path):
    status, records, table = taken(step(finds), step(breaks), step(dies), step(passes), options=["--scale", "0.5"])
    assert status == 1
    assert [record["status"] for record in records.values()] == ["failed", "failed", "failed", "passed"]
    assert records["finds"]["failures"] == ["one bit differs"]
    assert records["breaks"]["why"] == "ValueError: the source broke"
    assert records["dies"]["why"] == "ended by SIGABRT"
    assert records["passes"]["compared"] == 0.5
    assert [line.split()[:2] for line in table[1:]] == [[name, one["status"]] for name, one in records.items()]
    assert "one bit differs" in table[1]
    log = (tmp_path / "log.txt").read_text()
    assert "{not a record}" in log and "Traceback" in log


def test_step_beyond_its_limit_is_killed_with_its_children(taken, tmp_path):
    status, records, _ = taken(step(hangs, 2), step(passes))
    assert status == 1
    assert (records["hangs"]["status"], records["passes"]["status"]) == ("failed", "passed")
    assert records["hangs"]["why"] == "did not end within 2 s"
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(int((tmp_path / "child").read_text())).status() == psutil.STATUS_ZOMBIE


def test_steps_that_show_nothing_or_have_no_time_are_named(taken, monkeypatch):
    assert taken(step(passes))[0] == 0
    steps = step(shows_nothing), step(passes, needs=("no_such_package",)), step(finds)
    status, records, table = taken(*steps, options=["--only", "shows_nothing", "passes"])
    assert status == SKIPPED and len(table) == 3
    assert [record["status"] for record in records.values()] == ["skipped", "skipped"]
    assert (records["shows_nothing"]["why"], records["passes"]["why"]) == ("no GPU", "no no_such_package")
    monkeypatch.setattr(acceptance, "_LEAST_S", 1.0)
    status, records, _ = taken(step(hangs), step(passes), options=["--limit", "4.5"])  # 3 of which are for the report
    assert status == 1 and [record["status"] for record in records.values()] == ["no time", "no time"]
    assert records["hangs"]["why"] == "1 of 30 s were left" and records["passes"]["seconds"] == 0
