"""``python -m tests.bench landing``: what a pause costs, when a delta lands and when everything does.

Without ``--engine``: the commit alone, in vLLM's own model class without a server, beside a scatter of the same values
that checks nothing, a full reload, and vLLM's own `load_checkpoint_weight_patches`. With ``--engine vllm``: end to end,
a server that generates while it follows by delta and by full files.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal

import torch

from tests.bench.data import flip
from tests.bench.frame import say
from tests.bench.models import plain_linears
from torchrl_ext.base.errors import EngineError
from torchrl_ext.cli.environments import settings_for
from torchrl_ext.control.makes.vllm import vllm_engine
from torchrl_ext.control.requests.client import InferenceClient
from torchrl_ext.control.serving.processes import free_port, make_overlay
from torchrl_ext.control.serving.vllm import VLLMServer
from torchrl_ext.data.transports.delta import DeltaTransport
from torchrl_ext.data.transports.disk import DiskTransport
from torchrl_ext.data.weights.checkpoint import CheckpointSource
from torchrl_ext.sync.sender import WeightSender
from torchrl_ext.testing.tiny import make_tiny_lm

SIZES = {
    "full": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 32_000},
    "small": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 4000},
}
PROCESS_S = 1800.0
PROMPT = [3, 17, 42, 99, 7, 256, 300, 11]


def measure(
    *, repeats: int = 7, engine: Literal["vllm"] | None = None, size: Literal["full", "small"] = "full"
) -> dict[str, Any]:
    """Measure the commit of 1 % of the elements, or with --engine updates end to end in a server.

    The model is one of `SIZES`: bfloat16 Qwen3 of random weights, whose heads have 64 elements.
    """
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-") as folder:
        say("making a model")
        heads = SIZES[size]["hidden_size"] // 64
        shape = {**SIZES[size], "num_attention_heads": heads, "num_key_value_heads": heads // 2, "head_dim": 64}
        model = make_tiny_lm(Path(folder, "model"), dtype=torch.bfloat16, **shape)
        found = {"size": size, "cores": os.cpu_count(), "torch": torch.__version__}
        return found | (end_to_end if engine else measure_commit)(model, Path(folder), repeats)


def measure_commit(model: Path, folder: Path, repeats: int) -> dict[str, Any]:
    """Commit 1 % of the elements, beside a bare scatter, a reload and vLLM's own patches, where vLLM is.

    Raises:
        EngineError: the process with the model failed; the message has the end of what it printed.
    """
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
    done = subprocess.run(
        [str(python), str(script)],
        input=json.dumps({"model": str(model), "repeats": repeats, "port": free_port()}),
        capture_output=True,
        text=True,
        env=environ,
        timeout=PROCESS_S,
    )
    if done.returncode:
        raise EngineError(f"the process with vLLM's model ended with status {done.returncode}: {done.stderr[-3000:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return found | {
        "commit / bare scatter": found["commit_s"] / found["scatter_s"],
        "commit / reload": found["commit_s"] / found["reload_s"],
        "commit / vLLM's patches": found["commit_s"] / found["vllm_s"],
    }


def end_to_end(start: Path, folder: Path, repeats: int) -> dict[str, Any]:
    """Pauses of a server that generates meanwhile, by delta at 1 % and by full files."""
    with ExitStack() as stack:
        weights = {name: tensor.clone() for name, tensor in CheckpointSource(start)}
        say("starting vLLM")
        stack.enter_context(plain_linears())
        server = stack.enter_context(VLLMServer(start, **settings_for("vllm") | {"max_model_len": 256}))
        pool, done = stack.enter_context(ThreadPoolExecutor(2)), threading.Event()
        stack.callback(done.set)
        clients = [pool.submit(_busy, server.url, done) for _ in range(2)]
        pauses: dict[str, list[float]] = {"delta": [], "disk": []}
        for turn in range(2):  # each trainer in turn, so that drift of the machine weighs on both
            for way in pauses:
                root = folder / f"{way}{turn}"
                transport = DeltaTransport(root) if way == "delta" else DiskTransport(root, files=start)
                with WeightSender(transport, vllm_engine(server.url)) as sender:
                    for step in range(-(-repeats // 2) + 1):
                        flip(weights, 0.01, seed=1000 * turn + step)
                        say(f"{way}, update {step}")
                        report = sender.update_weights(weights)
                        if step:  # the first one of a chain is full
                            pauses[way].append(report.engines[0].pause_s)
        done.set()
        generated = sum(client.result() for client in clients)
    middle = {way: statistics.median(found) for way, found in pauses.items()}
    return {
        "pauses_s": pauses,
        "median_pause_s": middle,
        "ratio": middle["delta"] / middle["disk"],
        "tokens_meanwhile": generated,
    }


def _busy(url: str, done: threading.Event) -> int:
    """Send one request after another until ``done``; return the number of generated tokens."""
    count = 0
    with closing(InferenceClient(url, kind="vllm")) as client:
        while not done.is_set():
            (found,) = client.generate([PROMPT], max_tokens=64, temperature=1.0, ignore_eos=True)
            count += len(found.token_ids)
    return count
