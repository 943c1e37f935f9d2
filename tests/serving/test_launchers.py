"""Engines of a plan as processes of this machine: which devices they get."""

from __future__ import annotations

import httpx
import psutil
import pytest

from tests.models import tiny_checkpoint
from torchrl_ext.errors import ConfigError
from torchrl_ext.registry import engines
from torchrl_ext.serving.launchers import LocalLauncher, named_devices
from torchrl_ext.serving.topology import EnginePlan


def plan(path="/nowhere", gpus=(0,), kind="embedded", **more):
    return EnginePlan(
        name="a/regular/0", model="a", kind=kind, worker_type="regular", model_path=str(path), gpus=gpus, **more
    )


def test_an_engine_gets_the_device_that_its_number_means_among_those_of_the_job_and_its_key(tmp_path):
    launcher = LocalLauncher(devices=("4", "5"), api_key="secret", dtype="float32", threads=1)
    engine = launcher.launch(plan(tiny_checkpoint(tmp_path), gpus=(1,)))
    try:
        assert psutil.Process(engine.pid).environ()["CUDA_VISIBLE_DEVICES"] == "5"
        assert "secret" not in str(psutil.Process(engine.pid).cmdline())
        for headers, status in (({}, 401), ({"authorization": "Bearer secret"}, 200)):
            assert httpx.get(f"{engine.url}/server_info", headers=headers).status_code == status
    finally:
        engine.stop()


def test_a_device_that_the_job_does_not_see_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match=r"device 8 of the job.*one of the 2 .*CUDA_VISIBLE_DEVICES=4,5"):
        LocalLauncher(devices=("4", "5")).launch(plan(gpus=(8,)))


def test_devices_are_called_what_the_jobs_own_variable_calls_them():
    assert named_devices(2, None) == ("0", "1")
    assert named_devices(2, "4,5") == ("4", "5")
    assert named_devices(2, "GPU-8e1b, GPU-07aa") == ("GPU-8e1b", "GPU-07aa")
    assert named_devices(1, "4,-1,5") == ("4",)
    assert named_devices(0, "") == named_devices(0, "4,5") == named_devices(0, None) == ()


def test_a_setting_that_a_plan_makes_false_reaches_vllm(monkeypatch):
    given = {}
    monkeypatch.setattr(
        engines.part("vllm", "server"), "__init__", lambda self, model, **settings: given.update(settings)
    )
    LocalLauncher(devices=()).launch(plan(kind="vllm", overrides={"enable_prefix_caching": False}))
    assert given["extra_args"] == ("--no-enable-prefix-caching",)


def test_a_setting_that_a_plan_makes_false_is_refused_where_no_argument_says_so():
    with pytest.raises(ConfigError, match=r"a/regular/0: .*'sglang' has no argument that makes enable_x false"):
        LocalLauncher(devices=()).launch(plan(kind="sglang", overrides={"enable_x": False}))
