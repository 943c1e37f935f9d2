"""The processes of ``tests.bench.sharded``: trainer ranks, which share a model by FSDP2, and synthetic workers.

Run as ``python -m tests.bench.sharded_ends SEAT ...``, where SEAT is the JSON of a `Seat`. Each seat is a
process, which writes what it found into a file of the folder in which all meet.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchrl_ext.bench.data import Shapes, model_shapes
from torchrl_ext.bench.runner import track_peak
from torchrl_ext.deadline import Deadline
from torchrl_ext.landing.sliced import Sliced
from torchrl_ext.registry import engines, transports
from torchrl_ext.sync.sender import WeightSender
from torchrl_ext.transports.base import Worker
from torchrl_ext.transports.group.meeting import STANDALONE_GROUP
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.digests import block_words
from torchrl_ext.weights.shards.blocks import Block

ENDED = "ended"
"""A file that is there once all have ended well."""
TIMEOUT_S = 120.0
WORKERS = 2
"""Tensor-parallel workers of an engine."""

MODELS: dict[str, Shapes] = {"full": model_shapes(6, 1024, 4096), "small": model_shapes(2, 256, 1024)}
"""Shapes in float32: 340 MB, and 9 MB."""

_HOST = "127.0.0.1"
_TOGETHER: dict[str, Any] = {}
"""By case, the barrier of its processes: a worker that leaves ends the group of the others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One constellation, and what is done with it.

    Attributes:
        name: of the files with what was found.
        ranks: of the trainer; those of the others sit out.
        engines: equal ones.
        ways: names of the transports, which take turns.
        repeats: counted updates by each way; one more, the first, is not counted.
        ports: where the members of each way meet.
    """

    name: str
    ranks: int
    engines: int = 1
    ways: tuple[str, ...] = ("sharded",)
    repeats: int = 1
    ports: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seat:
    """What a process has to know.

    Attributes:
        worker: whether it is the process of workers; else it is a trainer rank.
        number: which one.
        folder: where all meet, readable for nobody else.
        model: of `MODELS`, or the directory of a checkpoint for a running engine.
        cases: done one after the other, without an engine.
        bucket_bytes: of every transport.
        engine, url: kind and address of a running engine, which takes updates in turns.
        ranks, turns, repeats: with an engine: of the trainer; how often each transport connects; counted updates each
            time.
    """

    worker: bool = False
    number: int
    folder: str
    model: str
    cases: tuple[Case, ...] = ()
    bucket_bytes: int
    engine: str = ""
    url: str = ""
    ranks: int = 0
    turns: int = 0
    repeats: int = 0

    @classmethod
    def from_json(cls, text: str) -> Seat:
        """Return the seat that `to_json` wrote."""
        told = json.loads(text)
        return cls(**{**told, "cases": tuple(Case(**one) for one in told["cases"])})

    def to_json(self) -> str:
        """Return it as a line."""
        return json.dumps(dataclasses.asdict(self))

    def put(self, name: str, found: Any) -> None:
        """Write what was found."""
        kind = "worker" if self.worker else "rank"
        Path(self.folder, f"{name}.{kind}{self.number}.json").write_text(json.dumps(found))

    def meet(self, name: str, ranks: int) -> None:
        """Join the process group of the trainer."""
        store = dist.FileStore(f"{self.folder}/{name}.store", ranks)  # type: ignore[attr-defined]  # not in the stub
        wait = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group("gloo", store=store, rank=self.number, world_size=ranks, timeout=wait)


def main() -> int:
    """Have the seats that the command line gives taken, each by a fork: what all import is imported once."""
    seats = [Seat.from_json(text) for text in sys.argv[1:]]
    torch.set_num_threads(1)  # and no thread is left in a fork
    from torch.distributed import fsdp  # noqa: F401 - for the trainer

    block_words(ParamMeta("", torch.float32, (1,)), Block((0,), (1,)), torch.zeros(1))  # loads what is compiled
    for way in ("collective", "sharded"):
        transports.load(way)
    forks = multiprocessing.get_context("fork")
    _TOGETHER.update({case.name: forks.Barrier(case.ranks + WORKERS, timeout=TIMEOUT_S) for case in seats[0].cases})
    children = {_forked(seat) for seat in seats}
    try:
        while children:
            pid, status = os.wait()
            children.discard(pid)
            if status:
                return 1
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
    Path(seats[0].folder, ENDED).touch()
    return 0


def _forked(seat: Seat) -> int:
    """Take a seat in a process of its own, and return its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        _take_seat(seat)
    except BaseException:  # noqa: BLE001 - for the log
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _take_seat(seat: Seat) -> None:
    if seat.engine:
        _drive(seat)
    for case in seat.cases:
        if seat.worker:
            _follow(seat, case)
        elif seat.number < case.ranks:
            _send(seat, case)


