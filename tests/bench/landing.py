"""``python -m tests.bench landing``: what a pause costs, when a delta lands and when everything does.

Only the commit is timed, in vLLM's own model class without a server (`vllm_landing`), beside a scatter of the same
values that checks nothing, a full reload, and vLLM's own `load_checkpoint_weight_patches`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch

from tests.bench.data import say
from torchrl_ext.base.errors import EngineError
from torchrl_ext.cli.environments import settings_for
from torchrl_ext.control.serving.processes import free_port, make_overlay
from torchrl_ext.testing.tiny import make_tiny_lm

SIZES = {
    "full": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 32_000},
    "small": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 4000},
}
PROCESS_S = 1800.0


def measure(*, repeats: int = 7, size: Literal["full", "small"] = "full") -> dict[str, Any]:
    """Measure the commit of 1 % of the elements of a bfloat16 Qwen3 of random weights, whose heads have 64 elements.

    Raises:
        EngineError: the process with the model failed; the message has the end of what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-") as name:
        folder, heads = Path(name), SIZES[size]["hidden_size"] // 64
        say("making a model")
        shape = {**SIZES[size], "num_attention_heads": heads, "num_key_value_heads": heads // 2, "head_dim": 64}
        model = make_tiny_lm(folder / "model", dtype=torch.bfloat16, **shape)
        make_overlay(folder / "overlay")
        environ = {
            **os.environ,
            "PYTHONPATH": str(folder / "overlay"),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        python, script = settings_for("vllm").get("python", sys.executable), Path(__file__).with_name("vllm_landing.py")
        asked = {"model": str(model), "root": str(folder / "root"), "repeats": repeats, "port": free_port()}
        done = subprocess.run(
            [str(python), str(script)],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            env=environ,
            timeout=PROCESS_S,
        )
    if done.returncode:
        raise EngineError(f"the process with vLLM's model ended with status {done.returncode}: {done.stderr[-3000:]}")
    spent = json.loads(done.stdout.strip().splitlines()[-1])
    found = {"size": size, "cores": os.cpu_count(), "torch": torch.__version__, **spent}
    return found | {f"commit / {way}": spent["commit_s"] / spent[f"{way}_s"] for way in ("scatter", "reload", "vllm")}
