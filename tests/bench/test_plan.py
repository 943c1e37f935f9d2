"""``torchrl-ext bench plan`` on a small model: what it says, not how fast this machine is."""

from __future__ import annotations

import json

from torchrl_ext.cli.main import main

OPTIONS = ["bench", "plan", "--tensors", "30", "--ranks", "4", "--workers", "2", "--repeats", "2"]


def test_seconds_and_memory_of_a_plan_are_printed_beside_their_bounds(capsys):
    assert main([*OPTIONS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [found[name] for name in ("tensors", "ranks", "workers")] == [30, 4, 2]
    assert found["seconds"]["target"] == 5 and found["seconds"]["found"] > 0 and found["own_s"] > 0
    assert found["bytes"]["target"] == 2 << 30 and found["bytes"]["met"]
    assert found["rounds"] >= 1 and 1 <= found["balance"] < 1.1
    assert 30 <= found["transfers"] <= 2 * 30  # of one rank: one or two blocks of each tensor


def test_the_table_names_the_case(capsys):
    assert main(OPTIONS) == 0
    assert "30 tensors, 4 ranks, 2 workers" in capsys.readouterr().out
