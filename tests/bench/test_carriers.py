"""``torchrl-ext bench carriers`` with a few bytes: what it says, not how fast this machine is."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from torchrl_ext.bench import carriers
from torchrl_ext.cli.main import main
from torchrl_ext.errors import ConfigError
from torchrl_ext.transports.sharded.nixl import load_nixl

SMALL = ["bench", "carriers", "--repeats", "2", "--mebibytes", "20", "--bucket-mebibytes", "3"]


def installed():
    try:
        return load_nixl() is not None
    except ConfigError:
        return False


@pytest.fixture(scope="module")
def output():
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout.write", lines.append)
        assert main([*SMALL, "--json"]) == 0
    return json.loads("".join(lines))


def test_every_way_was_measured_in_every_round(output):
    ways = {"gloo", "broadcast", "copy", *(["nixl"] if installed() else [])}
    assert set(output["seconds"]) == set(output["gib_per_s"]) == ways
    assert all(len(taken) == 2 and min(taken) > 0 for taken in output["seconds"].values())
    assert output["bytes"] == 20 << 20


def test_every_carrier_is_compared_with_a_broadcast_and_a_copy(output):
    for way in set(output["seconds"]) - {"broadcast", "copy"}:
        for other in ("broadcast", "copy"):
            one = output[f"{way}_vs_{other}"]
            assert 0 < one["low"] <= one["median"] <= one["high"]


def test_tables_show_all_of_it(output):
    console = Console(record=True, width=150)
    for table in carriers.tables(output):
        console.print(table)
    shown = console.export_text()
    assert "GiB/s" in shown and "gloo / broadcast" in shown
