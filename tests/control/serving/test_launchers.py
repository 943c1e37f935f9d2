"""Engines of a plan as processes of this machine: which devices they get."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from tests.models import tiny_checkpoint
from torchrl_ext.base.errors import ConfigError
from torchrl_ext.control.serving import topology as launchers
from torchrl_ext.control.serving.topology import EnginePlan, LocalLauncher


def plan(path="/nowhere", gpus=(0,), kind="embedded", **more):
    return EnginePlan(name="a/regular/0", kind=kind, worker_type="regular", model_path=str(path), gpus=gpus, **more)


@pytest.fixture(autouse=True)
def see(monkeypatch):
    """Sets how many devices the job sees, and what its own variable calls them; none at first."""

    def see(count, visible=None):
        monkeypatch.setattr("torch.accelerator.is_available", lambda: count > 0)
        monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr("torch.accelerator.device_count", lambda: count)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    see(0)
    return see


def test_engine_gets_its_job_device_and_its_api_key(tmp_path, see):
    """An engine sees its device of the job, and its API key is not on its command line."""
    see(2, "4,5")
    launcher = LocalLauncher(api_key="secret", dtype="float32", threads=1)
    engine = launcher.launch(plan(tiny_checkpoint(tmp_path), gpus=(1,)))
    try:
        assert psutil.Process(engine.pid).environ()["CUDA_VISIBLE_DEVICES"] == "5"
        assert "secret" not in str(psutil.Process(engine.pid).cmdline())
        for headers, status in (({}, 401), ({"authorization": "Bearer secret"}, 200)):
            assert httpx.get(f"{engine.url}/server_info", headers=headers).status_code == status
    finally:
        engine.stop()


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


@pytest.mark.parametrize("admin", [{"admin_api_key": "other"}, {"extra_args": ["--admin-api-key=other"]}])
def test_keys_of_sglang_stand_on_no_command_line(tmp_path, admin):
    program = tmp_path / "python"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    launcher = LocalLauncher(api_key="secret", python=program, plugin=False)
    engine = launcher.launch(plan(tmp_path, kind="sglang", overrides={**admin, "mem_fraction_static": 0.5}))
    try:
        started = psutil.Process(engine.pid)
        lines = [word for process in (started, started.parent()) for word in process.cmdline()]
        assert "--mem-fraction-static" in lines and not {"secret", "other"} & set(
            " ".join(lines).replace("=", " ").split()
        )
        assert httpx.get(engine.url).json() == [{"api-key": "secret", "admin-api-key": "other"}, 0o600]
        file = Path(lines[lines.index("--config") + 1])
    finally:
        engine.stop()
    assert not file.exists()


def test_api_key_with_user_config_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="write api-key into your file"):
        LocalLauncher(api_key="secret", python="/x").launch(
            plan(tmp_path, kind="sglang", overrides={"config": "a.yaml"})
        )


@pytest.mark.parametrize(
    ("count", "visible", "device"),
    [
        (2, None, "1"),
        (2, "GPU-8e1b, GPU-07aa", "GPU-07aa"),
        (0, "4,5", None),
        (1, "4,-1", ConfigError),
    ],
)
def test_engine_devices_use_names_of_job_visible_devices(monkeypatch, see, count, visible, device):
    """An engine's device has its name in the job's CUDA_VISIBLE_DEVICES; a missing device is refused."""
    monkeypatch.setattr(launchers, "start", lambda spec: spec.environ.get("CUDA_VISIBLE_DEVICES"))
    see(count, visible)
    refused = pytest.raises(ConfigError, match=r"a/regular/0: .*device 1 of the job.*one of the 1 .*DEVICES=4")
    with refused if device is ConfigError else nullcontext():
        assert LocalLauncher().launch(plan(gpus=(1,))) == device


def test_overrides_become_fields_or_arguments_of_the_server(monkeypatch, see):
    see(2, "4,5")
    monkeypatch.setattr(launchers, "start", lambda spec: spec)
    overrides = {"enable_prefix_caching": False, "max_model_len": 8, "extra_args": ("--x",), "environ": {"A": "b"}}
    overrides |= {"swap_space": 4, "enable_y": True, "kv": {"a": 1}, "urls": ["b", "c"], "z": None}
    launcher = LocalLauncher(api_key="secret", dtype="float32", max_model_len=9)
    spec = launcher.launch(plan(kind="vllm", gpus=(0, 1), overrides=overrides))
    flags = ["--x", "--no-enable-prefix-caching", "--swap-space", "4", "--enable-y", "--kv", '{"a": 1}', "--urls"]
    assert spec.extra_args == (*flags, "b", "c")
    assert (spec.max_model_len, spec.dtype, spec.tensor_parallel_size) == (8, "float32", 2)
    assert spec.environ == {"CUDA_VISIBLE_DEVICES": "4,5", "VLLM_API_KEY": "secret", "A": "b"}
    assert launcher.launch(plan(kind="sglang")).extra_args == ("--api-key", "secret")


@pytest.mark.parametrize(
    ("kind", "overrides", "gpus", "words"),
    [
        ("sglang", {"enable_x": False}, (0,), "'sglang' has no argument that makes enable_x false"),
        ("embedded", {"swap_space": 4}, (0,), "'embedded' has no setting swap_space"),
        ("embedded", {}, (0, 1), "'embedded' has one worker"),
    ],
)
def test_unsupported_engine_argument_names_the_planned_engine(kind, overrides, gpus, words):
    """A plan that the engine has no argument for is refused under the name of the planned engine."""
    with pytest.raises(ConfigError, match=rf"a/regular/0: .*{words}"):
        LocalLauncher().launch(plan(kind=kind, overrides=overrides, gpus=gpus))
