"""``python -m tests.bench plan``: seconds and memory of a transfer plan for very many tensors, ranks and workers.

The trainer is FSDP2, each rank a stretch of rows of every tensor; the engine's workers cut matrices by columns or by
rows, and hold every norm and router whole.
"""

from __future__ import annotations

import itertools
import time
from statistics import median
from typing import Any

import torch

from tests.bench.frame import say
from torchrl_ext.bench.runner import track_peak
from torchrl_ext.transports.sharded.plans.plan import Share, make_plan
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.shards.blocks import Block

BUCKET_BYTES = 256 << 20
_LAYER = {  # shape -> the dimension that workers cut; None: all of them hold it whole
    "input_norm": ((4096,), None),
    "q": ((8192, 4096), 0),
    "k": ((1024, 4096), 0),
    "v": ((1024, 4096), 0),
    "o": ((4096, 8192), 1),
    "q_norm": ((128,), None),
    "k_norm": ((128,), None),
    "post_norm": ((4096,), None),
    "router": ((128, 4096), None),
    "up": ((1536, 4096), 0),
    "down": ((4096, 1536), 1),
    "bias": ((1536,), 0),
}


def measure(*, repeats: int = 7, tensors: int = 100_000, ranks: int = 64, workers: int = 64) -> dict[str, Any]:
    """Make a plan of --tensors parameters between --ranks trainer ranks and the --workers of one engine.

    Shares are made beforehand and not counted.

    Returns:
        ``seconds``, the median; ``bytes``, the most memory that making it adds; ``own_s`` (of the processor's time,
        which other jobs of the machine do not lengthen), ``links_s`` (of one rank for its rows and all its links of an
        update), ``rounds``, ``balance`` (bytes out of the busiest rank / the mean) and the sizes; JSON-safe.
    """
    say(f"planning {tensors} tensors, {ranks} ranks, {workers} workers")
    names = enumerate(itertools.islice(itertools.cycle(_LAYER), tensors))
    layers = [(f"layers.{at // len(_LAYER)}.{name}", *_LAYER[name]) for at, name in names]
    params = [ParamMeta(name, torch.bfloat16, shape) for name, shape, _ in layers]
    held = _shares([(shape, 0) for _, shape, _ in layers], ranks)
    needed = _shares([(shape, axis) for _, shape, axis in layers], workers)
    seconds: list[float] = []
    own: list[float] = []
    peak = 0
    for _ in range(repeats):
        with track_peak() as extra:
            began, computed = time.perf_counter(), time.process_time()
            plan = make_plan(params, held, needed, bucket_bytes=BUCKET_BYTES)
            seconds.append(time.perf_counter() - began)
            own.append(time.process_time() - computed)
        peak = max(peak, *extra, 0)
    began = time.perf_counter()
    own_rows = plan.member(0)
    transfers = sum(len(sent) for at in range(plan.rounds) for _, sent in own_rows.links(at))
    links_s = time.perf_counter() - began
    return {
        "tensors": tensors, "ranks": ranks, "workers": workers, "rounds": plan.rounds, "transfers": transfers,
        "seconds": median(seconds), "bytes": peak, "links_s": links_s,
        "own_s": median(own),
        "balance": float(plan.rank_bytes.max() / plan.rank_bytes.mean()),
    }  # fmt: skip


def _shares(layout: list[tuple[tuple[int, ...], int | None]], members: int) -> list[Share]:
    """Return what each member has where tensors of these shapes are cut into equal stretches along one dimension."""
    found = []
    for member in range(members):
        memo = {key: _stretch(*key, member, members) for key in set(layout)}
        found.append(Share.of_blocks(memo[key] for key in layout))
    return found


def _stretch(shape: tuple[int, ...], axis: int | None, member: int, members: int) -> list[Block]:
    if axis is None:
        return [Block.whole(shape)]
    size = -(-shape[axis] // members)  # as FSDP2 and torch.chunk do: the last ones may get less, or nothing
    start, stop = min(member * size, shape[axis]), min((member + 1) * size, shape[axis])
    whole = Block.whole(shape)
    return [Block((*whole.start[:axis], start, *whole.start[axis + 1 :]), (*shape[:axis], stop, *shape[axis + 1 :]))]
