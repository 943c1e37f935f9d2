"""What ``torchrl-ext bench`` measures: transports and encodings, each beside a reference in the same run.

Transports are measured between two processes of this machine. The reference of the collective (gloo) is one broadcast
of a flat tensor with all the bytes; that of a publication is `safetensors.torch.save_file` and an fsync. References of
encodings are a plain copy of the same bytes, xor in zstd with a checksum of every tensor (what others publish), and
int32 + bf16 (what most others send).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
import zstandard
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, spawn

from torchrl_ext.base.errors import TransportError
from torchrl_ext.base.registry import encodings
from torchrl_ext.base.types import Info, ParamMeta
from torchrl_ext.control.serving.processes import free_port
from torchrl_ext.data.deltas.streams import find, worker_threads
from torchrl_ext.data.deltas.table import ParamTable, units
from torchrl_ext.data.transports.collective import VLLMCollectiveTransport
from torchrl_ext.data.transports.delta import DeltaTransport
from torchrl_ext.data.transports.disk import DiskTransport
from torchrl_ext.data.versions.owned import FlatCopies
from torchrl_ext.data.versions.payloads import DeltaFiles

__all__ = [
    "OTHERS", "OURS", "REFERENCES", "SIZES", "changes", "compare", "figures", "measure_encodings", "measure_transports",
    "model_shapes", "ratio", "rounds", "seconds", "synthetic_pair",
]  # fmt: skip

Shapes = dict[str, tuple[int, ...]]
Pair = list[tuple[str, Tensor, Tensor]]
"""``(name, old, new)`` of every tensor of a model."""
Layout = tuple[Callable[[str, Tensor, Tensor], Any], Callable[[list[Any]], int]]
"""What is done with each tensor (its name, before, after), and the bytes of all results."""

OURS = ("ulp", "context")
"""Encodings of ours that are measured."""
REFERENCES = {"collective": "broadcast", "disk": "save_file"}
"""Each transport, and the way that it is compared with."""
_TIMEOUT_S = 120.0
_POOLED = 1 << 16  # elements of a tensor on average, from which threads pay off for layouts that code tensor by tensor


# times


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def rounds(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each way in each round.

    One round before them is not counted. Every round starts with another way.
    """
    names = list(ways)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            spent = seconds(ways[name])
            if turn:
                taken[name].append(spent)
    return taken


def ratio(fast_s: Sequence[float], slow_s: Sequence[float]) -> dict[str, float]:
    """Compare two ways round by round, as other jobs of the machine weigh on both sides of a round alike.

    Returns:
        Median, lowest and highest ratio of the rounds; above 1 the first way is faster.
    """
    return _spread([slow / fast for fast, slow in zip(fast_s, slow_s, strict=True)])


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "low": min(values), "high": max(values)}


