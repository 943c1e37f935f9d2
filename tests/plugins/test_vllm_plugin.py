"""What reaches an engine's environment, seen from an interpreter that has only that."""

import asyncio
import subprocess
import sys
from types import SimpleNamespace

import pytest

from torchrl_ext.errors import ConfigError, EngineRefusedError
from torchrl_ext.serving.engines.vllm import VLLMServer
from torchrl_ext.serving.overlay import make_overlay
from torchrl_ext.sync.engines.local import VLLMObjectPort

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


class Caches:
    """Of vLLM's `AsyncLLM`, what has to do with caches: keys and values are given up at the ``after``th time."""

    def __init__(self, after, sees):
        self._after, self.asked, self.encoder_dropped = after, [], False
        model = SimpleNamespace(multimodal_config={} if sees else None)
        self.vllm_config = SimpleNamespace(model_config=model)

    async def collective_rpc(self, method): ...

    async def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        self.asked.append((reset_running_requests, reset_connector))
        return len(self.asked) >= self._after

    async def reset_encoder_cache(self):
        self.encoder_dropped = True

    async def dropped(self, timeout_s=10.0):
        host = VLLMObjectPort(self, pause_mode="keep", loop=asyncio.get_running_loop())
        host.timeout_s = timeout_s
        await asyncio.to_thread(host.drop_cached)


def test_all_that_was_computed_with_older_weights_is_dropped_and_no_refusal_is_overheard():
    for after, sees in ((1, False), (3, True)):
        caches = Caches(after, sees)
        asyncio.run(caches.dropped())
        assert caches.asked == [(True, True)] * after
        assert caches.encoder_dropped == sees
    with pytest.raises(EngineRefusedError, match="could not drop cached keys"):
        asyncio.run(Caches(10**9, False).dropped(timeout_s=0.1))
