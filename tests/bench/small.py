"""``python -m tests.bench small``: an update of very many small tensors, beside a clone of each."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

import torchrl_ext as tx
from tests.bench.data import say
from torchrl_ext.cli.bench import seconds
from torchrl_ext.sync.local.inprocess import InProcessEngine

_STEPS = ("publish", "first prefetch", "prefetch", "commit")


def measure(*, repeats: int = 7, tensors: int = 60_000, elements: int = 16) -> dict[str, Any]:
    """A keyframe of --tensors of --elements each, then two deltas that change an element of each, into this process."""
    names = [f"model.layers.{number // 100}.experts.{number % 100}.weight" for number in range(tensors)]
    own = {name: torch.randn(elements).bfloat16() for name in names}
    rows = list[dict[str, float]]()
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(repeats + 1):  # the first one is not counted
            say(f"round {turn}")
            row = _round(own, Path(folder) / str(turn))
            rows += [row] if turn else []
    clone = [row.pop("clone") for row in rows]
    of_each = {
        step: statistics.median(row[step] / each for row, each in zip(rows, clone, strict=True)) for step in _STEPS
    }
    return {
        "tensors": tensors,
        "elements": elements,
        "clone_ms": 1000 * statistics.median(clone),
        "clones": of_each,
    }


def _round(own: dict[str, torch.Tensor], root: Path) -> dict[str, float]:
    served = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
    sender = tx.WeightSender(tx.DeltaTransport(root, encoding="ulp"), InProcessEngine(served))
    reports = [sender.update_weights(own)]
    for _ in range(2):
        for tensor in own.values():
            tensor.view(torch.int16)[3] += 1
        reports.append(sender.update_weights(own))
        assert reports[-1].verified
    assert all(torch.equal(served[name], tensor) for name, tensor in own.items())
    sender.shutdown()
    return {
        "clone": min(seconds(lambda: [tensor.clone() for tensor in own.values()]) for _ in range(3)),
        "publish": reports[2].spans["publish"],
        "first prefetch": reports[1].spans["prefetch"],  # where the tensors lie is looked up, and summed, once
        "prefetch": reports[2].spans["prefetch"],
        "commit": reports[2].spans["commit"],
    }
