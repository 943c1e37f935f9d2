"""The planner: the guides' table of goals row by row, and ``torchrl-ext plan``."""

import json

import pytest

import torchrl_ext as tx
from torchrl_ext.base.errors import ConfigError
from torchrl_ext.cli.main import main
from torchrl_ext.cli.planning import GOALS
from torchrl_ext.compat.flags.options import WeightUpdateConfig

FULL, DELTA = {"update_weight_mode": "full"}, {"update_weight_mode": "delta"}
NCCL, DISK = {"update_weight_transport": "nccl"}, {"update_weight_transport": "disk"}
ON_PATH, HEAVY = {"group": False, "shared_path": "/shared"}, {"heavy": True}


@pytest.mark.parametrize(
    ("row", "facts", "chosen", "options"),
    [
        ("external", {}, "collective", FULL | NCCL),
        ("topology", {"topology": True}, "collective", FULL | NCCL),
        ("group", {"sharded": True}, "collective", FULL | NCCL),  # the simplest
        ("shards", HEAVY | {"sharded": True}, "sharded", FULL | {"update_weight_transport": "sharded"}),
        ("path", ON_PATH, "disk", FULL | DISK),
        ("heavy", HEAVY | ON_PATH, "delta", DELTA | DISK),
        ("heavy", HEAVY | {"group": False, "shared_path": "s3://bucket/updates"}, "delta", DELTA | DISK),
        ("stack", {"same_stack": False, "shared_path": "/shared"}, "disk", FULL | DISK),
        ("validate", {"validate_delta": True}, "delta", DELTA | NCCL | {"update_weight_encoding": "indices"}),
        ("frozen", {"frozen_models": True}, "collective", FULL | NCCL),
        ("external", HEAVY | {"colocated": True}, "ipc", FULL | NCCL | {"colocate": True}),
        ("external", HEAVY, "delta", DELTA | NCCL),
    ],
)
def test_each_goal_of_the_guides_gets_a_working_entry_point(row, facts, chosen, options, tmp_path):
    facts = {name: str(tmp_path) if value == "/shared" else value for name, value in facts.items()}
    plan = tx.recommend(**facts)
    assert plan.answers[row] is GOALS[row] and plan.transport == chosen and len(plan.rejected) == 5
    assert options.items() <= plan.options.items()
    path = facts.get("shared_path")
    assert plan.options.get("update_weight_disk_dir") == (path if "disk" in plan.options.values() else None)
    assert WeightUpdateConfig(**plan.options).transport_config().name == chosen
    if path is None or "s3" not in path:
        transport = tx.make_transport(chosen, **plan.settings)
        assert transport.name == chosen
        transport.shutdown()


def test_without_any_route_the_error_names_every_obstacle():
    with pytest.raises(ConfigError, match=r"collective: .*process group.*disk: .*no path"):
        tx.recommend(group=False)
    with pytest.raises(ConfigError, match="memory handles would not become smaller"):
        tx.recommend(colocated=True, validate_delta=True)
    with pytest.raises(ConfigError, match="parameters"):
        tx.recommend(parameters=1)


def test_plan_prints_the_row_that_applies(capsys):
    argv = ["plan", "--heavy", "--no-group", "--shared-path", "/shared"]
    assert main(argv) == 0
    page = capsys.readouterr().out
    assert page.splitlines()[0] == 'tx.make_transport("delta", root="/shared")'
    assert "not chosen" in page and GOALS["heavy"].goal in page and "update_weight" not in page and "--" not in page
    assert main([*argv, "--flags"]) == 0
    longer = capsys.readouterr().out
    assert longer.startswith(page) and "--update-weight-mode delta" in longer
    assert main([*argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (
        document["python"] == page.splitlines()[0]
        and document["transport"] == "delta"
        and document["facts"]["group"] is False
    )
    assert "share no device" in document["rejected"]["ipc"] and "possible" in document["rejected"]["disk"]
