"""A bar on a terminal for what takes long, and nothing anywhere else."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.processes import ROOT, WAIT_S
from tests.terminals import on_terminal

SLOW = """
import sys, time
import torchrl_ext.progress as p
p._AFTER_S = float(sys.argv[1])
with p.progress("rehearsing an update on engine", 200) as advance:
    for _ in p.counted(range(4), lambda item: 50, advance):
        time.sleep(0.2)
    with p.progress("another step beside it"):
        time.sleep(0.2)
print("rich" in sys.modules)
"""
PUBLICATION = """
import sys, time, torch
import torchrl_ext as tx, torchrl_ext.progress as p
from torchrl_ext.weights.source import as_source
p._AFTER_S = 0.05
class Slow(tx.WeightSource):
    params = lambda self: as_source({"a": torch.ones(1000), "b": torch.ones(1000)}).params()
    def __iter__(self):
        for meta in self.params():
            time.sleep(0.15)
            yield meta.name, torch.ones(1000)
sender = tx.WeightSender(tx.make_transport(sys.argv[1], root=sys.argv[2]))
for _ in range(2):
    sender.update_weights(Slow())
"""


def test_a_long_step_is_shown_on_a_terminal_with_its_share_and_those_beside_it():
    shown, _ = on_terminal(SLOW, 0.02)
    assert "rehearsing an update on engine" in shown and "another step beside it" in shown
    assert re.search("(25|50|75)%", shown) and "100%" in shown


def test_a_short_step_shows_nothing_and_imports_nothing():
    assert on_terminal(SLOW, 60) == ("", "False")


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"TTY_INTERACTIVE": "0"}])
def test_a_terminal_that_wants_no_bars_gets_none(variables):
    assert on_terminal(SLOW, 0.02, **variables)[0] == ""


def test_without_a_terminal_nothing_is_shown():
    done = subprocess.run(
        [sys.executable, "-c", SLOW, "0.02"], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S
    )
    assert (done.stderr, done.stdout.strip()) == ("", "False")


@pytest.mark.parametrize("transport", ["disk", "delta"])
def test_a_long_publication_is_shown(transport, tmp_path):
    shown, _ = on_terminal(PUBLICATION, transport, tmp_path)
    assert "writing weights version 1" in shown
    assert ("writing weights version 2" if transport == "disk" else "coding the changes of weights version 2") in shown
