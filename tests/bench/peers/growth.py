"""How layouts and updates grow: with parameters, with the share that changes, with tensors, and with engines."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import torchrl_ext as tx
from tests.bench.data import flip
from tests.bench.frame import seconds
from tests.bench.peers.layouts import Row, weigh
from tests.embedded import EmbeddedServer
from torchrl_ext.bench.data import Shapes, model_shapes, synthetic_pair
from torchrl_ext.testing.tiny import make_tiny_lm
from torchrl_ext.weights.checkpoint import CheckpointSource

SIZES: dict[str, dict[str, list[Any]]] = {
    "full": {
        "parameters": [(2, 256, 4000), (4, 512, 8000), (6, 768, 16_000)],
        "density": [0.001, 0.01, 0.1, 0.5],
        "tensors": [10, 100, 1000, 10_000],
        "engines": [1, 2, 4],
    },
    "small": {
        "parameters": [(1, 128, 500), (1, 256, 500)],
        "density": [0.01, 0.1],
        "tensors": [10, 100],
        "engines": [1, 2],
    },
}
_ELEMENTS = {"full": 1 << 23, "small": 1 << 18}
_HIDDEN = {"full": 512, "small": 128}


def layouts(size: str, repeats: int) -> Iterator[Row]:
    """Yield rows of layouts along three axes; where nothing else is said, 1 % of the elements change."""
    for layers, hidden, vocabulary in SIZES[size]["parameters"]:
        shapes = model_shapes(layers, hidden, vocabulary)
        number = sum(math.prod(shape) for shape in shapes.values())
        yield from _along("parameters", number, shapes, 0.01, repeats)
    middle = model_shapes(*SIZES[size]["parameters"][1])
    for density in SIZES[size]["density"]:
        yield from _along("density", density, middle, density, repeats)
    for count in SIZES[size]["tensors"]:
        yield from _along("tensors", count, _cut(_ELEMENTS[size], count), 0.01, repeats)


def _cut(elements: int, count: int) -> Shapes:
    return {f"w.{number:05d}": (8, elements // count // 8) for number in range(count)}


def _along(axis: str, at: float, shapes: Shapes, density: float, repeats: int) -> Iterator[Row]:
    old, new = {}, {}
    for name, before, after in synthetic_pair(shapes, density):
        old[name], new[name] = before, after
    for row in weigh(old, new, repeats):
        yield {"axis": axis, "at": at, **row}


def engines(size: str, repeats: int, folder: Path) -> Iterator[Row]:
    """Yield rows of updates to several embedded engines on this machine, of 1 % of the elements."""
    hidden = _HIDDEN[size]
    model = make_tiny_lm(
        folder / "growth", dtype=torch.bfloat16, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=4
    )
    weights = {name: tensor.clone() for name, tensor in CheckpointSource(model)}
    targets = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    makes: dict[str, Callable[[Path], tx.Transport]] = {
        "disk": lambda root: tx.make_transport("disk", root=root, files=model),
        "delta": lambda root: tx.make_transport("delta", root=root, keyframe_every=0),
        "delta by broadcast": lambda _: tx.make_transport("delta", carrier="collective", keyframe_every=0),
        "collective": lambda _: tx.make_transport("collective"),
    }
    with ExitStack() as ends:
        urls = [
            ends.enter_context(EmbeddedServer(model, dtype="bfloat16", threads=1)).url
            for _ in range(max(SIZES[size]["engines"]))
        ]
        for count in SIZES[size]["engines"]:
            for name, make in makes.items():
                sender = tx.WeightSender(make(folder / f"{name}-{count}"), tx.connect(*urls[:count]))
                try:
                    sender.update_weights(weights)
                    taken, pauses, size_of = [], [], 0
                    copy_s = min(seconds(lambda: _copy(weights, targets)) for _ in range(3))
                    for turn in range(repeats + 1):
                        flip(weights, 0.01, seed=turn)
                        began = time.perf_counter()
                        report = sender.update_weights(weights)
                        if turn:
                            taken.append(time.perf_counter() - began)
                            pauses.append(max(row.pause_s for row in report.engines))
                            size_of = report.bytes
                finally:
                    sender.shutdown()
                total_s, pause_s = statistics.median(taken), statistics.median(pauses)
                found = {"axis": "engines", "at": count, "name": name, "ours": True, "bytes": size_of}
                found |= {"total_s": total_s, "pause_s": pause_s, "copy_s": copy_s}
                yield found | {"total_of_copy": total_s / copy_s, "pause_of_copy": pause_s / copy_s}


def _copy(weights: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> None:
    for name, tensor in weights.items():
        targets[name].copy_(tensor)
