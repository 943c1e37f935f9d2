"""``python -m tests.bench commit``: what it says, not how fast this machine is."""

import json
import sys

from tests.bench.__main__ import main


def test_a_commit_is_measured_beside_a_scatter_and_a_load(monkeypatch):
    lines = []
    monkeypatch.setattr(sys.stdout, "write", lines.append)
    assert main(["commit", "--elements", "200000", "--tensors", "2", "50", "--repeats", "2", "--json"]) == 0
    found = json.loads("".join(lines))
    assert [(row["tensors"], row["density"]) for row in found["rows"]] == [
        (n, d) for n in (2, 50) for d in (1e-3, 1e-2)
    ]
    for row in found["rows"]:
        assert row["of"].keys() == {"bare", "checked", "load"}
        assert all(min(share.values()) > 0 for share in row["of"].values())
        assert row["aim"]["met"] == (row["of"]["bare"]["quickest"] <= 1.3)
