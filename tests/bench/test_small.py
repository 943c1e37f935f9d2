"""``python -m tests.bench small``: what it says, not how fast this machine is."""

import json
import sys

from tests.bench.__main__ import main


def test_each_step_of_an_update_is_measured_beside_a_clone_of_each_tensor(monkeypatch):
    lines = []
    monkeypatch.setattr(sys.stdout, "write", lines.append)
    assert main(["small", "--tensors", "300", "--repeats", "2", "--json"]) == 0
    found = json.loads("".join(lines))
    assert found["clones"].keys() == {"keyframe", "publish", "first prefetch", "prefetch", "commit"}
    assert all(row["found"] > 0 and row["met"] == (row["found"] <= row["target"]) for row in found["clones"].values())
    assert found["clone_ms"] > 0 and all(row["found"] > 0 for row in found["manifest_ms"].values())
