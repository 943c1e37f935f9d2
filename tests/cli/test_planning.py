"""The planner: the guides' table of goals row by row."""

import dataclasses
import json
import math

import pytest

import torchrl_ext as tx
from torchrl_ext.base.errors import ConfigError
from torchrl_ext.cli.main import main
from torchrl_ext.cli.planning import DECISIONS
from torchrl_ext.compat.flags.options import WeightUpdateConfig

SMALL = {"parameters": 500_000_000, "interval_s": 60.0}
LARGE = {"parameters": 300_000_000_000, "interval_s": 60.0}


FULL, DELTA = {"update_weight_mode": "full"}, {"update_weight_mode": "delta"}
NCCL, DISK = {"update_weight_transport": "nccl"}, {"update_weight_transport": "disk"}
ON_PATH = {"group": False, "shared_path": "/shared"}


@pytest.mark.parametrize(
    ("row", "facts", "chosen", "options"),
    [
        ("external", SMALL, "collective", FULL | NCCL),
        ("topology", SMALL | {"topology": True}, "collective", FULL | NCCL),
        ("group", SMALL | {"group": True}, "collective", FULL | NCCL),
        ("group", SMALL | {"trainer_ranks": 4}, "collective", FULL | NCCL),  # small enough for the simplest
        ("shards", LARGE | {"trainer_ranks": 64}, "sharded", FULL | {"update_weight_transport": "sharded"}),
        ("path", SMALL | ON_PATH, "disk", FULL | DISK),
        ("heavy", LARGE | ON_PATH, "delta", DELTA | DISK),
        ("heavy", LARGE | {"group": False, "shared_path": "s3://bucket/updates"}, "delta", DELTA | DISK),
        ("stack", SMALL | {"same_stack": False, "shared_path": "/shared"}, "disk", FULL | DISK),
        ("validate", SMALL | {"validate_delta": True}, "delta", DELTA | NCCL | {"update_weight_encoding": "indices"}),
        ("frozen", SMALL | {"frozen_models": True}, "collective", FULL | NCCL),
        ("external", SMALL | {"colocated": True}, "ipc", FULL | NCCL | {"colocate": True}),
        ("external", {"parameters": 4 * 10**9, "network_bytes_s": 1e11, "interval_s": 1.0}, "collective", FULL | NCCL),
        ("external", {"parameters": 4 * 10**9, "network_bytes_s": 1e8, "interval_s": 1.0}, "delta", DELTA | NCCL),
    ],
)
def test_each_goal_of_the_guides_gets_a_working_entry_point(row, facts, chosen, options, tmp_path):
    facts = {name: str(tmp_path) if value == "/shared" else value for name, value in facts.items()}
    plan = tx.recommend(**facts)
    assert plan.answers[row] is DECISIONS[row]
    assert plan.transport == chosen
    assert options.items() <= plan.options.items()
    assert plan.reason and len(plan.rejected) == 5
    path = facts.get("shared_path")
    assert plan.options.get("update_weight_disk_dir") == (path if "disk" in plan.options.values() else None)
    assert WeightUpdateConfig(**plan.options).transport_config().name == chosen
    if path is None or "s3" not in path:
        transport = tx.make_transport(chosen, **plan.settings)
        assert transport.name == chosen
        transport.shutdown()


def test_decision_table_has_nine_goals():
    """The table has the eight goals of the guides and one more, with options that exist."""
    points = [decision.entry_point for decision in DECISIONS.values()]
    assert len(points) == 9
    assert sum("update_weight_mode" in point for point in points) == 5
    names = {word.partition("=")[0] for point in points for word in point.split() if "_" in word} - {"update_weights:"}
    assert names <= {field.name for field in dataclasses.fields(WeightUpdateConfig)}


def test_what_the_facts_rule_out_is_listed_with_the_reason():
    plan = tx.recommend(**SMALL, group=False, shared_path="/shared")
    assert "cannot form a process group" in plan.rejected["collective"]
    assert "share no device" in plan.rejected["ipc"] and "possible" in plan.rejected["delta over disk"]
    over_store = tx.recommend(**SMALL, group=False, shared_path="s3://bucket/updates")
    assert over_store.transport == "delta" and "checkpoint directories" in over_store.rejected["disk"]
    shared = tx.recommend(**SMALL, colocated=True)
    assert shared.transport == "ipc" and "memory handles" in shared.rejected["delta over collective"]


def test_without_any_route_the_error_names_every_obstacle():
    with pytest.raises(ConfigError, match=r"collective: .*process group.*disk: .*no path"):
        tx.recommend(**SMALL, group=False)
    with pytest.raises(ConfigError, match="memory handles would not become smaller"):
        tx.recommend(colocated=True, validate_delta=True)


@pytest.mark.parametrize("facts", [{"parameters": 0}, {"interval_s": math.nan}])
def test_facts_that_cannot_be_are_refused(facts):
    with pytest.raises(ConfigError):
        tx.recommend(**facts)


# the command


def test_the_command_refuses_numbers_that_cannot_be(capsys):
    for wrong, words in (("0", "a positive number"), ("8X", "8X is not a number, which may end in k, M, G, B, T")):
        assert main(["plan", "--parameters", wrong, "--json"]) == 2
        assert words in json.loads(capsys.readouterr().out)["error"]


def test_plan_command_prints_page_or_json(capsys):
    argv = ["plan", "--parameters", "30B", "--no-group", "--shared-path", "/shared"]
    assert main(argv) == 0
    page = capsys.readouterr().out
    for words in ("rejected", "cannot form a process group", "--update-weight-mode"):
        assert words in page
    assert main([*argv, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["facts"]["parameters"] == 30_000_000_000 and told["facts"]["group"] is False
    assert told["transport"] == "delta" and {"ipc", "collective", "sharded", "disk"} < told["rejected"].keys()
