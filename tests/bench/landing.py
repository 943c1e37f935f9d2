"""``python -m tests.bench landing``: what a pause costs, when a delta lands and when everything does.

Without ``--engine``: the commit alone, in vLLM's own model class without a server, by density, beside a full reload and
vLLM's own `load_checkpoint_weight_patches`. With ``--engine vllm``: end to end, a server that
generates while it follows by delta and by full files.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal

import torch

from tests.bench.data import flip
from tests.bench.frame import say
from tests.bench.models import in_vllm, make_model, plain_linears
from torchrl_ext.cli.environments import settings_for
from torchrl_ext.rollout.client import InferenceClient
from torchrl_ext.rpc.makes.vllm import vllm_engine
from torchrl_ext.serving.engines.vllm import VLLMServer
from torchrl_ext.serving.processes import free_port
from torchrl_ext.sync.sender import WeightSender
from torchrl_ext.transports.delta.transport import DeltaTransport
from torchrl_ext.transports.disk import DiskTransport
from torchrl_ext.weights.checkpoint import CheckpointSource

DENSITIES = [0.001, 0.01, 0.03, 0.1, 0.5, 1.0]
PROMPT = [3, 17, 42, 99, 7, 256, 300, 11]


def measure(
    *,
    repeats: int = 7,
    engine: Literal["vllm"] | None = None,
    size: Literal["full", "small"] = "full",
    densities: list[float] = DENSITIES,
) -> dict[str, Any]:
    """Measure the commit of each of --densities (repeat it), or with --engine updates end to end in a server.

    The model is one of `SIZES`.
    """
    found = end_to_end(size, repeats) if engine else measure_commit(size, densities, repeats)
    return {"size": size, "cores": os.cpu_count(), "torch": torch.__version__, **found}


def measure_commit(size: str, densities: Sequence[float], repeats: int) -> dict[str, Any]:
    """Commit each density, beside a reload, a load of tensors in memory, and vLLM's own patches.

    Raises:
        EngineError: the process with the model failed; the message has the end of what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-") as folder:
        say("making a model")
        model = make_model(f"{folder}/model", size)
        total = sum(meta.numel for meta in CheckpointSource(model).params())
        say(f"commit by density, {total:,} parameters")
        elements = [round(density * total) for density in densities]
        asked = {"model": str(model), "elements": elements, "repeats": repeats, "port": free_port()}
        found = in_vllm("vllm_landing.py", asked)
    for row in found["rows"]:
        row["ratios"] = {
            "commit / reload": row["commit_s"] / found["reload_s"],
            "commit / load from memory": row["commit_s"] / found["load_in_memory_s"],
            "commit / vLLM's patches": row["commit_s"] / row["vllm_s"],
            "extra memory / payload": row["extra_bytes"] / row["payload_bytes"],
        }
    return found


def end_to_end(size: str, repeats: int) -> dict[str, Any]:
    """Pauses of a server that generates meanwhile, by delta at 1 % and by full files."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-")))
        say("making a model")
        start = make_model(folder / "model", size)
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
        "parameters": sum(tensor.numel() for tensor in weights.values()),
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