def figures(results: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield each figure of nested results with its path; several numbers show as their median and range."""
    if isinstance(results, list) and results and all(isinstance(each, float) for each in results):
        results = _spread(results)
    if isinstance(results, Mapping) and results.keys() == {"median", "low", "high"}:
        yield name, "{median:.4g} ({low:.4g} to {high:.4g})".format(**results)
    elif isinstance(results, (Mapping, list)):
        for key, value in results.items() if isinstance(results, Mapping) else enumerate(results):
            yield from figures(value, f"{name}: {key}" if name else str(key))
    else:
        yield name, f"{results:.4g}" if isinstance(results, float) else str(results)


# models


def model_shapes(layers: int, hidden: int, vocab: int) -> Shapes:
    """Return the shapes of an untied Qwen3-like decoder; 28, 1024 and 32,000 make 311 tensors and 418 M elements."""
    key, inner, head = hidden // 2, 3 * hidden, 128
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (hidden, hidden),
            f"{at}.self_attn.k_proj.weight": (key, hidden),
            f"{at}.self_attn.v_proj.weight": (key, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, hidden),
            f"{at}.self_attn.q_norm.weight": (head,),
            f"{at}.self_attn.k_norm.weight": (head,),
            f"{at}.mlp.gate_proj.weight": (inner, hidden),
            f"{at}.mlp.up_proj.weight": (inner, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, inner),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


SIZES = {
    "full": model_shapes(28, 1024, 32_000),
    "small": model_shapes(4, 256, 2000),
    "tiny": model_shapes(1, 64, 512),
}


def synthetic_pair(shapes: Shapes, density: float) -> Pair:
    """Return bfloat16 weights of std 0.02, before and after a uniform step whose size changes ``density`` of them.

    Args:
        shapes: of the tensors.
        density: share of elements that change, 0 to 1; above 0.995 as for 0.995, since some steps are always too small.
    """
    generator = torch.Generator().manual_seed(int(density * 1e6))
    step, pair = _step_for(min(0.995, density)), []
    for name, shape in shapes.items():
        master = torch.empty(shape).normal_(0, 0.02, generator=generator)
        change = torch.empty(shape).uniform_(-step, step, generator=generator)
        pair.append((name, master.to(torch.bfloat16), (master + change).to(torch.bfloat16)))
    return pair


def _step_for(density: float) -> float:
    """Find the size of a uniform step that changes ``density`` of normal weights of std 0.02, by bisection."""
    generator = torch.Generator().manual_seed(1)
    master = torch.empty(1 << 20).normal_(0, 0.02, generator=generator)
    unit = torch.empty(1 << 20).uniform_(-1, 1, generator=generator)
    low, high = 0.0, 1.0
    for _ in range(40):
        step = (low + high) / 2
        changed = (master.to(torch.bfloat16) != (master + step * unit).to(torch.bfloat16)).float().mean()
        low, high = (step, high) if changed < density else (low, step)
    return high


# transports


def measure_transports(size: str, repeats: int) -> Info:
    """Compare every transport with its reference, on the shapes of a model.

    Args:
        size: of `SIZES`.
        repeats: rounds.

    Returns:
        JSON-safe: ``seconds`` and ``gb_per_s`` by way, and a ratio for each pair (above 1 the transport is faster).

    Raises:
        TransportError: a process failed, or the worker holds other weights than were sent.
    """
    shapes, total = SIZES[size], 2 * sum(map(math.prod, SIZES[size].values()))
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-") as root:
        try:
            spawn(_take_part, (shapes, repeats, (free_port(), free_port()), Path(root)), nprocs=2)
        except ProcessException as error:
            raise TransportError(f"a process of the measurement failed: {error}") from None
        taken = json.loads(Path(root, "taken.json").read_text())
    return {
        "size": size,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "tensors": len(shapes),
        "bytes": total,
        "seconds": taken,
        "gb_per_s": {way: total / median(spent) / 1e9 for way, spent in taken.items()},
        **{f"{way} / {other}": ratio(taken[way], taken[other]) for way, other in REFERENCES.items()},
    }


def _take_part(rank: int, shapes: Shapes, repeats: int, ports: tuple[int, int], root: Path) -> None:
    """Go through all ways: rank 0 holds ones, and sends them to rank 1, which holds zeros."""
    source, target = (
        {name: torch.full(shape, value, dtype=torch.bfloat16) for name, shape in shapes.items()} for value in (1, 0)
    )
    flat, waits = torch.cat([one.view(-1) for one in source.values()]).view(torch.uint8), timedelta(seconds=_TIMEOUT_S)
    gloo: Any = dist  # a group of its own: with a default group both processes would be ranks of one trainer
    group = gloo.ProcessGroupGloo(gloo.TCPStore("127.0.0.1", ports[0], 2, rank == 0, waits), rank, 2, waits)
    with VLLMCollectiveTransport("127.0.0.1", ports[1], rank, 2, "cpu", timeout_s=_TIMEOUT_S) as collective:
        collective.init_all_workers_group({})

        def move() -> None:
            if rank == 0:
                collective.send_weights("policy", source)
            elif collective.receive_weights(_TIMEOUT_S, weights=target) is None:
                raise TransportError(f"the trainer sent nothing within {_TIMEOUT_S:g} s")

        def together(way: Callable[[], object]) -> None:  # the worker sleeps until then: waiting takes a core
            group.barrier().wait()
            way()
            group.barrier().wait()

        def publish() -> None:
            shutil.rmtree(root / "disk", ignore_errors=True)
            with DiskTransport(root / "disk") as transport:
                transport.send_weights("policy", source)

        def save() -> None:
            save_file(source, root / "plain")
            with open(root / "plain", "rb+") as file:
                os.fsync(file.fileno())

        by_trainer: dict[str, Callable[[], object]] = {"disk": publish, "save_file": save}
        ways: dict[str, Callable[[], object]] = {
            "collective": partial(together, move),
            "broadcast": partial(together, lambda: group.broadcast(flat, 0).wait()),
            **(by_trainer if rank == 0 else dict.fromkeys(by_trainer, lambda: None)),
        }
        taken = rounds(ways, repeats)
    if rank == 0:
        (root / "taken.json").write_text(json.dumps(taken))
    elif not all(bool((tensor == 1).all()) for tensor in target.values()):
        raise TransportError("the worker process holds other weights than were sent")


# encodings


def measure_encodings(size: str, densities: Sequence[float], repeats: int) -> Info:
    """Return what `compare` finds, by density: shares of the elements that change, 0 to 1; ``size`` is of `SIZES`."""
    found: Info = {"size": size, "threads": worker_threads(), "torch": torch.__version__}
    return found | {f"{density:.1%}": compare(synthetic_pair(SIZES[size], density), repeats) for density in densities}


def changes(name: str, old: Tensor, new: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the flat places of what changed in a bfloat16 tensor, int32, and the new bits there."""
    before, after = units(old).reshape(-1), units(new).reshape(-1)
    where = np.flatnonzero(before != after)
    return where.astype(np.int32), after[where]


def _xor(name: str, old: Tensor, new: Tensor) -> bytes:
    """Return what others publish of a tensor: both versions' difference in zstd, and the checksum of the new one."""
    before, after = (units(tensor).reshape(-1).view(np.uint8) for tensor in (old, new))
    xxhash.xxh3_128_digest(after.data)
    return zstandard.ZstdCompressor(level=1).compress((before ^ after).data)


OTHERS: Mapping[str, Layout] = {
    "int32 + bf16": (changes, lambda found: sum(where.nbytes + values.nbytes for where, values in found)),
    "xor + zstd": (_xor, lambda found: sum(map(len, found))),
}


def compare(pair: Pair, repeats: int) -> Info:
    """Count the bytes of every layout with all framing, and time each way to find and code the changes, in turns.

    Every way has the same threads. Ours also sums a digest of every tensor; ``xor + zstd`` a checksum of every tensor.

    Args:
        pair: bfloat16.
        repeats: rounds.

    Returns:
        JSON-safe: ``bits_per_changed`` and ``bytes`` by layout; ``seconds`` by way, ``copy`` among them; ratios.
    """
    total = sum(new.numel() for _, _, new in pair)
    changed = sum(changes(*row)[0].size for row in pair)
    targets = {name: torch.zeros_like(new) for name, _, new in pair}  # touched, so that no page fault is timed
    olds = FlatCopies(ParamTable.of([ParamMeta.of(name, old) for name, old, _ in pair]), pinned=False)
    for (_, old, _), copy in zip(pair, olds.by_name().values(), strict=True):
        copy.copy_(old)

    def over(work: Callable[[str, Tensor, Tensor], Any]) -> list[Any]:
        if total < _POOLED * len(pair):  # a pool would take longer
            return list(itertools.starmap(work, pair))
        with ThreadPoolExecutor(worker_threads()) as pool:
            return list(pool.map(work, *zip(*pair, strict=True)))

    def theirs(layout: Layout) -> int:
        return layout[1](over(layout[0]))

    def ours(kind: str) -> int:
        rows = zip(*olds.table.place, (new for _, _, new in pair), strict=True)
        made = DeltaFiles(olds.table, encodings.make(kind))
        blocks = find(olds.table, olds.bits, rows, made.code, threads=worker_threads())
        return sum(len(data) for _, data in made.files(blocks))

    sizes = {name: theirs(layout) for name, layout in OTHERS.items()} | {kind: _published(pair, kind) for kind in OURS}
    ways: dict[str, Callable[[], object]] = {
        "copy": lambda: over(lambda name, _, new: np.copyto(units(targets[name]), units(new))),
        **{name: partial(theirs, layout) for name, layout in OTHERS.items()},
        **{kind: partial(ours, kind) for kind in OURS},
    }
    taken = rounds(ways, repeats)
    return {
        "parameters": total,
        "tensors": len(pair),
        "density": changed / total,
        "bytes": sizes,
        "bits_per_changed": {name: 8 * size / max(1, changed) for name, size in sizes.items()},
        "seconds": taken,
        "gb_per_s": {way: 2 * total / median(spent) / 1e9 for way, spent in taken.items()},
        **{f"ulp / {other}": ratio(taken["ulp"], taken[other]) for other in ("xor + zstd", "copy")},
    }


def _published(pair: Pair, encoding: str) -> int:
    """Return the bytes of a published delta's files, its manifest among them."""
    with tempfile.TemporaryDirectory() as root, DeltaTransport(root, encoding=encoding, keyframe_every=0) as transport:
        for side in (1, 2):
            transport.send_weights({row[0]: row[side] for row in pair})
        return sum(file.stat().st_size for file in Path(root, "weight_v000002").iterdir())
