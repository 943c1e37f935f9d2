"""The planner: the guides' table of goals row by row, and costs that behave as costs must."""

import dataclasses
import json
import math

import pytest
import torch

import torchrl_ext as tx
from tests.processes import ROOT
from torchrl_ext.cli.main import main
from torchrl_ext.compat.flags.options import WeightUpdateConfig
from torchrl_ext.errors import ConfigError
from torchrl_ext.planning.costs import ENCODINGS, MEASURED
from torchrl_ext.planning.recommend import DECISIONS
from torchrl_ext.transports.delta.transport import DeltaTransport

SMALL = {"parameters": 500_000_000, "interval_s": 60.0}
LARGE = {"parameters": 300_000_000_000, "workers_per_engine": 8, "interval_s": 60.0}


def route(plan, transport, encoding=None, carrier=None):
    (found,) = [
        one for one in plan.routes if (one.transport, one.encoding, one.carrier) == (transport, encoding, carrier)
    ]
    return found


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
        ("heavy", LARGE | ON_PATH | {"engines": 16, "regions": 2}, "delta", DELTA | DISK),
        ("heavy", LARGE | {"group": False, "shared_path": "s3://bucket/updates"}, "delta", DELTA | DISK),
        ("stack", SMALL | {"same_stack": False, "shared_path": "/shared"}, "disk", FULL | DISK),
        ("validate", SMALL | {"validate_delta": True}, "delta", DELTA | NCCL | {"update_weight_encoding": "indices"}),
        ("frozen", SMALL | {"frozen_models": True}, "collective", FULL | NCCL),
        ("external", SMALL | {"colocated": True}, "ipc", FULL | NCCL | {"colocate": True}),
        ("external", {"parameters": 4 * 10**9, "network_bytes_s": 1e11, "interval_s": 1.0}, "collective", FULL | NCCL),
        ("external", {"parameters": 4 * 10**9, "network_bytes_s": 1e8, "interval_s": 1.0}, "delta", DELTA | NCCL),
    ],
)
def test_each_goal_of_the_guides_gets_an_entry_point_that_can_be_built(row, facts, chosen, options, tmp_path):
    facts = {name: str(tmp_path) if value == "/shared" else value for name, value in facts.items()}
    plan = tx.recommend(**facts)
    assert plan.answers[row] is DECISIONS[row]
    assert plan.chosen.transport == chosen
    assert options.items() <= plan.options.items()
    assert plan.reason and plan.chosen.label not in plan.rejected
    path = facts.get("shared_path")
    assert plan.options.get("update_weight_disk_dir") == (path if "disk" in plan.options.values() else None)
    assert WeightUpdateConfig(**plan.options).transport_config().name == chosen
    if path is None or "s3" not in path:
        transport = tx.make_transport(chosen, **plan.settings)
        assert transport.name == chosen
        transport.shutdown()


def test_the_table_has_the_eight_goals_of_the_guides_and_one_of_ours():
    points = [decision.entry_point for decision in DECISIONS.values()]
    assert len(points) == 9
    assert sum("update_weight_mode" in point for point in points) == 5
    names = {word.partition("=")[0] for point in points for word in point.split() if "_" in word} - {"update_weights:"}
    assert names <= {field.name for field in dataclasses.fields(WeightUpdateConfig)}


def test_what_the_facts_rule_out_is_listed_with_the_reason():
    plan = tx.recommend(**SMALL, group=False, shared_path="/shared")
    assert "cannot form a process group" in plan.rejected["collective"]
    assert "share no device" in plan.rejected["ipc"]
    assert set(plan.rejected) == {one.label for one in plan.routes} - {plan.chosen.label}
    over_store = tx.recommend(**SMALL, group=False, shared_path="s3://bucket/updates")
    assert over_store.chosen.transport == "delta" and "checkpoint directories" in over_store.rejected["disk"]
    shared = tx.recommend(**SMALL, colocated=True)
    assert shared.chosen.transport == "ipc" and "memory handles" in shared.rejected["delta auto over collective"]
    far = tx.recommend(**LARGE, engines=16, regions=2, shared_path="/shared")
    assert "over regions" in far.rejected["collective"] and "over regions" in far.rejected["sharded"]


def test_shards_are_sent_side_by_side_where_there_are_several_ranks_and_workers():
    one, two, many = (route(tx.recommend(**LARGE, trainer_ranks=ranks), "sharded") for ranks in (1, 2, 64))
    assert "one rank" in one.obstacle and two.obstacle is many.obstacle is None
    assert one.seconds > two.seconds > many.seconds
    assert many.seconds < route(tx.recommend(**LARGE), "collective").seconds / 4  # of 8 workers


def test_without_any_route_the_error_names_every_obstacle():
    with pytest.raises(ConfigError, match=r"collective: .*process group.*disk: .*no path"):
        tx.recommend(**SMALL, group=False)


def test_sizes_of_plain_encodings_follow_from_their_formats():
    plan = tx.recommend(parameters=10**9, density=0.01)
    assert {one.encoding for one in plan.routes} - {None} == {"auto", *ENCODINGS} <= set(DeltaTransport.encodings())
    changed = 10**7
    assert route(plan, "delta", "indices", "disk").bytes == 6 * changed
    assert route(plan, "delta", "deltas", "disk").bytes == 4 * changed
    assert route(plan, "disk").bytes == route(plan, "collective").bytes == 2 * 10**9
    assert route(plan, "delta", "context", "disk").bytes < route(plan, "delta", "ulp", "disk").bytes < 2 * changed
    dense = tx.recommend(parameters=10**9, density=1.0)
    assert route(dense, "delta", "indices", "disk").bytes == 2 * 10**9


