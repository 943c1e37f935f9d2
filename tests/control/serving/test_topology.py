"""What the YAML of owned engines means, and what it cannot say."""

import logging

import pytest

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.control.serving.topology import Topology

FILE = """
sglang:
  - name: actor
    num_gpus_per_engine: 2
    server_groups:
      - {worker_type: regular, num_gpus: 4, overrides: {max-running-requests: 8}}
  - name: reward
    model_path: /models/reward
    engine_groups:
      - {worker_type: prefill, num_gpus: 1}
      - {worker_type: decode, num_gpus: 2}
  - name: tools
    update_weights: false
    server_groups: []
"""


def parse(models, **settings):
    return Topology.parse({"vllm": models}, **{"hf_checkpoint": "/models/policy", **settings})


def group(worker_type="regular", num_gpus=1, **more):
    return {"worker_type": worker_type, "num_gpus": num_gpus, **more}


def test_a_file_is_resolved_to_engines_with_their_devices(tmp_path, caplog):
    path = tmp_path / "engines.yaml"
    path.write_text(FILE)
    with caplog.at_level(logging.WARNING, "torchrl_ext"):
        found = Topology.load(path, hf_checkpoint="/models/policy")
    actor, reward, tools = found.models
    assert found.kind == "sglang"
    assert [(plan.name, plan.gpus) for plan in actor.engines] == [
        ("actor/regular/0", (0, 1)),
        ("actor/regular/1", (2, 3)),
    ]
    assert actor.engines[0].overrides == {"max_running_requests": 8}
    assert actor.update_weights and actor.engines[0].model_path == "/models/policy"
    assert [(plan.worker_type, plan.gpus) for plan in reward.engines] == [
        ("prefill", (4,)),
        ("decode", (5,)),
        ("decode", (6,)),
    ]
    assert not reward.update_weights and "'reward' does not follow" in caplog.text
    assert tools.engines == () and not tools.update_weights


def test_update_weights_auto_compares_path_with_trainer():
    """update_weights keeps a given bool; auto means that the model path is the trainer's path."""
    for said, path, meant in (
        ("auto", "/models/policy", True),
        ("auto", "/models/../models/policy/", True),
        ("auto", "/other", False),
        (True, "/other", True),
        (False, "/models/policy", False),
    ):
        for row in (
            {"model_path": path, "server_groups": [group()]},
            {"model_path": "/b", "server_groups": [group(overrides={"model-path": path})]},
        ):  # a group's path goes before the model's
            (model,) = parse([{"name": "a", "update_weights": said, **row}]).models
            assert model.update_weights is meant and model.engines[0].model_path == path
            assert model.engines[0].overrides == {}


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ([{"name": "a"}, {"name": "a"}], "two models have one name: a, a"),
        ([{"name": "a", "server_groups": [group(tp=2)]}], r"unknown field `tp` - at .*server_groups"),
        ([{"name": "a", "server_groups": [group(num_gpus=3, num_gpus_per_engine=2)]}], "3 GPUs for engines of 2"),
        ([{"name": "a", "server_groups": [group("prefill")]}], "prefill engines only"),
        ([{"name": "a", "server_groups": [group("prefill"), group("decode"), group()]}], "pools and regular"),
        (
            [{"name": "a", "server_groups": [group(), group(overrides={"model_path": "/x"})]}],
            "different paths: /models/policy, /x",
        ),
        ([{"name": "a", "server_groups": [], "engine_groups": []}], "server_groups and engine_groups"),
    ],
)
def test_what_cannot_work_is_named(models, words):
    with pytest.raises(ConfigError, match=words):
        parse(models)


def test_a_path_has_to_come_from_somewhere(tmp_path):
    row = {"name": "a", "server_groups": [group(num_gpus=2)]}
    with pytest.raises(ConfigError, match="'a' has no model_path"):
        parse([row], hf_checkpoint=None)
    for content, words in (
        ({"vllm": [row], "sglang": [row]}, "length <= 1"),
        ({"trt": [row]}, "no engine called 'trt'"),
        ({"inprocess": [row]}, r"no server(.|\n)*vllm, sglang, embedded"),
    ):
        with pytest.raises(ConfigError, match=words):
            Topology.parse(content)
    (tmp_path / "broken.yaml").write_text("vllm: [")
    for name in ("nothing.yaml", "broken.yaml"):
        with pytest.raises(ConfigError, match="cannot be read"):
            Topology.load(tmp_path / name)
