"""Every benchmark runs at its smallest size, and what it prints holds figures of every way."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from tests.bench import peers
from tests.bench.__main__ import SUBJECTS, main
from torchrl_ext.cli import bench
from torchrl_ext.cli.main import main as cli

SMALLEST = {
    "digest": "--mib 1",
    "gaps": "--size small",
    "memory": "--size small",
    "names": "--layers 1",
    "peers": "--size small --part bits",
    "small": "--tensors 300",
    "transport": "--size tiny",
}


@pytest.mark.exhaustive  # together about two minutes of processes and compilers; .ci/run runs them
@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_runs(name, capsys):
    assert SUBJECTS.keys() - SMALLEST.keys() == {"landing"}
    repeats = [] if name == "memory" else ["--repeats", "1"]
    assert main([name, *repeats, *SMALLEST[name].split(), "--json"]) == 0
    assert any(value not in ("", "0") for _, value in bench.figures(json.loads(capsys.readouterr().out)))


@pytest.mark.exhaustive
def test_transports_are_compared_with_their_references(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = json.loads(json.dumps(bench.measure_transports("tiny", 1)))
    assert all(len(taken) == 1 and min(taken) > 0 for taken in found["seconds"].values())
    for way, other in bench.REFERENCES.items():
        compared = found[f"{way} / {other}"]
        assert 0 < compared["low"] <= compared["median"] <= compared["high"]
    assert not list(tmp_path.glob("torchrl-ext-bench-*"))


def test_rounds_run_every_way_in_alternating_order():
    order = []
    taken = bench.rounds({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert order == ["a", "b", "b", "a", "a", "b"] and [len(taken[way]) for way in "ab"] == [2, 2]
    assert bench.ratio([1.0, 2.0, 4.0], [2.0, 2.0, 2.0]) == {"median": 1.0, "low": 0.5, "high": 2.0}
    assert dict(bench.figures({"a": {"b": [1.0, 3.0, 2.0]}, "n": 3})) == {"a: b": "2 (1 to 3)", "n": "3"}


def test_bench_delta_command_prints_encodings_as_json(capsys):
    assert cli(["bench", "delta", "--size", "tiny", "--density", "0.03", "--repeats", "1", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["3.0%"]
    assert row["density"] == pytest.approx(0.03, rel=0.2) and row["bits_per_changed"]["int32 + bf16"] == 48
    assert set(row["seconds"]) == {"copy", *bench.OTHERS, *bench.OURS}
    assert cli(["bench", "delta", "--size", "huge"]) == 2


@pytest.mark.engine
def test_disk_update_of_a_real_vllm_is_measured_from_outside():
    (row,) = peers.measure(size="small", repeats=2, part=["vllm"], only="disk")["rows"]
    assert row["name"] == "disk" and row["proof"] == "in place", row
    assert 0 <= row["pause_s"] < row["total_s"] + 1 and row["bytes"] > 1e6


def test_benchmarks_page_and_plots_match_the_document():
    docs = Path(__file__).parents[2] / "docs"
    drawn = runpy.run_path(str(docs / "draw_benchmarks.py"))
    document = json.loads((docs / "benchmarks.json").read_text())
    words = (docs / "benchmarks.md").read_text()
    assert drawn["page"](words, document) == words, "run python docs/draw_benchmarks.py"
    for name, draw in drawn["PLOTS"].items():
        assert (docs / "img" / f"{name}.svg").read_text() == draw(document), "run python docs/draw_benchmarks.py"
