from __future__ import annotations

import argparse
import json

import pytest
import torch
from rich.console import Console

from torchrl_ext.bench import delta as bench_delta
from torchrl_ext.bench import first_use as delta_first_use
from torchrl_ext.bench.data import real_chain, synthetic_pair

TINY = {"hidden": 64, "layers": 1, "vocabulary": 512}


@pytest.fixture(scope="module")
def results() -> dict:
    pair = synthetic_pair(0.03, **TINY)
    row = {"data": "3 %", **bench_delta.measure_sizes(pair, 2), **bench_delta.measure_encode(pair, 2, 2)}
    return {"threads": 2, "cores": 2, "sets": [row]}


def test_every_figure_stands_beside_its_reference_and_survives_json(results):
    row = json.loads(json.dumps(results))["sets"][0]
    assert row["changed"] / row["parameters"] == pytest.approx(0.03, rel=0.1)
    assert row["bytes"]["int32 + bf16"] == 6 * row["changed"]
    assert set(row["bytes"]) > {"xor", "overwrite", "ulp", "context", "auto"}
    assert set(row["seconds"]) == {"copy", "xor", "ulp", "context", "bitmap"}
    assert all(len(seconds) == 2 for seconds in row["seconds"].values())
    assert row["bytes"]["ulp"] < row["bytes"]["overwrite"]
    assert 0 < row["bound_bits"]["conditional"] < row["bound_bits"]["plain"] < row["bits_per_changed"]["ulp"]


def test_the_tables_name_every_data_set(results):
    console = Console(record=True, width=250)
    for table in bench_delta.tables(results):
        console.print(table)
    text = console.export_text()
    assert text.count("3 %") == 2
    assert "context/cond." in text


def test_the_command_takes_sizes_densities_and_threads():
    parser = argparse.ArgumentParser()
    bench_delta.add_arguments(parser)
    args = parser.parse_args(["--size", "full", "--densities", "0.5", "1", "--threads", "3"])
    assert (args.size, args.densities, args.threads) == ("full", [0.5, 1.0], 3)


def test_a_fine_tuning_run_changes_few_weights_by_small_steps():
    chain = real_chain(hidden=64, layers=1, vocabulary=256, pretrain_steps=20, warm_steps=3, syncs=2)
    assert len(chain) == 3
    changed = sum(int((chain[1][name] != new).sum()) for name, new in chain[2].items())
    total = sum(new.numel() for new in chain[2].values())
    assert 0 < changed < 0.2 * total
    assert {new.dtype for new in chain[2].values()} == {torch.bfloat16}


@pytest.mark.parametrize("clustered", [False, True])
def test_synthetic_pairs_have_the_density_that_was_asked_for(clustered):
    pair = synthetic_pair(0.1, clustered=clustered, hidden=256, layers=1, vocabulary=4096)
    total = sum(new.numel() for _, _, new in pair)
    changed = sum(int((old != new).sum()) for _, old, new in pair)
    assert changed / total == pytest.approx(0.1, rel=0.1)


def test_first_uses_are_shown_beside_the_compiler_and_the_cache():
    end = {step: 0.5 for step in delta_first_use.STEPS}
    both = {"trainer": end, "engine": end}
    largest = {"found": 0.5, "target": delta_first_use.MOST_S, "met": True}
    found = {"cache": "/somewhere", "empty": both, "warm": both, "largest": largest}
    (table,) = bench_delta.tables({"sets": [], "first_use": found})
    assert table.row_count == len(delta_first_use.STEPS) and "/somewhere" in table.caption


@pytest.mark.exhaustive
def test_fresh_processes_wait_for_no_compiler_in_an_update():
    found = delta_first_use.measure_first_use(print)
    assert found["empty"]["trainer"]["compiled"] > 0
    for state, end in (("empty", "engine"), ("warm", "trainer"), ("warm", "engine")):
        assert found[state][end]["compiled"] == 0
