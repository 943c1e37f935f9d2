from __future__ import annotations

import argparse
import json

import pytest
from rich.console import Console

from torchrl_ext.bench.ranks import by_shard


@pytest.mark.exhaustive
def test_ranks_keep_their_part_alone_and_half_a_worker_reads_half_of_the_files():
    results = by_shard.delta_by_shard(2, 2, 128, versions=1) | {"encode": by_shard.encode(2, 2, 128, repeats=1)}
    results = json.loads(json.dumps(results))
    assert [row["copies"] for row in results["ranks"]] == [0.5, 0.5]
    assert 0.4 < results["rows"] < 0.6 and results["columns"] == 1.0
    assert results["memory"]["target"] is None
    console = Console(record=True, width=150)
    for table in by_shard.tables(results):
        console.print(table)
    said = console.export_text()
    assert "half of the rows" in said and "coding blocks of columns / the same unsharded" in said


def test_the_command_takes_ranks_and_the_size_of_the_model():
    parser = argparse.ArgumentParser()
    by_shard.add_arguments(parser)
    args = parser.parse_args(["--ranks", "2", "--layers", "3", "--width", "64"])
    assert (args.ranks, args.layers, args.width, args.density) == (2, 3, 64, 0.03)
