"""``python -m tests.bench proof``: what it says, not how fast this machine is."""

import json
import sys

from tests.bench.__main__ import main


def test_reading_back_is_measured_beside_the_updates_that_it_proves(monkeypatch):
    lines = []
    monkeypatch.setattr(sys.stdout, "write", lines.append)
    assert main(["proof", "--elements", "200000", "--repeats", "2", "--json"]) == 0
    found = json.loads("".join(lines))
    share = found["share"]
    assert 0 < share["low"] <= share["median"] <= share["high"] and found["update_s"] > 0
    assert found["met"] == (share["median"] <= 0.05) and found["elements"] == 24 * 4096 * 2
