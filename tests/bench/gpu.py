"""``python -m tests.bench gpu``: updates that stay on a GPU, beside plain copies of the same bytes.

Shared memory between two processes beside ``copy_`` of every tensor on the device; deltas that are listed on the
device, from a baseline there and from one in pinned host memory, beside a copy of the whole model to the host and the
host's own pass over it; and a staged delta that lands, beside a copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from tests.bench.data import flip
from tests.bench.frame import say
from torchrl_ext.bench.data import SIZES, Shapes, shapes_bytes
from torchrl_ext.bench.delta import coded, copies_of
from torchrl_ext.bench.runner import ratio, rounds
from torchrl_ext.bench.transport import compare, settle
from torchrl_ext.codecs.blocks import ULP
from torchrl_ext.codecs.pipeline import worker_threads
from torchrl_ext.errors import ConfigError
from torchrl_ext.kernels.base import LINEAR
from torchrl_ext.landing.loader import Changes
from torchrl_ext.landing.patcher import Patcher, identity
from torchrl_ext.versions.writer import FlatCopies

Weights = dict[str, Tensor]


def measure(
    *,
    repeats: int = 7,
    size: Literal["full", "small", "tiny"] = "full",
    densities: list[float] = [0.001, 0.01, 0.03],  # noqa: B006 - read only
    threads: int | None = None,
    device: str = "cuda",
) -> dict[str, Any]:
    """Run every comparison with a model of --size, and deltas of each of --densities (repeat it) that --threads code.

    --device cpu runs the same on the host, to try the command.

    Raises:
        ConfigError: there is no such device.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here", hint="run it on a machine with a GPU")
    shapes, threads = SIZES[size]["model"], threads or worker_threads()
    numbers: dict[str, Any] = {
        "size": size,
        "device": torch.cuda.get_device_name() if torch.device(device).type == "cuda" else device,
        "threads": threads,
        "torch": torch.__version__,
        "bytes": shapes_bytes(shapes),
    }
    say("shared memory between two processes")
    numbers["ipc"] = compare(shapes, ["ipc"], repeats, device=device)
    numbers["deltas"] = []
    for density in densities:
        say(f"deltas, {density:.1%} changed")
        numbers["deltas"].append(_delta(shapes, density, threads, device, repeats))
    return numbers


def _delta(shapes: Shapes, density: float, threads: int, device: str, repeats: int) -> dict[str, Any]:
    pinned = torch.device(device).type == "cuda"
    old = {name: torch.empty(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}
    new = {name: tensor.normal_(0, 0.02).clone() for name, tensor in old.items()}
    flip(new, density, seed=1)
    here, held = copies_of(old), copies_of(old, pinned=pinned)
    landing = {name: torch.empty_like(tensor) for name, tensor in new.items()}
    arrived = {name: _on_host(tensor, pinned) for name, tensor in new.items()}
    changed = 0

    def copy(into: Weights) -> None:
        for name, tensor in new.items():
            into[name].copy_(tensor, non_blocking=True)

    def encode(base: FlatCopies, source: Weights) -> None:
        nonlocal changed
        changed = sum(int(one.changed.sum()) for one in coded(base, source, "ulp", threads))

    def before() -> None:  # as without kernels on the device: the whole model goes to the host
        copy(arrived)
        settle(device)
        encode(held, arrived)

    ways: dict[str, Callable[[], None]] = {
        "copy on the device": partial(copy, landing),
        "copy to the host": partial(copy, arrived),
        "baseline on the device": partial(encode, here, new),
        "baseline on the host": partial(encode, held, new),
        "coded on the host": before,
    }
    seconds = rounds({name: partial(_timed, way, device) for name, way in ways.items()}, repeats)
    spans = [_land(old, new, threads) for _ in range(repeats + 1)][1:]
    seconds |= {"stage": [stage for stage, _ in spans], "commit": [commit for _, commit in spans]}
    total = shapes_bytes(shapes)
    return {
        "density": density,
        "changed": changed,
        "seconds": seconds,
        "gb_per_s": {way: total / median(taken) / 1e9 for way, taken in seconds.items()},
        "listed_vs_host": ratio(seconds["baseline on the device"], seconds["coded on the host"]),
        "listed_vs_copy": ratio(seconds["baseline on the device"], seconds["copy on the device"]),
    }


def _timed(way: Callable[[], None], device: str) -> float:
    settle(device)
    began = time.perf_counter()
    way()
    settle(device)
    return time.perf_counter() - began


def _land(old: Weights, new: Weights, threads: int) -> tuple[float, float]:
    """Return the seconds to stage a delta on parameters that hold ``old``, and to commit it."""
    live = {name: tensor.clone() for name, tensor in old.items()}
    olds = copies_of(old)
    patches = [
        ULP.decode(one.payload, olds.table, one.stream, one.start, one.size)
        for one in coded(olds, new, "ulp", threads)
        if one.payload
    ]
    changes = Changes(patches=lambda wanted: iter(patches), digests={}, whole=lambda names: iter(()))
    patcher = Patcher(identity(live))
    patcher.held(LINEAR)
    began = time.perf_counter()
    patcher.stage(changes)
    middle = time.perf_counter()
    patcher.commit()
    return middle - began, time.perf_counter() - middle


def _on_host(tensor: Tensor, pinned: bool) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned).copy_(tensor)