def test_more_of_anything_that_costs_never_costs_less():
    def costs(**facts):
        return [one.seconds for one in tx.recommend(**(LARGE | {"shared_path": "/s", "engines": 8} | facts)).routes]

    for less, more in [
        ({"parameters": 10**9}, {"parameters": 10**12}),
        ({"density": 0.001}, {"density": 0.1}),
        ({"engines": 8}, {"engines": 4096}),
        ({"network_bytes_s": 1e11}, {"network_bytes_s": 1e9}),
        ({"disk_bytes_s": 1e11}, {"disk_bytes_s": 1e9}),
        ({"regions": 1}, {"regions": 2, "engines": 16}),
        ({"code_bytes_s": 2e9}, {"code_bytes_s": 2e8}),
        ({"device": "cpu", "engines": 1}, {"device": "cpu", "engines": 64}),
    ]:
        assert all(a <= b * (1 + 1e-9) for a, b in zip(costs(**less), costs(**more), strict=True)), (less, more)


def test_a_pause_by_delta_is_in_proportion_to_what_changed_and_not_to_the_model():
    def pause(density, parameters):
        plan = tx.recommend(parameters=parameters, density=density, device="cpu", shared_path="/s")
        return route(plan, "delta", "auto", "disk").pause_s - MEASURED["control"].value

    assert pause(1e-4, 10**9) == pytest.approx(pause(1e-5, 10**10), rel=0.01)
    assert pause(1e-4, 10**10) == pytest.approx(10 * pause(1e-5, 10**10), rel=0.01)


def test_up_to_a_trillion_parameters_and_thousands_of_engines():
    plan = tx.recommend(
        parameters=10**12, engines=8192, workers_per_engine=16, regions=4, group=False, shared_path="s3://b/u"
    )
    assert plan.chosen.transport == "delta" and plan.chosen.carrier == "disk"
    for one in plan.routes:
        assert 0 < one.low_s <= one.seconds <= one.high_s < math.inf and 0 < one.pause_s <= one.seconds
    json.dumps(plan.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    "facts",
    [
        {"parameters": 0},
        {"parameters": True},
        {"parameters": 1.5},
        {"density": 0.0},
        {"density": 1.1},
        {"density": math.nan},
        {"network_bytes_s": math.inf},
        {"disk_bytes_s": -1.0},
        {"device": "tpu"},
        {"regions": 2, "engines": 1},
        {"owned": False, "topology": True},
        {"colocated": True, "validate_delta": True},
        {"tensors": 0},
        {"colour": "red"},
    ],
)
def test_facts_that_cannot_be_are_refused(facts):
    with pytest.raises(ConfigError):
        tx.recommend(**facts)


def test_the_page_shows_what_was_measured_and_by_which_command():
    page = (ROOT / "docs" / "transports.md").read_text()
    commands = ("torchrl-ext bench ", "python -m tests.bench ")
    for name, one in MEASURED.items():
        assert one.value > 0 and one.unit in ("s", "bytes/s") and one.command.startswith(commands), name
        assert f"| `{name}` | {one.value:.3g} {one.unit} | `{one.command}` |" in page
    for name, one in ENCODINGS.items():
        assert f"| `{name}` | {one.place:g} | {one.step:g} | {one.effort:g} |" in page


# the command


def test_the_command_prints_one_document_with_every_route(capsys):
    assert main(["plan", "--parameters", "30B", "--no-group", "--shared-path", "/shared", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["facts"]["parameters"] == 30_000_000_000 and told["facts"]["group"] is False
    assert {row["transport"] for row in told["routes"]} == {"ipc", "collective", "sharded", "disk", "delta"}
    assert all(row["rejected"] or row["label"] == told["predicted"]["label"] for row in told["routes"])
    assert told["measured"]["copy"]["command"] == "torchrl-ext bench delta"


def test_the_command_takes_sizes_from_a_checkpoint(tmp_path, capsys):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(10, 10), "b": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    assert main(["plan", "--model", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["facts"]["parameters"] == 104 and told["facts"]["tensors"] == 2
    for wrong in (["--density", "2", "--parameters", "1M"], ["--engines", "2"], ["--parameters", "1.5"]):
        assert main(["plan", *wrong, "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["error"]
    assert main(["plan", "--parameters", "8X", "--json"]) == 2
    assert "8X is not a number, which may end in k, M, G, B, T" in json.loads(capsys.readouterr().out)["error"]


def test_the_command_shows_a_page_with_reasons(capsys):
    assert main(["plan", "--parameters", "7B", "--no-group", "--shared-path", "/shared"]) == 0
    page = capsys.readouterr().out
    for words in ("rejected", "cannot form a process group", "benchmarks", "--update-weight-mode"):
        assert words in page


@pytest.mark.parametrize("reach", [{"group": False, "shared_path": "memory://plan"}, {"shared_path": None}])
def test_the_settings_of_a_plan_choose_encodings_for_the_link_that_was_planned_for(reach):
    slow, fast = (
        tx.recommend(**LARGE | reach, network_bytes_s=speed, disk_bytes_s=speed, cores=64) for speed in (1e7, 1e9)
    )
    for plan in (slow, fast):
        assert (plan.chosen.transport, plan.chosen.encoding) == ("delta", "auto")
        told = WeightUpdateConfig(**plan.options).transport_config().settings
        assert told["settings"] == plan.settings["settings"]
        tx.make_transport("delta", **plan.settings).shutdown()  # which takes them
    speeds = [plan.settings["settings"]["link_bytes_s"] for plan in (slow, fast)]
    assert speeds[0] <= 1e7 and 10 * speeds[0] <= speeds[1] <= 1e9
