"""``python -m tests.bench by_shard``: what deltas by shard cost the ranks of an FSDP2 trainer.

Memory is that of the host: a rank's copies of its own blocks and the most that sending adds to them, beside the bytes
of the whole model, which one rank of a trainer that gathers has to keep.

What coding the blocks of one rank takes is compared with coding the same memory as whole parameters, by the same
threads: where ranks hold rows, as under FSDP2, and where they hold columns, as under tensor parallelism.
"""

from __future__ import annotations

import datetime
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.bench.frame import say, seconds, together
from tests.memory import track_peak
from torchrl_ext.codecs.blocks import ulp
from torchrl_ext.codecs.pipeline import worker_threads
from torchrl_ext.codecs.streams import find
from torchrl_ext.stores.table import ParamTable
from torchrl_ext.sync.sender import WeightSender
from torchrl_ext.transports.delta.transport import DeltaTransport
from torchrl_ext.types import ParamMeta, SyncReport
from torchrl_ext.versions.containers import BlockFiles, code
from torchrl_ext.versions.shards.own import OwnBlocks
from torchrl_ext.versions.writer import FlatCopies
from torchrl_ext.weights.shards.blocks import Block, Shard
from torchrl_ext.weights.source import MappingSource

_TIMEOUT_S = 300.0


