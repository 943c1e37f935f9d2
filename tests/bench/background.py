"""``python -m tests.bench background``: updates in the background, beside updates that the trainer waits for."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

import torchrl_ext as tx
from tests.bench.frame import say
from torchrl_ext.bench.data import SIZES, shapes_bytes, weights_of
from torchrl_ext.sync.engines.inprocess import InProcessEngine

_TRANSPORTS = ("delta", "disk", "sharded")


def measure(*, repeats: int = 7, size: str = "small", density: float = 0.03) -> dict[str, Any]:
    """Updates of a model of --size into this process, of which a share --density of the elements changes each time.

    ``share not waited`` is the part of an update's total for which `update_weights(wait=False)` does not keep the
    trainer; ``total / waiting`` compares that total with the one of an update before, which the trainer waited for.
    """
    shapes = SIZES[size]["model"]
    found: dict[str, Any] = {"bytes": shapes_bytes(shapes), "density": density}
    for name in _TRANSPORTS:
        say(name)
        with tempfile.TemporaryDirectory() as folder:
            found[name] = _compare(name, Path(folder), weights_of(shapes, 1, "cpu"), repeats, density)
    return found


def _compare(name: str, root: Path, own: dict[str, torch.Tensor], repeats: int, density: float) -> dict[str, Any]:
    served = {key: torch.zeros_like(tensor) for key, tensor in own.items()}
    rows = defaultdict[str, list[float]](list)
    settings = {} if name == "sharded" else {"root": root}
    with tx.WeightSender(tx.make_transport(name, **settings), InProcessEngine(served)) as sender:
        sender.update_weights(own)
        for _ in range(repeats):
            _train(own, density)
            waiting = sender.update_weights(own).spans["total"]
            _train(own, density)
            began = time.perf_counter()
            future = sender.update_weights(own, wait=False)
            waited = time.perf_counter() - began
            report = future.result()
            assert report.verified and all(torch.equal(served[key], tensor) for key, tensor in own.items())
            total = report.spans["total"]
            rows["seconds: total"].append(total)
            rows["seconds: waited"].append(waited)
            rows["share not waited"].append(1 - waited / total)
            rows["total / waiting"].append(total / waiting)
    return dict(rows)


@torch.no_grad()
def _train(own: dict[str, torch.Tensor], density: float) -> None:
    for tensor in own.values():
        units = tensor.view(-1).view(torch.int16)
        units[torch.rand(len(units)) < density] += 1
