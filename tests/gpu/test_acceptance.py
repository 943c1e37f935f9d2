"""The runner of the acceptance on a GPU, with steps that fail, die, hang, or cannot run."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from tests.gpu.acceptance import SKIPPED, Skipped, Step, main

HANG = "import time; time.sleep(600)"


def passes(scale):
    print("{not a record}")
    return {"compared": scale}


def finds(scale):
    return {"failures": ["one bit differs"]}


def breaks(scale):
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
    """Runs the command over steps; returns its exit status, and the status and the reason of each step."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("TORCHRL_EXT_CHILD", str(tmp_path / "child"))
    for name in ("TORCHRL_EXT_TEST_DEVICE", "NUMBA_CACHE_DIR"):  # which the command sets
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def run(*steps, options=()):
        status = main(["--device", "cpu", "--out", str(tmp_path), *options], steps)
        written = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
        printed = capsys.readouterr().out.splitlines()
        assert [json.loads(line) for line in printed if line.startswith("{")] == written
        table = [line.split()[:2] for line in printed[-len(steps) :]]
        assert table == [[one["step"], one["status"]] for one in written]
        return status, [(one["status"], one.get("why", one.get("failures"))) for one in written]

    yield run
    signal.signal(signal.SIGTERM, before)


def test_each_step_runs_whatever_became_of_the_one_before(taken, tmp_path):
    status, found = taken(step(hangs, 2), step(finds), step(breaks), step(dies), step(passes))
    assert status == 1 and found == [
        ("failed", "did not end within 2 s"),
        ("failed", ["one bit differs"]),
        ("failed", "ValueError: the source broke"),
        ("failed", "ended with status -6"),
        ("passed", None),
    ]
    log = (tmp_path / "log.txt").read_text()
    assert "{not a record}" in log and "Traceback" in log
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(int((tmp_path / "child").read_text())).status() == psutil.STATUS_ZOMBIE


def test_steps_that_show_nothing_or_have_no_time_are_named(taken):
    assert taken(step(passes)) == (0, [("passed", None)])
    skipped = [("skipped", "no GPU"), ("skipped", "no no_such_package")]
    assert taken(step(shows_nothing), step(passes, needs=("no_such_package",))) == (SKIPPED, skipped)
    assert taken(step(passes), options=["--limit", "0"]) == (1, [("failed", "did not end within 0 s")])
