"""``python -m tests.bench small``: an update of very many small tensors, beside a clone of each."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torchrl_ext as tx
from torchrl_ext.stores.manifest import MANIFEST, read_manifest
from torchrl_ext.sync.engines.inprocess import InProcessEngine

_STEPS = ("keyframe", "publish", "first prefetch", "prefetch", "commit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the settings."""
    parser.add_argument("--tensors", type=int, default=60_000)
    parser.add_argument("--elements", type=int, default=16, help="of each tensor")


def measure(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """A keyframe, then two deltas that change an element of each tensor, into an engine of this process."""
    names = [f"model.layers.{number // 100}.experts.{number % 100}.weight" for number in range(args.tensors)]
    own = {name: torch.randn(args.elements).bfloat16() for name in names}
    rows = list[dict[str, float]]()
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.repeats + 1):  # the first one is not counted
            say(f"round {turn}")
            row = _round(own, Path(folder) / str(turn))
            rows += [row] if turn else []
    clone = [row.pop("clone") for row in rows]
    of_each = {
        step: statistics.median(row[step] / each for row, each in zip(rows, clone, strict=True)) for step in _STEPS
    }
    return {
        "tensors": args.tensors,
        "elements": args.elements,
        "clone_ms": 1000 * statistics.median(clone),
        "clones": of_each,
        "manifest_ms": {step: 1000 * statistics.median(row[step] for row in rows) for step in ("write", "read")},
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
    data = (root / "weight_v000002" / MANIFEST).read_bytes()
    sender.shutdown()
    found = {
        "clone": min(_seconds(lambda: [tensor.clone() for tensor in own.values()]) for _ in range(3)),
        "keyframe": reports[0].spans["publish"],
        "publish": reports[2].spans["publish"],
        "first prefetch": reports[1].spans["prefetch"],  # where the tensors lie is looked up, and summed, once
        "prefetch": reports[2].spans["prefetch"],
        "commit": reports[2].spans["pause"],
    }
    manifest = read_manifest(data, "here")
    return found | {"read": _seconds(lambda: read_manifest(data, "here")), "write": _seconds(manifest.to_bytes)}


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
