"""A bar on a terminal for what takes long, and nothing anywhere else."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.processes import ROOT, WAIT_S
from tests.terminals import on_terminal
from torchrl_ext.base.errors import StoreError, UpdateError
from torchrl_ext.cli.frame import fail

SLOW = """
import time
from torchrl_ext.cli.frame import progress
with progress("reading a checkpoint", 200) as advance:
    for _ in range(4):
        time.sleep(0.2)
        advance(50)
"""


def test_an_update_that_a_store_failed_ends_with_the_status_of_files(capsys):
    error = UpdateError("the weights did not reach every engine")
    error.__cause__ = StoreError("cannot open /full")
    assert (fail(error), fail(UpdateError("the engine refused"))) == (4, 3)
    assert "did not reach" in capsys.readouterr().err


def test_a_step_is_shown_on_a_terminal_with_its_share():
    shown, _ = on_terminal(SLOW)
    assert "reading a checkpoint" in shown
    assert re.search("(25|50|75)%", shown)


def test_without_a_terminal_nothing_is_shown():
    command = [sys.executable, "-c", SLOW]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert (done.stderr, done.stdout) == ("", "")
