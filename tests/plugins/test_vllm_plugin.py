"""What reaches an engine's environment, seen from an interpreter that has only that."""

import subprocess
import sys

import pytest

from torchrl_ext.errors import ConfigError
from torchrl_ext.serving.engines.vllm import VLLMServer
from torchrl_ext.serving.overlay import make_overlay

LOOK = """
import sys
sys.path.insert(0, {overlay!r})
from importlib.metadata import entry_points
(found,) = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "torchrl_ext"][:1]
import torch
before = set(sys.modules)
import time
began = time.perf_counter()
found.load()
import torchrl_ext.sync.receiver, torchrl_ext.landing.placement, torchrl_ext.weights.checkpoint
import torchrl_ext.transports.disk, torchrl_ext.transports.collective.transport
print(time.perf_counter() - began)
new = set(sys.modules) - before
print(sorted(new & {{"torchrl", "tensordict", "transformers", "ray", "httpx", "requests", "vllm"}}))
print(torchrl_ext.__file__)
"""


def test_the_overlay_brings_the_plugin_and_nothing_of_the_trainers(tmp_path):
    make_overlay(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", LOOK.format(overlay=str(tmp_path))], capture_output=True, text=True, check=True
    )
    seconds, imported, home = done.stdout.split("\n")[:3]
    assert imported == "[]" and home.startswith(str(tmp_path))
    print(f"imported in {seconds} s")


def test_a_model_that_does_not_exist_is_refused_before_anything_is_installed(tmp_path):
    with pytest.raises(ConfigError, match="no directory"):
        VLLMServer(tmp_path / "nothing", python="/no/python")
