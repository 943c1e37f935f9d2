"""Models of two sizes for engines that are measured, and measurements inside vLLM's own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from torchrl_ext.cli.environments import settings_for
from torchrl_ext.errors import EngineError
from torchrl_ext.serving.overlay import make_overlay
from torchrl_ext.testing.tiny import make_tiny_lm

SIZES = {
    "full": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 32_000},
    "small": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 4000},
}
PROCESS_S = 1800.0


def make_model(folder, size, *, seed=0, **settings):
    """A bfloat16 Qwen3 of random weights: heads of 64, two query heads for each of keys and values."""
    hidden = SIZES[size]["hidden_size"]
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128, "head_dim": 64}
    return make_tiny_lm(Path(folder), seed=seed, dtype=torch.bfloat16, **{**SIZES[size], **heads, **settings})


@contextmanager
def plain_linears():
    """vLLM servers that are started in the block keep linear weights unpacked (`plain/plain_linears.py`)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).with_name("plain")), prepend=os.pathsep)
        patch.setenv("VLLM_PLUGINS", "plain_linears,torchrl_ext_cpu")
        yield


def in_vllm(script, asked):
    """Run a script of this folder where vLLM is: one JSON object in, one out."""
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-overlay-") as overlay:
        make_overlay(Path(overlay))
        environ = {
            **os.environ,
            "PYTHONPATH": overlay,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        done = subprocess.run(
            [str(settings_for("vllm").get("python", sys.executable)), str(Path(__file__).with_name(script))],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            env=environ,
            timeout=PROCESS_S,
        )
    if done.returncode:
        raise EngineError(f"the process with vLLM's model ended with status {done.returncode}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
