"""``torchrl-ext bench scheme`` on a small policy: what it says, not how fast this machine is."""

from __future__ import annotations

import json
import sys

import pytest

from torchrl_ext.cli.main import main
from torchrl_ext.errors import ConfigError


def test_both_schemes_are_measured_in_one_run_and_their_ratio_is_printed(monkeypatch, tmp_path):
    lines = []
    monkeypatch.setattr(sys.stdout, "write", lines.append)
    options = [
        "--parameters",
        "60000",
        "--workers",
        "2",
        "--repeats",
        "2",
        "--transport",
        "disk",
        "--dir",
        str(tmp_path),
    ]
    assert main(["bench", "scheme", *options, "--json"]) == 0
    found = json.loads("".join(lines))
    assert (found["transport"], found["workers"], found["bytes"]) == ("disk", 2, 4 * found["parameters"])
    assert {way: len(taken) for way, taken in found["seconds"].items()} == {
        "ours": 2,
        "torchrl": 2,
        "torchrl_shared": 2,
    }
    assert found["workers_see_what_was_not_sent"]["ours"] is False
    one = found["send_vs_torchrl"]
    assert 0 < one["low"] <= one["median"] <= one["high"] and one["target"] == 1.0
    assert one["met"] == (one["median"] >= 1.0)
    assert not list(tmp_path.iterdir())


def test_a_transport_that_stays_in_the_process_is_refused(capsys):
    try:
        status = main(["bench", "scheme", "--transport", "memory", "--parameters", "100"])
    except ConfigError as error:
        pytest.fail(f"not reported as a message: {error}")
    assert status != 0
    assert "memory" in capsys.readouterr().err
