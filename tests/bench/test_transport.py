"""``torchrl-ext bench transport`` on a small model: what it says, not how fast this machine is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from torchrl_ext.bench.runner import ratio, rounds, track_peak
from torchrl_ext.cli.main import main


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr(sys.stdout, "write", lines.append)
        status = main(["bench", "transport", "--size", "small", "--repeats", "2", "--json", "--dir", str(folder)])
    assert status == 0
    assert not list(Path(folder).iterdir())
    return "".join(lines)


def test_json_prints_one_document_and_nothing_else(output):
    assert json.loads(output)["size"] == "small"


def test_every_comparison_is_in_the_document_with_its_target(output):
    found = json.loads(output)
    targets = {
        ("model", "buckets_vs_flat"): 0.75,
        ("model", "buckets_vs_one_by_one"): 1.0,
        ("small", "buckets_vs_one_by_one"): 3.0,
        ("ipc", "ipc_vs_copy"): 0.8,
        ("disk", "publish_vs_save_file"): 0.9,
    }
    for (part, name), target in targets.items():
        one = found[part][name]
        assert one["target"] == target
        assert 0 < one["low"] <= one["median"] <= one["high"]
        assert one["met"] == (one["median"] >= target)


def test_every_way_was_measured_in_every_round(output):
    found = json.loads(output)
    for part, ways in (("model", 3), ("small", 3), ("ipc", 3), ("disk", 2)):
        assert len(found[part]["seconds"]) == ways
        assert all(len(taken) == 2 and min(taken) > 0 for taken in found[part]["seconds"].values())


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells")
def test_memory_is_held_against_two_buckets_and_two_shards(output):
    found = json.loads(output)
    for part in ("model", "small", "disk"):
        memory = found[part]["extra_memory"]
        assert memory["met"] == (memory["bytes"] < memory["bound_bytes"])
    memory = found["ipc"]["extra_memory"]
    assert memory["met"] == (memory["bytes"] <= memory["bound_bytes"] == found["ipc"]["staging_bytes"])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells")
def test_memory_that_is_freed_again_still_counts():
    with track_peak() as extra:
        block = bytearray(b"x") * (64 << 20)
        del block
    assert extra[0] >= 60 << 20


def test_rounds_run_every_way_and_begin_with_another_one_each_time():
    order = []

    def way(name):
        def run():
            order.append(name)
            return float(len(order))

        return run

    seconds = rounds({"a": way("a"), "b": way("b")}, 2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert seconds == {"a": [4.0, 5.0], "b": [3.0, 6.0]}


def test_a_ratio_is_taken_round_by_round():
    found = ratio([1.0, 2.0, 4.0], [2.0, 2.0, 2.0], target=1.0)
    assert found == {"median": 1.0, "low": 0.5, "high": 2.0, "target": 1.0, "met": True}
    assert not ratio([2.0], [1.0], target=0.9)["met"]


@pytest.mark.parametrize("subject", ["transport", "delta", "scheme", "by_shard"])
def test_a_directory_that_is_not_there_is_one_line_before_anything_is_measured(subject, tmp_path, capsys):
    assert main(["bench", subject, "--dir", str(tmp_path / "nowhere"), "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["type"] == "ConfigError" and err.splitlines()[-1].startswith("torchrl-ext bench: --dir ")
    assert len(err.splitlines()) == 1
