"""``python -m tests.bench proof``: what it costs to prove an update, beside the update."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.bench.models import SIZES, make_model
from torchrl_ext import registry
from torchrl_ext.cli.environments import settings_for
from torchrl_ext.kernels.base import LINEAR
from torchrl_ext.landing.patcher import READ_BACK_VERSIONS, Patcher, identity
from torchrl_ext.serving.server import start
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.sync.sender import WeightSender


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the settings."""
    parser.add_argument("--elements", type=int, default=100_000_000, help="of the bfloat16 model that follows deltas")
    parser.add_argument("--density", type=float, default=0.01, help="share of the elements that an update changes")
    parser.add_argument("--engine", choices=["none", "vllm", "sglang"], default="none", help="real one that rehearses")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the real engine's model")


def measure(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Deltas with the read-back of each version timed beside them; and, on a real engine, the rehearsal beside a load.

    Raises:
        EngineError: the engine did not start, or refused.
    """
    say("deltas into a model of this process")
    results: dict[str, Any] = {"cores": os.cpu_count(), "density": args.density, **_read_back(args)}
    if args.engine != "none":
        say(f"{args.engine} rehearses")
        results["rehearsal"] = _rehearsal(args)
    return results


def _read_back(args: argparse.Namespace) -> dict[str, Any]:
    rows = max(1, args.elements // (24 * 4096))
    own = {f"layer{i}": torch.randn(rows, 4096).to(torch.bfloat16) for i in range(24)}
    theirs = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
    shares, updates = [], []
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-") as folder:
        transport = registry.transports.make("delta", root=folder, keyframe_every=0)
        sender = WeightSender(transport, InProcessEngine(theirs))
        sender.update_weights(own)
        for turn in range(args.repeats + 1):
            _change(own, args.density, turn)
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


def _change(tensors: dict[str, Tensor], density: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        places = torch.randint(tensor.numel(), (int(density * tensor.numel()),), generator=generator)
        bits = tensor.view(torch.int16).view(-1)
        bits[places] = bits[places] ^ 1


def _one_turn(tensors: dict[str, Tensor]) -> float:
    """Seconds to read back what one version reads back, taken over all turns: their sizes differ a little."""
    patcher = Patcher(identity(tensors))
    patcher.held(LINEAR)
    began = time.perf_counter()
    patcher.read_back(tensors)
    return (time.perf_counter() - began) / READ_BACK_VERSIONS


def _rehearsal(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-") as folder:
        models = [str(make_model(f"{folder}/model{seed}", args.size, seed=seed)) for seed in range(2)]
        settings = settings_for(args.engine) | {"dtype": "bfloat16", "max_model_len": 256}
        spec = registry.engines.part(args.engine, "server")(models[0], **settings)
        with start(spec) as server:
            engine = registry.engines.make(args.engine, url=server.url)
            sender = WeightSender(registry.transports.make("disk", root=Path(folder) / "root"), engine)
            first = sender.update_weights(models[1])
            loads = [sender.update_weights(models[turn % 2]).spans["pause"] for turn in range(args.repeats)]
            told = engine.rehearsed[0]
            sender.shutdown()
    return {
        "engine": args.engine,
        "size": args.size,
        "rehearse_s": first.spans["rehearse"],
        "load_s": statistics.median(loads),
        "ratio": first.spans["rehearse"] / statistics.median(loads),
        "loads": told["loads"],
        "proof": first.proof,
    }
