"""What the YAML of owned engines means, what it cannot say, and what each planned engine is started with."""

import logging
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from tests.control.serving.test_processes import gone
from torchrl_ext.base.errors import ConfigError, EngineError
from torchrl_ext.control.serving.server import start
from torchrl_ext.control.serving.topology import EnginePlan, OwnedEngines, parse_plans, read_plans

FILE = """
sglang:
  - name: actor
    num_gpus_per_engine: 2
    server_groups:
      - {worker_type: regular, num_gpus: 4, overrides: {max-running-requests: 8}}
  - name: reward
    model_path: /models/reward
    server_groups:
      - {worker_type: prefill, num_gpus: 1}
      - {worker_type: decode, num_gpus: 2}
  - name: tools
    update_weights: false
    server_groups: []
"""


def parse(models, **settings):
    return parse_plans({"vllm": models}, **{"hf_checkpoint": "/models/policy", **settings})


def group(worker_type="regular", num_gpus=1, **more):
    return {"worker_type": worker_type, "num_gpus": num_gpus, **more}


def test_a_file_is_resolved_to_engines_with_their_devices(tmp_path, caplog):
    path = tmp_path / "engines.yaml"
    path.write_text(FILE)
    with caplog.at_level(logging.WARNING, "torchrl_ext"):
        actor, reward, tools = read_plans(path, hf_checkpoint="/models/policy")
    assert {model.kind for model in (actor, reward, tools)} == {"sglang"}
    assert [(plan.name, plan.kind, plan.gpus) for plan in actor.engines] == [
        ("actor/regular/0", "sglang", (0, 1)),
        ("actor/regular/1", "sglang", (2, 3)),
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
    for said, path, meant in (
        ("auto", "/models/../models/policy/", True),
        ("auto", "/other", False),
        (True, "/other", True),
        (False, "/models/policy", False),
    ):
        for row in (
            {"model_path": path, "server_groups": [group()]},
            {"model_path": "/b", "engine_groups": [group(overrides={"model-path": path})]},
        ):
            (model,) = parse([{"name": "a", "update_weights": said, **row}])
            assert model.update_weights is meant
            assert (model.engines[0].model_path, model.engines[0].overrides) == (path, {})


@pytest.mark.parametrize(
    ("content", "words"),
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
        ([{"name": "a", "server_groups": [group()], "engine_groups": [group()]}], "server_groups and engine_groups"),
        ({"vllm": [{"name": "a"}], "sglang": [{"name": "a"}]}, "length <= 1"),
        ({"trt": [{"name": "a"}]}, "no engine called 'trt'"),
        ({"inprocess": [{"name": "a"}]}, r"no server(.|\n)*vllm, sglang, embedded"),
    ],
)
def test_what_cannot_work_is_named(content, words):
    with pytest.raises(ConfigError, match=words):
        parse(content) if isinstance(content, list) else parse_plans(content)


