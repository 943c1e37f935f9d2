"""``python -m tests.bench landing``: what a pause costs, when a delta lands and when everything does.

Without ``--engine``: the commit alone, in vLLM's own model class without a server, by density and by model size, beside
a full reload and vLLM's own `load_checkpoint_weight_patches`. With ``--engine vllm``: end to end, a server that
generates while it follows by delta and by full files.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from tests.bench.data import flip
from tests.bench.frame import say
from tests.bench.models import SIZES, in_vllm, make_model, plain_linears
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
    packed: bool = False,
) -> dict[str, Any]:
    """Measure the commit of each of --densities (repeat it), or with --engine updates end to end in a server.

    The model is one of `SIZES`. With --packed a CPU server packs its linear weights.
    """
    numbers = {"size": size, "cores": os.cpu_count(), "torch": torch.__version__}
    if engine:
        return numbers | {"end_to_end": end_to_end(size, repeats, packed=packed)}
    return numbers | {"commit": measure_commit(size, densities, repeats)}


def measure_commit(size: str, densities: Sequence[float], repeats: int) -> dict[str, Any]:
    """Two sweeps: by density at one size; by size at a fixed number of changed elements (1 % of the largest).

    Raises:
        EngineError: the process with the model failed; the message has the end of what it printed.
    """
    layers = SIZES[size]["num_hidden_layers"]
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-") as folder:
        say("making a model")
        model = make_model(f"{folder}/model", size)
        total = sum(meta.numel for meta in CheckpointSource(model).params())
        say(f"commit by density, {total:,} parameters")
        largest = _in_vllm(model, [round(density * total) for density in densities], repeats)
        by_size = []
        for share in (4, 2):
            say(f"commit by size, 1/{share} of the layers")
            part = make_model(f"{folder}/part{share}", size, num_hidden_layers=layers // share)
            found = _in_vllm(part, [round(0.01 * total)], repeats)
            by_size.append({"parameters": found["parameters"], **found["rows"][0], "reload_s": found["reload_s"]})
    for row in largest["rows"]:
        row["ratios"] = {
            "commit / reload": row["commit_s"] / largest["reload_s"],
            "commit / load from memory": row["commit_s"] / largest["load_in_memory_s"],
            "commit / vLLM's patches": row["commit_s"] / row["vllm_s"],
            "extra memory / payload": row["extra_bytes"] / row["payload_bytes"],
        }
    return {**largest, "by_size": by_size}


def end_to_end(size: str, repeats: int, *, packed: bool = False) -> dict[str, Any]:
    """Pauses of a server that generates meanwhile, by delta at 1 % and by full files; then a cold start beside it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-")))
        say("making a model")
        start = make_model(folder / "model", size)
        weights = {name: tensor.clone() for name, tensor in CheckpointSource(start)}
        say("starting vLLM")
        settings = settings_for("vllm") | {"max_model_len": 256}
        if not packed:
            stack.enter_context(plain_linears())
        server = stack.enter_context(VLLMServer(start, **settings))
        pool, done = stack.enter_context(ThreadPoolExecutor(2)), threading.Event()
        stack.callback(done.set)
        clients = [pool.submit(_busy, server.url, done) for _ in range(2)]
        pauses: dict[str, list[float]] = {"delta": [], "disk": []}
        reports = []
        for turn in range(2):  # each trainer in turn, so that drift of the machine weighs on both
            for way in pauses:
                engine = vllm_engine(server.url)
                root = folder / f"{way}{turn}"
                transport = DeltaTransport(root) if way == "delta" else DiskTransport(root, files=start)
                sender = WeightSender(transport, engine)
                for step in range(-(-repeats // 2) + 1):
                    flip(weights, 0.01, seed=1000 * turn + step)
                    say(f"{way}, update {step}")
                    report = sender.update_weights(weights)
                    if step:  # the first one of a chain is full
                        pauses[way].append(report.engines[0].pause_s)
                        reports.append(report.to_json())
                sender.shutdown()
        done.set()
        generated = sum(client.result() for client in clients)
        say("one more by delta, which a cold start has to agree with")
        transport = DeltaTransport(folder / "last", keyframe_every=0)
        sender = WeightSender(transport, vllm_engine(server.url))
        sender.update_weights(weights)
        flip(weights, 0.01, seed=7)
        last = sender.update_weights(weights)
        said = _generate(server.url, 32)
        sender.shutdown()
        checkpoint = shutil.copytree(start, folder / "cold-start")
        save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
        server.stop()
        say("starting vLLM cold")
        with VLLMServer(checkpoint, **settings) as cold:
            fresh = _generate(cold.url, 32)
    middle = {way: statistics.median(found) for way, found in pauses.items()}
    return {
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "packed": packed,
        "density": last.density,
        "pauses_s": pauses,
        "median_pause_s": middle,
        "ratio": middle["delta"] / middle["disk"],
        "tokens_meanwhile": generated,
        "tokens_equal_a_cold_load": said == fresh,
        "reports": reports,
    }


def _busy(url: str, done: threading.Event) -> int:
    """Send one request after another until ``done``; return the number of generated tokens."""
    count = 0
    while not done.is_set():
        count += len(_generate(url, 64, 1.0))
    return count


def _generate(url: str, count: int, temperature: float = 0.0) -> tuple[int, ...]:
    with closing(InferenceClient(url, kind="vllm")) as client:
        (found,) = client.generate([PROMPT], max_tokens=count, temperature=temperature, ignore_eos=True)
    return found.token_ids


def _in_vllm(model: Path, elements: list[int], repeats: int) -> dict[str, Any]:
    asked = {"model": str(model), "elements": elements, "repeats": repeats, "port": free_port()}
    return in_vllm("vllm_landing.py", asked)