# the trainer


def _send(seat: Seat, case: Case) -> None:
    """Be a trainer rank of a case."""
    seat.meet(case.name, case.ranks)
    model = _policy(MODELS[seat.model])
    found: dict[str, Any] = {"seconds": {way: [] for way in case.ways}, "cpu_s": {way: [] for way in case.ways}}
    senders = {way: _sender(seat, case, way, case.ports[way]) for way in case.ways}
    for way in _order(case):
        sender = senders[way]
        sender.register_model(model)
        _step(model)
        dist.barrier()
        began, cpu_s = time.perf_counter(), time.process_time()
        report = sender.update_weights()
        found["seconds"][way].append(time.perf_counter() - began)
        found["cpu_s"][way].append(time.process_time() - cpu_s)
        if way == "sharded":
            found["report"] = report.to_json()
    _TOGETHER[case.name].wait()
    for sender in senders.values():
        sender.shutdown()
    del senders, sender
    fresh = _sender(seat, case, "sharded", case.ports["memory"])
    fresh.register_model(model)
    dist.barrier()
    with track_peak() as extra:
        fresh.update_weights()
    found["extra_bytes"] = extra
    _TOGETHER[case.name].wait()
    fresh.shutdown()
    seat.put(case.name, found)
    dist.destroy_process_group()


def _sender(seat: Seat, case: Case, way: str, port: int) -> WeightSender:
    size = case.engines * WORKERS
    count = {"workers": size} if way == "sharded" else {"rank": 0, "world_size": 1 + size}
    made = transports.make(
        way, master_address=_HOST, master_port=port, bucket_bytes=seat.bucket_bytes, timeout_s=TIMEOUT_S, **count
    )
    return WeightSender(made, rank=seat.number)


def _policy(shapes: Shapes) -> nn.Module:
    """Return a module with parameters of these shapes, float32, each layer sharded by FSDP2."""
    from torch.distributed.fsdp import fully_shard

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


