"""``python -m tests.bench proof``: what it costs to prove an update, beside the update."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tests.bench.data import flip
from tests.bench.frame import say
from tests.bench.models import make_model
from torchrl_ext import registry
from torchrl_ext.cli.environments import settings_for
from torchrl_ext.kernels.base import LINEAR
from torchrl_ext.landing.patcher import READ_BACK_VERSIONS, Patcher, identity
from torchrl_ext.serving.server import start
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.sync.sender import WeightSender


def measure(
    *,
    repeats: int = 7,
    elements: int = 100_000_000,
    density: float = 0.01,
    engine: Literal["vllm", "sglang"] | None = None,
    size: Literal["full", "small"] = "small",
) -> dict[str, Any]:
    """Deltas with the read-back of each version timed beside them, and on a real --engine the rehearsal beside a load.

    An update changes a share of --density of a bfloat16 model of --elements. The engine's model is one of `SIZES`.
    """
    say("deltas into a model of this process")
    results: dict[str, Any] = {"cores": os.cpu_count(), "density": density, **_read_back(elements, density, repeats)}
    if engine is not None:
        say(f"{engine} rehearses")
        results["rehearsal"] = _rehearsal(engine, size, repeats)
    return results


def _read_back(elements: int, density: float, repeats: int) -> dict[str, Any]:
    rows = max(1, elements // (24 * 4096))
    own = {f"layer{i}": torch.randn(rows, 4096).to(torch.bfloat16) for i in range(24)}
    theirs = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
    shares, updates = [], []
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-") as folder:
        transport = registry.transports.make("delta", root=folder, keyframe_every=0)
        sender = WeightSender(transport, InProcessEngine(theirs))
        sender.update_weights(own)
        for turn in range(repeats + 1):
            flip(own, density, turn)
            began = time.perf_counter()
            sender.update_weights(own)
            update_s, read_s = time.perf_counter() - began, _one_turn(theirs)
            if turn:  # the first compiles
                updates.append(update_s)
                shares.append(read_s / update_s)
        sender.shutdown()
    return {
        "elements": sum(tensor.numel() for tensor in own.values()),
        "update_s": statistics.median(updates),
        "share": {"median": statistics.median(shares), "low": min(shares), "high": max(shares)},
    }


def _one_turn(tensors: dict[str, Tensor]) -> float:
    """Seconds to read back what one version reads back, taken over all turns: their sizes differ a little."""
    patcher = Patcher(identity(tensors))
    patcher.held(LINEAR)
    began = time.perf_counter()
    patcher.read_back(tensors)
    return (time.perf_counter() - began) / READ_BACK_VERSIONS


def _rehearsal(kind: str, size: str, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-") as folder:
        models = [str(make_model(f"{folder}/model{seed}", size, seed=seed)) for seed in range(2)]
        settings = settings_for(kind) | {"dtype": "bfloat16", "max_model_len": 256}
        spec = registry.engines.part(kind, "server")(models[0], **settings)
        with start(spec) as server:
            engine = registry.engines.make(kind, url=server.url)
            sender = WeightSender(registry.transports.make("disk", root=Path(folder) / "root"), engine)
            first = sender.update_weights(models[1])
            loads = [sender.update_weights(models[turn % 2]).spans["pause"] for turn in range(repeats)]
            told = engine.rehearsed[0]
            sender.shutdown()
    return {
        "engine": kind,
        "size": size,
        "rehearse_s": first.spans["rehearse"],
        "load_s": statistics.median(loads),
        "ratio": first.spans["rehearse"] / statistics.median(loads),
        "loads": told["loads"],
        "proof": first.proof,
    }
