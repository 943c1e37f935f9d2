"""``python -m tests.bench memory``: what each way adds to the memory of a trainer, with a model of more than 1 GB.

Beside a small model, what an import or a compiler takes would hide it.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch

import torchrl_ext as tx
from tests.bench.data import chain_shape, say
from tests.bench.peers.ways import HAND, OURS, Update, ours
from tests.memory import track_peak
from torchrl_ext.control.serving.embedded import EmbeddedSpec
from torchrl_ext.control.serving.server import start
from torchrl_ext.data.weights.checkpoint import CheckpointSource
from torchrl_ext.testing.tiny import make_tiny_lm

SIZES = {"full": (1536, 18, 16_000), "small": (256, 2, 2000)}
"""Hidden size, layers and vocabulary: 559 M and 2.6 M parameters."""
START_S = 300.0


def measure(*, size: Literal["full", "small"] = "full", only: str = "") -> dict[str, Any]:
    """Measure the peak of a whole update and a delta of 1 %, divided by the size of the weights.

    Our transports update an embedded engine. Nobody answers what is done by hand: only the trainer's half counts.
    """
    hidden, layers, vocabulary = SIZES[size]
    ways: dict[str, Callable[[Any], AbstractContextManager[Update]]] = {
        **{name: partial(ours, **how) for name, how in OURS.items()},
        **HAND,
    }
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-") as name:
        folder = Path(name)
        say("making a model")
        model = make_tiny_lm(folder / "model", dtype=torch.bfloat16, **chain_shape(hidden, layers, vocabulary))
        weights = {name: tensor.clone() for name, tensor in CheckpointSource(model)}
        nbytes = sum(tensor.nbytes for tensor in weights.values())
        with start(EmbeddedSpec(model, dtype="bfloat16", start_timeout_s=START_S)) as server:
            with tx.WeightSender(tx.make_transport("delta", root=folder / "warm"), tx.connect(server.url)) as sender:
                for _ in range(2):  # imports and compiles
                    sender.update_weights(weights)
                    _change(weights)
            shutil.rmtree(folder / "warm")
            rows = list(_rows({key: way for key, way in ways.items() if only in key}, server.url, weights, folder))
    model_row = {"parameters": sum(tensor.numel() for tensor in weights.values()), "bytes": nbytes}
    return {"size": size, "model": model_row | {"tensors": len(weights)}, "rows": rows}


def _rows(ways: dict[str, Any], url: str, weights: dict[str, torch.Tensor], folder: Path) -> Iterator[dict[str, Any]]:
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    for way, make in ways.items():
        say(way)
        scratch = folder / "scratch"
        numbers = itertools.count()

        def new_folder(scratch: Path = scratch, numbers: Iterator[int] = numbers) -> Path:
            made = scratch / str(next(numbers))
            made.mkdir(parents=True)
            return made

        site = SimpleNamespace(
            kind="sglang", url=url, folder=new_folder, call=lambda *_, **__: None, checkpoints=SimpleNamespace()
        )
        site.checkpoints.folder = folder / "model"
        with track_peak() as extra, make(site) as update:
            for _ in range(2):
                _change(weights)
                update(weights)
        shutil.rmtree(scratch, ignore_errors=True)
        yield {"name": way, "ours": way in OURS, "memory_of_model": extra[0] / nbytes if extra else None}


def _change(weights: dict[str, torch.Tensor]) -> None:
    """Change the lowest bit of every hundredth element."""
    for tensor in weights.values():
        tensor.view(torch.int16).view(-1)[::100] ^= 1
