"""``python -m tests.bench sharded``: bytes, memory and time of an update from shard to shard, beside a broadcast.

Trainer ranks share a model by FSDP2, and engines have two tensor-parallel workers. All are processes on this machine,
over gloo. The ranks send to synthetic workers, or with ``--engine`` to a running vLLM or SGLang.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.bench.frame import say, together
from torchrl_ext.bench.data import Shapes, model_shapes
from torchrl_ext.bench.runner import ratio, rounds, track_peak
from torchrl_ext.deadline import Deadline
from torchrl_ext.landing.sliced import Sliced
from torchrl_ext.registry import engines, transports
from torchrl_ext.serving.processes import free_port
from torchrl_ext.serving.server import start
from torchrl_ext.sync.sender import WeightSender
from torchrl_ext.testing.tiny import make_tiny_lm
from torchrl_ext.transports.base import Worker
from torchrl_ext.transports.group.meeting import STANDALONE_GROUP
from torchrl_ext.transports.sharded.transport import BUCKET_BYTES
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.shards.blocks import Block

TIMEOUT_S = 120.0
WORKERS = 2
"""Tensor-parallel workers of an engine."""
MODELS: dict[str, Shapes] = {"full": model_shapes(6, 1024, 4096), "small": model_shapes(2, 256, 1024)}
"""Shapes in float32: 340 MB, and 9 MB."""

_HOST = "127.0.0.1"
_LM = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


def measure(
    *,
    repeats: int = 7,
    size: Literal["full", "small"] = "full",
    bucket_bytes: int = BUCKET_BYTES,
    engine: Literal["vllm", "sglang"] | None = None,
    python: str | None = None,
    ranks: int = 2,
    layers: int = 2,
    dtype: Literal["bfloat16", "float32"] = "float32",
    turns: int = 4,
) -> dict[str, Any]:
    """Run every comparison between processes of the benchmark (--size), or with --engine one with a real engine.

    The engine comes from --python. It serves --layers layers of 45 M parameters, and follows --ranks trainer ranks,
    which connect each transport --turns times.
    """
    found: dict[str, Any] = {"bucket_bytes": bucket_bytes, "repeats": repeats, "torch": torch.__version__}
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-") as folder:
        if engine is None:
            return found | _synthetic(size, bucket_bytes, repeats, folder)
        say("making a checkpoint")
        model = make_tiny_lm(Path(folder, "model"), dtype=getattr(torch, dtype), num_hidden_layers=layers, **_LM)
        say(f"starting {engine}")
        settings = {"dtype": dtype, "tensor_parallel_size": WORKERS, "max_model_len": 256, "python": python}
        with start(engines.part(engine, "server")(model, **settings)) as server:
            say("both transports in turns")
            drive = partial(_drive, ranks, f"{folder}/store", str(model), engine, server.url, bucket_bytes)
            return found | _with_engine(together(partial(drive, turns, repeats), ranks)) | {"engine": engine}


def _synthetic(model: str, bucket_bytes: int, repeats: int, folder: str) -> dict[str, Any]:
    own = needed_bytes(model)
    found: dict[str, Any] = {"size": model, "needed_bytes": own}
    for name, ranks, count, ways, turns in (
        ("fsdp4", 4, 1, ("sharded",), 1),
        ("fsdp2", 2, 1, ("collective", "sharded"), repeats),
        ("replicas", 2, 4, ("sharded",), 1),
    ):
        say(f"{ranks} trainer ranks, and the workers of {count} engine(s)")
        case = Case(
            model=model,
            ranks=ranks,
            engines=count,
            ways=ways,
            repeats=turns,
            bucket_bytes=bucket_bytes,
            ports={way: free_port() for way in (*ways, "memory")},
            store=f"{folder}/{name}",
        )
        rows = together(partial(_take_part, case), ranks + count * WORKERS)
        report, seconds = rows[0]["report"], rows[0]["seconds"]
        found["model_bytes"] = report["model_bytes"]
        found[name] = {
            "rank_bytes": report["rank_bytes"],
            "worker_bytes": report["worker_bytes"],
            "balance": max(report["rank_bytes"]) * ranks / sum(report["rank_bytes"]),
            "received": max(got / own[at % WORKERS] for at, got in enumerate(report["worker_bytes"])),
            "rank_extra": [row["extra_bytes"] for row in rows[:ranks]],
            "worker_extra": [row["extra_bytes"] for row in rows[ranks:]],
        }
        if len(ways) > 1:
            found[name] |= _compared(seconds) | {"cpu_s": [row["cpu_s"] for row in rows[:ranks]]}
    found["replicas"]["sent"] = sum(found["replicas"]["rank_bytes"]) / sum(found["fsdp2"]["rank_bytes"])
    return found


def _compared(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Compare the rounds of both ways: above 1 the sharded one is faster."""
    return {"seconds": seconds, "sharded / collective": ratio(seconds["sharded"], seconds["collective"])}


