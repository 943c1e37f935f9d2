"""``python -m tests.bench owners``: what deltas cost each rank of a trainer, beside what they cost one rank alone.

Memory is that of the host: a rank's copies of what it owns and the most that sending adds to them. One rank alone holds
the whole model; several hold its shards, under FSDP2, and gather each parameter to its owner.

What coding takes is processor time in one process: for the parameters of each owner, and for all of them.
"""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from collections import deque
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.bench.frame import say, together
from tests.memory import track_peak
from torchrl_ext.base.registry import encodings
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.cli.bench.runner import seconds
from torchrl_ext.data.deltas.streams import find, worker_threads
from torchrl_ext.data.deltas.table import ParamTable
from torchrl_ext.data.transports.delta import DeltaTransport
from torchrl_ext.data.versions.owned import FlatCopies
from torchrl_ext.data.versions.payloads import DeltaFiles
from torchrl_ext.data.weights.gather import owners
from torchrl_ext.sync.sender import WeightSender

_TIMEOUT_S = 300.0


def measure(
    *,
    repeats: int = 7,
    ranks: int = 4,
    layers: int = 128,
    width: int = 2048,
    density: float = 0.03,
    dir: str | None = None,
) -> dict[str, Any]:
    """Send as many versions as there are repeats, from one rank and from several, and code what each of them owns.

    The model has --layers square matrices of --width in bfloat16. A share of --density of its elements changes from one
    version to the next. Versions are published into --dir.

    Returns:
        JSON-safe: ``memory``, of the rank that takes most / of one rank alone; ``coding``, the processor time to code
        what the rank that takes longest owns / all; both are at most ``bound``. ``rows`` has copies and the most that
        deltas add, of each rank and of one alone, in bytes; ``seconds`` of an update, of several ranks and of one.
    """
    found = {}
    for count in (1, ranks):
        say(f"{count} rank(s) with {layers} x {width}^2 parameters")
        with tempfile.TemporaryDirectory(dir=dir) as root:
            found[count] = together(partial(_work, count, layers, width, repeats, density, root), count)
    alone, rows = found[1][0], found[ranks]
    say("coding what each rank owns, and everything")
    return {
        "bound": 1.2 / ranks,
        "memory": max(row["copies"] + row["delta"] for row in rows) / (alone["copies"] + alone["delta"]),
        "coding": _coding(ranks, layers, width, repeats, density),
        "seconds": [max(row["seconds"] for row in rows), alone["seconds"]],
        "rows": [*rows, alone],
    }


def _coding(ranks: int, layers: int, width: int, repeats: int, density: float) -> float:
    tensors = {f"{number}.weight": torch.randn(width, width, dtype=torch.bfloat16) for number in range(layers)}
    params = [ParamMeta.of(*pair) for pair in tensors.items()]
    owned = owners(params, ranks)
    parts = [[meta for meta, owner in zip(params, owned, strict=True) if owner == rank] for rank in range(ranks)]
    copies = [FlatCopies(ParamTable.of(part)) for part in (*parts, params)]
    for one in copies:
        for name, copy in one.by_name().items():
            copy.copy_(tensors[name])

    def coded(one: FlatCopies) -> None:
        rows = ((0, number, tensors[meta.name]) for number, meta in enumerate(one.table.params))
        made = DeltaFiles(one.table, encodings.make("ulp"))
        blocks = find(one.table, one.bits, rows, made.code, threads=worker_threads(), follow=True)
        deque(made.files(1, blocks), maxlen=0)

    taken: list[list[float]] = [[] for _ in copies]
    for turn in range(repeats + 1):
        for tensor in tensors.values():
            flat = tensor.view(-1).view(torch.int16)
            flat[torch.randint(flat.numel(), (int(density * flat.numel()),))] += 1
        for at, one in enumerate(copies):
            began = time.process_time()
            coded(one)
            taken[at] += [time.process_time() - began] if turn else []  # the first one compiles
    *each, every = map(min, taken)
    return max(each) / every


def _work(ranks: int, layers: int, width: int, versions: int, density: float, root: str, rank: int) -> dict[str, Any]:
    """Run one rank: shard a model, if there are several, send it, and return what that took."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)  # as torchrun says it
    longest = datetime.timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=ranks, timeout=longest)
    torch.set_num_threads(1)

    def model_of(count: int, size: int) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(size, size, bias=False, dtype=torch.bfloat16) for _ in range(count)))
        for layer in (*model, model) if ranks > 1 else ():
            fully_shard(layer)
        return model

    def train(model: nn.Module, version: int) -> None:
        torch.manual_seed(version * ranks + rank)
        for parameter in model.parameters():
            own = parameter.to_local() if ranks > 1 else parameter  # type: ignore[attr-defined]
            flat = own.detach().view(-1)
            flat[torch.randint(flat.numel(), (int(density * flat.numel()),))] *= 1.01  # and next to no memory

    def sent(model: nn.Module, sender: WeightSender, version: int) -> float:
        train(model, version)
        dist.barrier()
        return seconds(lambda: sender.update_weights(model))

    first = WeightSender(DeltaTransport(f"{root}/first", encoding="ulp", timeout_s=_TIMEOUT_S))
    small = model_of(2 * ranks, 64)
    for version in range(3):  # compiled loops and what gloo keeps are no part of the model
        sent(small, first, version)
    model = model_of(layers, width)
    own = 2 * layers * width * width // ranks
    transport = DeltaTransport(f"{root}/updates", keyframe_every=0, shard_bytes=max(1, own // 32), timeout_s=_TIMEOUT_S)
    sender = WeightSender(transport)
    sent(model, sender, 0)
    with track_peak() as delta:
        taken = [sent(model, sender, version) for version in range(1, versions + 1)]
    dist.barrier()
    return {"copies": transport.baseline_bytes, "delta": max([0, *delta]), "seconds": min(taken)}