@torch.no_grad()
def _step(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.add_(1e-3)


def _order(case: Case) -> list[str]:
    """Return which way sends in each update; every round begins with another one."""
    ways, found = list(case.ways), list[str]()
    for turn in range(case.repeats + 1):
        start = turn % len(ways)
        found += ways[start:] + ways[:start]
    return found


def _drive(seat: Seat) -> None:
    """Be a trainer rank that sends one checkpoint to a running engine, by both transports in turns."""
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    seat.meet("engine", seat.ranks)
    model: Any = AutoModelForCausalLM.from_pretrained(seat.model, dtype="auto", local_files_only=True)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    rows: list[dict[str, Any]] = []
    senders = {way: _engine_sender(seat, way) for way in ("collective", "sharded")}
    for turn in range(seat.turns):
        for way in list(senders)[:: -1 if turn % 2 else 1]:
            sender = senders[way]
            sender.register_model(model)
            if turn and seat.number == 0:
                sender._connect_to(engines.make(seat.engine, url=seat.url))  # its workers follow the other one
            for update in range(1 + seat.repeats):
                _step(model)
                dist.barrier()
                began, cpu_s = time.perf_counter(), time.process_time()
                report = sender.update_weights()
                taken = {"s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_s}
                rows.append({"way": way, "turn": turn, "counted": update > 0, **taken, "report": report.to_json()})
    seat.put("engine", rows)
    dist.barrier()
    for sender in senders.values():
        sender.shutdown()
    dist.destroy_process_group()


def _engine_sender(seat: Seat, way: str) -> WeightSender:
    client = engines.make(seat.engine, url=seat.url) if seat.number == 0 else None
    made = transports.make(way, bucket_bytes=seat.bucket_bytes, timeout_s=TIMEOUT_S)
    return WeightSender(made, client, rank=seat.number)


# workers


def _follow(seat: Seat, case: Case) -> None:
    """Be a worker of a case, or one of each of its engines."""
    own = range(seat.number, case.engines * WORKERS, WORKERS)
    with ThreadPoolExecutor(len(own)) as pool:
        together = threading.Barrier(len(own), _TOGETHER[case.name].wait, TIMEOUT_S)
        found = list(pool.map(lambda worker: _Worker(seat, case, worker, together).run(), own))
    seat.put(case.name, found)


class _Worker:
    """A worker of an engine: it holds rows of even tensors, columns of odd ones, and vectors whole.

    Args:
        seat, case: of its process.
        worker: its number among those of all engines.
        together: waits for all other workers and for the trainer, since one that leaves ends the group.
    """

    def __init__(self, seat: Seat, case: Case, worker: int, together: threading.Barrier) -> None:
        self._seat, self._case, self._worker, self._together = seat, case, worker, together
        self._metas = {meta.name: meta for meta in _metas(MODELS[seat.model])}
        self._blocks = _blocks(self._metas.values(), worker % WORKERS)
        self._live = {name: torch.ones(block.shape) for name, block in self._blocks.items()}

    def run(self) -> dict[str, Any]:
        """Take every update; return what they took."""
        case, received = self._case, []
        ends: dict[str, Any] = {}
        for way in _order(case):
            if way not in ends:  # the trainer forms a group in its first update
                ends[way] = self._join(way, case.ports[way])
            cpu_s = time.process_time()
            self._take(way, ends[way])
            received.append({"way": way, "cpu_s": time.process_time() - cpu_s})
        self._together.wait()
        for end in ends.values():
            end.close()
        del ends, end
        gc.collect()
        fresh = self._join("sharded", case.ports["memory"])
        with track_peak() as extra:
            self._take("sharded", fresh)
        self._together.wait()
        fresh.close()
        return {"received": received, "extra_bytes": extra}

    def _join(self, way: str, port: int) -> Any:
        case = self._case
        size = case.engines * WORKERS
        offer: dict[str, Any] = {
            "master_address": _HOST,
            "master_port": port,
            "secret": "",
            "room": STANDALONE_GROUP,
            "members": size + (case.ranks if way == "sharded" else 1),
            "backend": "gloo",
            "timeout_s": TIMEOUT_S,
        }
        if way == "sharded":
            offer |= {"carrier": "group", "bucket_bytes": self._seat.bucket_bytes}
        slices = {name: (block,) for name, block in self._blocks.items()}
        here = Worker(rank=1 + self._worker, params=tuple(self._metas.values()), slices=slices)
        return transports.load(way).join(offer, here, Deadline(TIMEOUT_S, "the trainer"))

    @torch.no_grad()
    def _take(self, way: str, end: Any) -> None:
        within = Deadline(TIMEOUT_S, "the trainer")
        arrival = end.get(within)
        if arrival is None:
            raise within.error("nothing was sent")
        if way == "sharded":
            into = {
                name: Sliced.of(self._metas[name], [(self._blocks[name], part)]) for name, part in self._live.items()
            }
            for _ in end.receive(arrival, into, within):
                pass
            return
        for name, tensor in end.receive(arrival, {}, within):  # whole, and cut as an engine's loader does
            self._live[name].copy_(tensor[self._blocks[name].within(Block.whole(tensor.shape))])


def _metas(shapes: Shapes) -> list[ParamMeta]:
    """Return the parameters of `_policy`, in its order: a module's own come before those of its parts."""
    paths = sorted(((_path(name), shape) for name, shape in shapes.items()), key=lambda one: len(one[0]))
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


if __name__ == "__main__":
    sys.exit(main())