# between processes of the benchmark


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The trainer ranks and the workers that exchange updates.

    Attributes:
        model: of `MODELS`.
        ranks: of the trainer.
        engines: equal ones.
        ways: names of the transports, which take turns.
        repeats: counted updates by each way; one more, the first, is not counted.
        bucket_bytes: of every transport.
        ports: where the members of each way meet; ``memory`` for the last update, whose memory is measured.
        store: file where the trainer ranks meet.
    """

    model: str
    ranks: int
    engines: int
    ways: tuple[str, ...]
    repeats: int
    bucket_bytes: int
    ports: Mapping[str, int]
    store: str


def _take_part(case: Case, number: int) -> dict[str, Any]:
    """Run one of the processes: the trainer ranks come first, then the workers."""
    torch.set_num_threads(1)
    return _send(case, number) if number < case.ranks else _follow(case, number - case.ranks)


def _send(case: Case, rank: int) -> dict[str, Any]:
    """Run one trainer rank; return what its updates took."""
    _meet(case.store, rank, case.ranks)
    model = _policy(MODELS[case.model])
    senders = {way: _sender(case, way, case.ports[way], rank) for way in case.ways}
    found: dict[str, Any] = {"cpu_s": {way: [] for way in case.ways}}

    def update(way: str) -> float:
        senders[way].register_model(model)
        taken, cpu_s, report = _update(senders[way], model)
        found["cpu_s"][way].append(cpu_s)
        found["report"] = report.to_json()  # the transport from shard to shard comes last
        return taken

    found["seconds"] = rounds({way: partial(update, way) for way in case.ways}, case.repeats)
    fresh = _sender(case, "sharded", case.ports["memory"], rank)
    fresh.register_model(model)
    dist.barrier()
    with track_peak() as extra:
        found["report"] = fresh.update_weights().to_json()
    _OPEN.extend((fresh, *senders.values()))
    return found | {"extra_bytes": extra}


_OPEN: list[Any] = []
"""Ends that stay open: a member that leaves would end the group of the others, who may not be done."""


def _meet(store: str, rank: int, ranks: int) -> None:
    wait = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=wait)


def _sender(case: Case, way: str, port: int, rank: int) -> WeightSender:
    size = case.engines * WORKERS
    count = {"workers": size} if way == "sharded" else {"rank": 0, "world_size": 1 + size}
    made = transports.make(
        way, master_address=_HOST, master_port=port, bucket_bytes=case.bucket_bytes, timeout_s=TIMEOUT_S, **count
    )
    return WeightSender(made, rank=rank)


@torch.no_grad()
def _update(sender: WeightSender, model: nn.Module) -> tuple[float, float, Any]:
    """Change the model everywhere and send it; return the seconds, those of this processor's time, and the report."""
    for parameter in model.parameters():
        parameter.add_(1e-3)
    dist.barrier()
    began, cpu_s = time.perf_counter(), time.process_time()
    report = sender.update_weights()
    return time.perf_counter() - began, time.process_time() - cpu_s, report


def _policy(shapes: Shapes) -> nn.Module:
    """Return a module with parameters of these shapes, float32, each layer sharded by FSDP2."""
    torch.manual_seed(0)
    model, layers = nn.Module(), nn.ModuleDict()
    for name, shape in shapes.items():
        *within, own = _path(name)
        if within and within[-1] not in layers:
            layers[within[-1]] = nn.Module()
        (layers[within[-1]] if within else model).register_parameter(own, nn.Parameter(torch.randn(shape)))
    model.add_module("layers", layers)
    for layer in layers.values():
        fully_shard(layer)
    fully_shard(model)
    return model