def test_a_path_has_to_come_from_somewhere(tmp_path):
    with pytest.raises(ConfigError, match="'a' has no model_path"):
        parse([{"name": "a", "server_groups": [group(num_gpus=2)]}], hf_checkpoint=None)
    (tmp_path / "broken.yaml").write_text("vllm: [")
    for name in ("nothing.yaml", "broken.yaml"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_plans(tmp_path / name)


# what a planned engine is started with


def plan(path="/nowhere", gpus=(0,), kind="embedded", **more):
    return EnginePlan(name="a/regular/0", kind=kind, worker_type="regular", model_path=str(path), gpus=gpus, **more)


@pytest.fixture
def see(monkeypatch):
    """Sets how many devices the job sees, and what its own variable calls them."""

    def see(count, visible=None):
        monkeypatch.setattr("torch.accelerator.is_available", lambda: count > 0)
        monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr("torch.accelerator.device_count", lambda: count)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return see


STAND_IN = f"""#!{sys.executable}
import http.server, json, os, pathlib, sys
port = next(word.partition("=")[2] for word in sys.argv if word.startswith("--port="))
file = pathlib.Path(sys.argv[sys.argv.index("--config") + 1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps([json.loads(file.read_text()), file.stat().st_mode & 0o777]).encode())
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


def program(folder, text):
    path = folder / "python"
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_keys_of_sglang_stand_on_no_command_line(tmp_path):
    settings = {"python": program(tmp_path, STAND_IN), "plugin": False, "api_key": "secret"}
    planned = plan(tmp_path, kind="sglang", overrides={"admin_api_key": "other", "mem_fraction_static": 0.5})
    with start(planned.spec(settings)) as engine:
        started = psutil.Process(engine.pid)
        lines = [word for process in (started, started.parent()) for word in process.cmdline()]
        words = set(" ".join(lines).replace("=", " ").split())
        assert "--mem-fraction-static" in words and not words & {"secret", "other"}
        assert httpx.get(engine.url).json() == [{"api-key": "secret", "admin-api-key": "other"}, 0o600]
        file = Path(lines[lines.index("--config") + 1])
    assert not file.exists()


@pytest.mark.parametrize(
    ("count", "visible", "device"),
    [(2, None, "1"), (2, "GPU-8e1b, GPU-07aa", "GPU-07aa"), (0, "4,5", None), (1, "4,-1", ConfigError)],
)
def test_engine_devices_use_names_of_job_visible_devices(see, count, visible, device):
    see(count, visible)
    refused = pytest.raises(ConfigError, match=r"a/regular/0: .*device 1 of the job.*one of the 1 .*DEVICES=4")
    with refused if device is ConfigError else nullcontext():
        assert plan(gpus=(1,)).spec({}).environ.get("CUDA_VISIBLE_DEVICES") == device


def test_overrides_become_fields_or_arguments_of_the_server(see):
    see(2, "4,5")
    overrides = {"enable_prefix_caching": False, "max_model_len": 8, "extra_args": ("--x",), "environ": {"A": "b"}}
    overrides |= {"swap_space": 4, "enable_y": True, "kv": {"a": 1}, "urls": ["b", "c"], "z": None}
    settings = {"dtype": "float32", "max_model_len": 9, "api_key": "secret"}
    spec = plan(kind="vllm", gpus=(0, 1), overrides=overrides).spec(settings)
    flags = ["--x", "--no-enable-prefix-caching", "--swap-space", "4", "--enable-y", "--kv", '{"a": 1}', "--urls"]
    assert spec.extra_args == (*flags, "b", "c")
    assert (spec.max_model_len, spec.dtype, spec.tensor_parallel_size) == (8, "float32", 2)
    assert spec.environ == {"CUDA_VISIBLE_DEVICES": "4,5", "A": "b"} and spec.variables()["VLLM_API_KEY"] == "secret"
    spec = plan(gpus=(1,), overrides={"threads": 2}).spec(settings)
    assert spec.environ == {"CUDA_VISIBLE_DEVICES": "5"} and spec.threads == 2
    assert spec.variables()["TORCHRL_EXT_API_KEY"] == "secret" and "secret" not in f"{spec.command(1)} {spec}"


@pytest.mark.parametrize(
    ("kind", "overrides", "gpus", "words"),
    [
        ("embedded", {"swap_space": 4}, (0,), "'embedded' has no setting swap_space"),
        ("embedded", {}, (0, 1), "'embedded' has one worker"),
    ],
)
def test_unsupported_engine_argument_names_the_planned_engine(kind, overrides, gpus, words):
    with pytest.raises(ConfigError, match=rf"a/regular/0: .*{words}"):
        plan(kind=kind, overrides=overrides, gpus=gpus).spec({})


STARTING = """#!/bin/sh
echo $$ > "$PIDS/$$"
while [ "$(ls "$PIDS" | wc -l)" -lt 2 ]; do sleep 0.05; done
mkdir "$PIDS/first" && exec sleep 600
echo "RuntimeError: no such model"
"""


def test_a_start_that_fails_ends_the_others(tmp_path):
    """Two engines start at the same time; the second one to take a directory fails, and the first one is ended."""
    pids = tmp_path / "pids"
    pids.mkdir()
    settings = {"python": program(tmp_path, STARTING), "plugin": False, "environ": {"PIDS": str(pids)}}
    row = {"name": "a", "model_path": str(tmp_path), "server_groups": [group(num_gpus=2)]}
    with pytest.raises(EngineError, match="no such model"):
        OwnedEngines(parse([row]), log_folder=tmp_path / "logs", **settings)
    assert all(gone(int(pid)) for pid in os.listdir(pids) if pid.isdigit())
    assert sorted(os.listdir(tmp_path / "logs")) == ["a-regular-0.log", "a-regular-1.log"]