def measure(
    *,
    repeats: int = 7,
    ranks: int = 4,
    layers: int = 32,
    width: int = 2048,
    density: float = 0.03,
    dir: str | None = None,
) -> dict[str, Any]:
    """Send as many versions as there are repeats, and code the blocks of one rank.

    The model has --layers square matrices of --width in bfloat16. A share of --density of its elements changes from one
    version to the next. Versions are published into --dir.

    Returns:
        JSON-safe: ``memory``, the host memory of the rank that takes most, its copies and the most that deltas add to
        them, and ``keyframe``, the same for a full version, both / the bytes of the model; ``ranks``, both of each
        rank; ``balance``, bytes written by the rank that writes most / the mean; ``encode``, for rows and columns the
        fewest seconds to code the blocks that one rank holds / to code the same memory as parameters of its own.
    """
    say(f"{ranks} ranks with {layers} x {width}^2 parameters")
    with tempfile.TemporaryDirectory(dir=dir) as root:
        found = together(partial(_work, ranks, layers, width, repeats, density, root), ranks)
    say("coding the blocks of one rank, and the same memory unsharded")
    shapes = {"rows": (width // ranks, width), "columns": (width, width // ranks)}
    coding = {}
    for axis, (name, shape) in enumerate(shapes.items()):
        parts = [torch.randn(shape, dtype=torch.bfloat16) for _ in range(layers)]
        coding[name] = _encode(parts, width, axis, repeats, density=0.01)
    model = found[0]["model_bytes"]
    rows = [{key: row[key] / model for key in ("copies", "delta", "keyframe")} for row in found]
    sent = found[0]["rank_bytes"]
    return {
        "model_bytes": model,
        "version_bytes": found[0]["version_bytes"],
        "memory": max(row["copies"] + row["delta"] for row in rows),
        "keyframe": max(row["keyframe"] for row in rows),
        "ranks": rows,
        "seconds": max(row["seconds"] for row in found),
        "balance": max(sent) * len(sent) / max(1, sum(sent)),
        "encode": coding,
    }


class _Held(MappingSource):
    """What the second of several ranks holds of square matrices: some of the rows (axis 0) or columns (1) of each."""

    def __init__(self, parts: Mapping[str, Tensor], width: int, axis: int) -> None:
        super().__init__(parts)
        self._parts = parts
        self._whole = tuple(ParamMeta(name, part.dtype, (width, width)) for name, part in parts.items())
        size = next(iter(parts.values())).shape[axis]
        start = (size, 0) if axis == 0 else (0, size)
        self._block = Block(start, (2 * size, width) if axis == 0 else (width, 2 * size))

    def params(self) -> tuple[ParamMeta, ...]:
        return self._whole

    def shards(self) -> Iterator[Shard]:
        for meta in self._whole:
            yield Shard(meta, self._block, partial(self._parts.__getitem__, meta.name))


def _encode(tensors: list[Tensor], width: int, axis: int, repeats: int, density: float) -> float:
    parts = {f"{number}.weight": tensor for number, tensor in enumerate(tensors)}
    held, own, codec = _Held(parts, width, axis), OwnBlocks(), ulp()
    own.keep(held, {})
    own.seed(held)
    table = ParamTable.of(ParamMeta.of(*pair) for pair in parts.items())
    copies = FlatCopies(table, pinned=False)
    for tensor, copy in zip(tensors, copies.parts[0], strict=True):
        copy.copy_(tensor)
    placed = [(0, segment, tensor) for segment, tensor in enumerate(tensors)]

    def sharded() -> None:
        own.encode(held, codec, "rank00001", lambda name, data: None)

    def unsharded() -> None:
        coded = partial(code, table, codec)
        blocks = find(table, copies.bits, placed, coded, threads=worker_threads(), follow=True)
        deque(BlockFiles(table).laid(blocks), maxlen=0)

    taken: dict[Callable[[], None], list[float]] = {sharded: [], unsharded: []}
    for turn in range(repeats + 1):
        for tensor in tensors:
            flat = tensor.view(-1).view(torch.int16)
            flat[torch.randint(flat.numel(), (int(density * flat.numel()),))] += 1
        for way in (sharded, unsharded) if turn % 2 else (unsharded, sharded):
            spent = seconds(way)
            taken[way] += [spent] if turn else []  # the first one compiles
    return min(taken[sharded]) / min(taken[unsharded])


def _work(ranks: int, layers: int, width: int, versions: int, density: float, root: str, rank: int) -> dict[str, Any]:
    """Run one rank: shard a model, send it, and return what that took."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    longest = datetime.timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=ranks, timeout=longest)
    torch.set_num_threads(1)

    def sharded(count: int, size: int) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(size, size, bias=False, dtype=torch.bfloat16) for _ in range(count)))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        return model

    def train(model: nn.Module, version: int) -> None:
        torch.manual_seed(version * ranks + rank)
        for parameter in model.parameters():
            local = parameter.to_local().detach()  # type: ignore[attr-defined]
            flat = local.view(-1)
            flat[torch.randint(flat.numel(), (int(density * flat.numel()),))] *= 1.01  # and next to no memory

    def sent(model: nn.Module, sender: WeightSender, version: int) -> tuple[float, SyncReport]:
        train(model, version)
        dist.barrier()
        began = time.perf_counter()
        report = sender.update_weights(model)
        return time.perf_counter() - began, report

    first = WeightSender(DeltaTransport(f"{root}/first", by_shard=True, timeout_s=_TIMEOUT_S))
    small = sharded(2, 64)
    for version in range(3):  # compiled loops and what gloo keeps are no part of the model
        sent(small, first, version)
    model = sharded(layers, width)
    own = sum(parameter.numel() * 2 for parameter in model.parameters())
    transport = DeltaTransport(
        f"{root}/updates", by_shard=True, keyframe_every=0, shard_bytes=max(1, own // 32), timeout_s=_TIMEOUT_S
    )
    sender = WeightSender(transport)
    with track_peak() as keyframe:
        sent(model, sender, 0)
    taken = []
    with track_peak() as delta:
        for version in range(1, versions + 1):
            spent, report = sent(model, sender, version)
            taken.append(spent)
    dist.barrier()
    return {
        "copies": transport.baseline_bytes,
        "delta": max([0, *delta]),
        "keyframe": max([0, *keyframe]),
        "seconds": min(taken),
        "rank_bytes": list(report.rank_bytes),
        "model_bytes": report.model_bytes,
        "version_bytes": report.bytes,
    }