def _follow(case: Case, worker: int) -> dict[str, Any]:
    """Run one worker: it holds rows of even tensors, columns of odd ones, and vectors whole."""
    metas = {meta.name: meta for meta in _metas(MODELS[case.model])}
    blocks = _blocks(metas.values(), worker % WORKERS)
    live = {name: torch.ones(block.shape) for name, block in blocks.items()}
    here = Worker(rank=1 + worker, params=tuple(metas.values()), slices={name: (own,) for name, own in blocks.items()})
    into = {name: Sliced.of(metas[name], [(blocks[name], part)]) for name, part in live.items()}
    ends: dict[str, Any] = {}

    def join(way: str, port: int) -> Any:
        offer: dict[str, Any] = {
            "master_address": _HOST,
            "master_port": port,
            "secret": "",
            "room": STANDALONE_GROUP,
            "members": case.engines * WORKERS + (case.ranks if way == "sharded" else 1),
            "backend": "gloo",
            "timeout_s": TIMEOUT_S,
        }
        return transports.load(way).join(offer, here, Deadline(TIMEOUT_S, "the trainer"))

    def take(way: str, end: Any) -> None:
        within = Deadline(TIMEOUT_S, "the trainer")
        arrival = end.get(within)
        if arrival is None:
            raise within.error("nothing was sent")
        for name, tensor in end.receive(arrival, into if way == "sharded" else {}, within):
            if way != "sharded":  # whole, and cut as an engine's loader does
                live[name].copy_(tensor[blocks[name].within(Block.whole(tensor.shape))])

    def update(way: str) -> float:
        if way not in ends:  # the trainer forms a group in its first update
            ends[way] = join(way, case.ports[way])
        take(way, ends[way])
        return 0.0

    rounds({way: partial(update, way) for way in case.ways}, case.repeats)
    fresh = join("sharded", case.ports["memory"])
    with track_peak() as extra:
        take("sharded", fresh)
    _OPEN.extend((fresh, *ends.values()))
    return {"extra_bytes": extra}


def _metas(shapes: Shapes) -> list[ParamMeta]:
    """Return the parameters of `_policy`, in its order: a module's own come before those of its parts."""
    paths = sorted(((_path(name), shape) for name, shape in shapes.items()), key=lambda row: len(row[0]))
    return [ParamMeta(".".join(path), torch.float32, shape) for path, shape in paths]


def _path(name: str) -> list[str]:
    """Return the modules and the parameter that hold a tensor of a checkpoint in `_policy`."""
    within = ["layers", name.split(".")[2]] if ".layers." in name else []
    return [*within, name.replace(".", "_")]


def _blocks(metas: Iterable[ParamMeta], worker: int) -> dict[str, Block]:
    """Return what one of `WORKERS` workers holds of each tensor."""
    found = {}
    for number, meta in enumerate(metas):
        start, stop = [0] * len(meta.shape), list(meta.shape)
        if len(stop) > 1:
            axis = number % 2
            start[axis], stop[axis] = (stop[axis] * edge // WORKERS for edge in (worker, worker + 1))
        found[meta.name] = Block(tuple(start), tuple(stop))
    return found


def needed_bytes(model: str) -> list[int]:
    """Return the bytes that each worker of an engine holds of a model of `MODELS`."""
    blocks = (_blocks(_metas(MODELS[model]), worker) for worker in range(WORKERS))
    return [sum(block.numel * 4 for block in own.values()) for own in blocks]


# with an engine


def _drive(
    ranks: int,
    store: str,
    checkpoint: str,
    kind: str,
    url: str,
    bucket_bytes: int,
    turns: int,
    repeats: int,
    rank: int,
) -> list[dict[str, Any]]:
    """Run one trainer rank, which sends a checkpoint to a running engine by both transports in turns."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    _meet(store, rank, ranks)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto", local_files_only=True)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    connect: Callable[[], Any] = partial(engines.make, kind, url=url)
    rows: list[dict[str, Any]] = []
    senders = {}
    for way in ("collective", "sharded"):
        made = transports.make(way, bucket_bytes=bucket_bytes, timeout_s=TIMEOUT_S)
        senders[way] = WeightSender(made, connect() if rank == 0 else None, rank=rank)
    for turn in range(turns):
        for way in list(senders)[:: -1 if turn % 2 else 1]:
            sender = senders[way]
            sender.register_model(model)
            if turn and rank == 0:
                sender._connect_to(connect())  # its workers follow the other one
            for update in range(1 + repeats):
                _, cpu_s, report = _update(sender, model)
                rows += [{"way": way, "cpu_s": cpu_s, "report": report.to_json()}] if update else []
    dist.barrier()
    for sender in senders.values():
        sender.shutdown()
    return rows


def _with_engine(ranks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the figures of the rows of each rank."""
    ways = {way: [row for row in ranks[0] if row["way"] == way] for way in ("collective", "sharded")}
    spans = {
        way: {name: [row["report"]["spans"][name] for row in own] for name in ("total", "pause", "transfer")}
        for way, own in ways.items()
    }
    last = ways["sharded"][-1]["report"]
    return {
        "ranks": len(ranks),
        **{name: last[name] for name in ("model_bytes", "rank_bytes", "worker_bytes", "whole")},
        "proof": {way: own[-1]["report"]["proof"] for way, own in ways.items()},
        "cpu_s": {way: [median(row["cpu_s"] for row in one if row["way"] == way) for one in ranks] for way in ways},
        "spans": spans,
        **_compared({way: taken["total"] for way, taken in spans.items()}),
        "pause": ratio(spans["sharded"]["pause"], spans["collective"]["pause"]),
    }
