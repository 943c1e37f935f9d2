"""``python -m tests.bench switch``: what it says, not how fast this machine is."""

import json
import sys

import pytest

from tests.bench.__main__ import main


def test_the_first_token_after_a_switch_is_measured_with_keys_kept_and_dropped(monkeypatch):
    lines = []
    monkeypatch.setattr(sys.stdout, "write", lines.append)
    asked = ["--engine", "embedded", "--repeats", "1", "--prompt", "40", "--rows", "2", "--json"]
    assert main(["switch", *asked]) == 0
    found = json.loads("".join(lines))["keys"]
    seconds = found["seconds"]
    assert (found["rows"], found["prompt"]) == (2, 40) and min(seconds.values()) > 0
    assert found["ratio"]["median"] == pytest.approx(seconds["kept"] / seconds["dropped"])
