"""How layouts and updates grow: with parameters, with the share that changes, with tensors, and with engines."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchrl_ext as tx
from tests.bench.data import flip
from tests.bench.frame import say
from tests.bench.peers.layouts import Row, weigh
from tests.engines.embedded import EmbeddedServer
from torchrl_ext.cli.bench.data import Shapes, model_shapes, shapes_bytes, synthetic_pair
from torchrl_ext.cli.bench.runner import seconds
from torchrl_ext.data.weights.checkpoint import CheckpointSource
from torchrl_ext.testing.tiny import make_tiny_lm

SIZES: dict[str, dict[str, Any]] = {
    "full": {
        "models": [(2, 256, 4000), (4, 512, 8000), (6, 768, 16_000)],
        "density": [0.001, 0.01, 0.1, 0.5],
        "elements": 1 << 23,
        "tensors": [10, 100, 1000, 10_000],
        "engines": [1, 2, 4],
        "hidden": 512,
    },
    "small": {
        "models": [(1, 128, 500), (1, 256, 500)],
        "density": [0.01],
        "elements": 1 << 18,
        "tensors": [10],
        "engines": [2],
        "hidden": 128,
    },
}
TRANSPORTS: dict[str, dict[str, Any]] = {
    "disk": {},
    "delta": {"keyframe_every": 0},
    "delta by broadcast": {"carrier": "collective", "keyframe_every": 0},
    "collective": {},
}


def layouts(size: str, repeats: int) -> Iterator[Row]:
    """Yield rows of layouts along three axes; where nothing else is said, 1 % of the elements change."""
    found = SIZES[size]
    models = [model_shapes(*model) for model in found["models"]]
    cases: list[tuple[str, float, Shapes, float]] = [
        ("parameters", shapes_bytes(shapes) // 2, shapes, 0.01) for shapes in models
    ]
    cases += [("density", density, models[1], density) for density in found["density"]]
    for count in found["tensors"]:
        shape = (8, found["elements"] // count // 8)
        cases.append(("tensors", count, {f"w.{number:05d}": shape for number in range(count)}, 0.01))
    for axis, at, shapes, density in cases:
        say(f"growth, {axis} {at}")
        for row in weigh(synthetic_pair(shapes, density), repeats):
            yield {"axis": axis, "at": at, **row}


def engines(size: str, repeats: int, folder: Path) -> Iterator[Row]:
    """Yield rows of updates to several embedded engines on this machine, of 1 % of the elements."""
    counts, hidden = SIZES[size]["engines"], SIZES[size]["hidden"]
    shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 4}
    model = make_tiny_lm(folder / "growth", dtype=torch.bfloat16, **shape)
    weights = {name: tensor.clone() for name, tensor in CheckpointSource(model)}
    target = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    copy_s = min(seconds(lambda: copy(weights, target)) for _ in range(3))
    with ExitStack() as ends:
        urls = [ends.enter_context(EmbeddedServer(model, dtype="bfloat16", threads=1)).url for _ in range(max(counts))]
        for count in counts:
            for name, settings in TRANSPORTS.items():
                say(f"growth, {count} engines, {name}")
                kind, taken = name.partition(" ")[0], list[float]()
                place = {} if kind == "collective" or "carrier" in settings else {"root": folder / f"{name}-{count}"}
                files = {"files": model} if kind == "disk" else {}
                transport = tx.make_transport(kind, **settings, **place, **files)
                with tx.WeightSender(transport, tx.connect(*urls[:count])) as sender:
                    sender.update_weights(weights)
                    for turn in range(repeats + 1):  # the first delta is not counted
                        flip(weights, 0.01, seed=turn)
                        began = time.perf_counter()
                        sender.update_weights(weights)
                        taken.append(time.perf_counter() - began)
                total_s = statistics.median(taken[1:])
                found = {"axis": "engines", "at": count, "name": name, "ours": True, "total_s": total_s}
                yield found | {"copy_s": copy_s, "total_of_copy": total_s / copy_s}


def copy(weights: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Copy every tensor: the reference of an update."""
    for name, tensor in weights.items():
        target[name].copy_(tensor)
