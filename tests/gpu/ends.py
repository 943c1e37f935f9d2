"""A trainer and a worker, each a process of its own on one device: ``main ROLE ROADS``, JSON of `Road`.

For every number that the trainer reads it sends a version; the worker says of each version whether it has every bit of
it, which it can tell because both make weights from the same seeds. Both say so in JSON, a line each.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

import torchrl_ext as tx
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import WeightSyncError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.transports.base import Arrival, Update, Worker
from torchrl_ext.data.transports.native import NAME, NativeTransport, layout_of
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.data.weights.source import MappingSource

WAIT_S = 300
FILES = ("delta", "disk")
GROUPS = ("collective", "broadcast", "sglang", "vllm", "sharded")
MEETING = (*GROUPS, "ipc")  # at a port
"""Roads on which both ends meet in a group, at a port; `sglang` and `vllm` are the wires of stock engines."""
DEVICE_VARIABLE = "TORCHRL_EXT_TEST_DEVICE"
"""The device of both ends: ``cuda``, ``lag`` or ``cpu``; by default CUDA's, if there is one."""
BUCKET_BYTES = 256 << 20
_MIB_ROWS, _COLUMNS = 128, 4096  # of bfloat16
_DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
    torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64,
)  # fmt: skip
_ROOM = 1024  # bytes for a small tensor
_kept = ExitStack()


@dataclass(frozen=True, kw_only=True)
class Road:
    """Versions that a trainer sends to a worker by one transport.

    Attributes:
        transport: `ipc`, or one of `FILES` or `GROUPS`.
        place: the directory or the port where the ends meet.
        mib: size of the model in MiB; 0 takes `small` tensors of every dtype, strided and empty ones among them.
        small: how many they are.
        versions: how many are sent.
        aside: each end works on a stream of its own, and the trainer's weights are late.
        graph: the worker replays a CUDA graph that it captured over its parameters.
        dies: the end that kills itself in the middle of the last version, with SIGKILL; the other one reports it.
        timeout_s: deadline of every wait.
    """

    transport: str
    place: str = ""
    mib: int = 0
    small: int = 2000
    versions: int = 3
    aside: bool = False
    graph: bool = False
    dies: str = ""
    timeout_s: float = WAIT_S


@functools.cache
def device():
    """The device of both ends; loads it."""
    name = os.environ.get(DEVICE_VARIABLE) or ("cuda" if torch.cuda.is_available() else "cpu")
    if name != "lag":
        return torch.device(name, 0)
    from tests.lag import device as lag

    return _kept.enter_context(lag.here())


def settle():
    """Wait for all that was queued on the device."""
    if device().type != "cpu":
        torch.accelerator.synchronize(device())


def keep_busy(times=100):
    """Queue work on the current stream, some 20 ms of it on a large GPU."""
    one = torch.ones(4096 if device().type == "cuda" else 8, device=device()).diag().to(torch.bfloat16)
    for _ in range(times if device().type == "cuda" else 1):
        one = one @ one


def copy_speed(nbytes):
    """Bytes per second that the device copies from its memory into its memory."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device())
    target = torch.empty_like(source).copy_(source)
    settle()
    began = time.perf_counter()
    for _ in range(4):
        target.copy_(source)
    settle()
    return 4 * nbytes / (time.perf_counter() - began)


def model(mib, version):
    """A model of that size, by name: random numbers, of which each version turns the sign of one in a hundred."""
    count = max(12, mib // 32)
    return {f"layers.{number:04d}.weight": _layer(number, mib, version) for number in range(count)}


def _others(found, mib, version):
    for number, (name, tensor) in enumerate(found.items()):
        if not same(tensor, _layer(number, mib, version)):
            yield name


def _layer(number, mib, version):
    made = device() if device().type == "cuda" else torch.device("cpu")  # others may have no generator
    shape = mib * _MIB_ROWS // max(12, mib // 32), _COLUMNS
    generator = torch.Generator(made).manual_seed(number)
    found = torch.empty(shape, dtype=torch.bfloat16, device=made).normal_(generator=generator)
    for step in range(version):
        generator.manual_seed(1_000_000 * (step + 1) + number)
        turned = torch.rand(shape, device=made, generator=generator) < 0.01
        found = torch.where(turned, -found, found)
    return found.to(device())


def small(count, version, *, turned=False):
    """Small tensors by name, of any bits; each version changes one byte in a hundred.

    Args:
        turned: those that else are contiguous are strided, and the other way round.
    """
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (count, _ROOM), dtype=torch.uint8, generator=generator)
    for step in range(version):
        generator.manual_seed(1 + step)
        raw ^= (torch.rand(raw.shape, generator=generator) < 0.01).to(torch.uint8)
    return {f"small.{number:05d}": _small(number, own, turned) for number, own in enumerate(raw.to(device()))}


def _small(number, raw, turned):
    dtype = _DTYPES[number % len(_DTYPES)]
    flat = (raw & 1).view(dtype) if dtype == torch.bool else raw.view(dtype)
    kind = number % 5
    if kind == 0:
        return flat[:3].clone()[:0].reshape(0, 5)
    if kind == 1:
        return flat[0].clone()
    if kind == 2 and turned:
        return flat[:60].clone().reshape(6, 10)
    if kind == 2:
        return flat[:60].clone().reshape(6, 10).t().contiguous().t()
    if turned:
        return torch.stack((flat[:45], flat[:45]), 1)[:, 0]
    return flat[:45].clone()


def bits(tensor):
    """The bytes of a tensor in C order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(found, expected):
    """Whether two tensors have one shape, dtype and bits."""
    return found.shape == expected.shape and found.dtype == expected.dtype and torch.equal(bits(found), bits(expected))


class Weights:
    """The weights of a road, at one end."""

    def __init__(self, road, role):
        self._road, self._turned = road, role == "worker"

    def of(self, version):
        """All of a version, on the device."""
        if self._road.mib:
            return model(self._road.mib, version)
        return small(self._road.small, version, turned=self._turned)

    def wrong(self, found, version):
        """The names of the tensors that are not those of a version, bit for bit."""
        if self._road.mib:
            return [*_others(found, self._road.mib, version)]
        every = self.of(version)
        return [name for name in every if not same(found[name], every[name])]


class Reading:
    """What somebody reads who knows addresses alone, such as a CUDA graph that was captured over the parameters."""

    def __init__(self, held, graph):
        self._held, self._graph = held, None
        self._addresses = self._now()
        self._found = self._read(held)
        if graph and device().type == "cuda":
            settle()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # others may ask for events
                self._found = self._read(held)

    def moved(self):
        """The names of parameters that lie elsewhere now."""
        return [name for name, address in self._now().items() if address != self._addresses[name]]

    def sees(self, expected):
        """Whether what is read now is what is read from the weights that ``expected`` returns; None without a graph."""
        if self._graph is None:
            return None
        self._graph.replay()
        return torch.equal(self._found, self._read(expected()))

    def _now(self):
        return {name: tensor.data_ptr() for name, tensor in self._held.items()}

    @staticmethod
    def _read(weights):
        return torch.stack([tensor.view(torch.int32).sum(dtype=torch.int64) for tensor in weights.values()])


class Dying(MappingSource):
    """Weights whose reader is killed after half of them."""

    def __iter__(self):
        return _dying([*super().__iter__()])

    def shards(self):
        return _dying([*super().shards()])


def _dying(pairs):
    for number, pair in enumerate(pairs):
        if 2 * number > len(pairs):
            os.kill(os.getpid(), signal.SIGKILL)
        yield pair


class StockWire:
    """The wire of a stock engine, of which both ends know what a control layer would say."""

    def __init__(self, role, make, port, timeout_s):
        self.trains, self.make, self.received_version, self.timeout_s = role == "trainer", make, 0, timeout_s
        self.name = f"{NAME}-1" if make == "sglang" else NAME
        self.where = {"master_address": "127.0.0.1", "master_port": port}
        self.backend = "nccl" if device().type == "cuda" else "gloo"

    def init_all_workers_group(self, metadata):
        self.params = tuple(ParamMeta(name, *rest) for name, rest in metadata.items())
        within = Deadline(self.timeout_s)
        if self.trains:
            how = {"make": self.make, "backend": self.backend, "bucket_bytes": BUCKET_BYTES}
            self.own = NativeTransport(**self.where, **how, timeout_s=self.timeout_s)
            self.own.open(1, self.params, within).transfer(within)
        else:
            group = {**self.where, "world_size": 2, "group_name": self.name, "backend": self.backend}
            offer = {"make": self.make, "group": group, "bucket_bytes": BUCKET_BYTES}
            self.own = NativeTransport.join(offer, Worker(rank=1), within)

    def send_weights(self, weights):
        self.received_version += 1
        update, within = Update(source=as_source(weights), version=self.received_version), Deadline(self.timeout_s)
        self.own.prepare(update, within).transfer(within)

    def receive_weights(self, timeout, weights):
        self.received_version += 1
        load = {"group": self.name, "handoff": self.received_version, "make": self.make, "bucket_bytes": BUCKET_BYTES}
        load["calls"] = layout_of(self.params, self.make, BUCKET_BYTES)[1]
        arrival = Arrival(version=self.received_version, params=self.params, info=load)
        for name, tensor in self.own.receive(arrival, weights, Deadline(timeout)):
            if tensor is not weights[name]:
                weights[name].copy_(tensor)
        return weights

    def shutdown(self):
        getattr(self.own, "shutdown" if self.trains else "close")()


def end_of(road, role):
    """One end of a road, not connected yet."""
    how, trains, name = {"timeout_s": road.timeout_s}, role == "trainer", road.transport
    if name in FILES:
        return tx.make_transport(name, root=road.place, **how)
    if name in ("sglang", "vllm"):
        return StockWire(role, name, int(road.place), road.timeout_s)
    how |= {"master_port": int(road.place)}
    if name == "sharded":
        return tx.make_transport(name, workers=1, worker=None if trains else 0, **how)
    how |= {"rank": int(not trains), "world_size": 2}
    if name == "broadcast":
        return tx.make_transport("delta", carrier="collective", **how)
    return tx.make_transport(name, **how)


def say(**what):
    print(json.dumps(what), flush=True)


def main(role, roads):
    """Go these roads, one after the other."""
    say(up=role, copy_gbps=copy_speed((1 << 28) if device().type == "cuda" else 1 << 20) / 1e9)
    for road in (Road(**one) for one in json.loads(roads)):
        stream = torch.Stream(device()) if road.aside and device().type != "cpu" else nullcontext()
        own = end_of(road, role)
        try:
            with stream:
                (_trains if role == "trainer" else _follows)(road, own, Weights(road, role))
        except WeightSyncError as error:
            if not road.dies:
                raise
            say(error=type(error).__name__, text=str(error))
            time.sleep(2)  # whatever ends the process for it has begun by then
            say(lives=torch.ones(3, device=device()).sum().item())
        finally:
            own.shutdown()


def _meet(road, own, weights):
    if road.transport in MEETING:
        own.init_all_workers_group({name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()})
    say(met=road.transport)


def _trains(road, own, every):
    _meet(road, own, every.of(0))
    for version in range(1, 1 + road.versions):
        weights = every.of(version)
        settle()
        sys.stdin.readline()
        if road.aside:
            keep_busy()
            weights = {name: torch.empty_like(tensor).copy_(tensor) for name, tensor in weights.items()}
        nbytes = sum(tensor.nbytes for tensor in weights.values())
        dies = road.dies == "trainer" and version == road.versions
        began = time.perf_counter()
        own.send_weights(Dying(weights) if dies else weights)
        seconds = time.perf_counter() - began
        say(sent=version, seconds=seconds, bytes=nbytes, pinned=most_pinned())


def _follows(road, own, every):
    held = every.of(0)
    reading = Reading(held, road.graph) if road.mib else None
    _meet(road, own, held)
    for version in range(1, 1 + road.versions):
        if road.dies == "worker" and version == road.versions:
            within, end = Deadline(road.timeout_s), own._end  # another one would be another worker to the trainer
            for number, _ in enumerate(end.receive(end.next(within, own._received), held, within)):
                if 2 * number > len(held):
                    os.kill(os.getpid(), signal.SIGKILL)
        found = own.receive_weights(road.timeout_s, weights=held)
        assert found is not None, f"no version came within {road.timeout_s} s"
        said = {"got": own.received_version, "wrong": every.wrong(held, version)[:9], "compared": len(held)}
        if reading is not None:
            said |= {"moved": reading.moved()[:9], "graph": reading.sees(partial(every.of, version))}
        say(**said)


def most_pinned():
    """The most bytes of pinned memory that torch has held in this process; None where nobody counts them."""
    if device().type == "cuda":
        stats = getattr(torch.cuda, "host_memory_stats", dict)()  # from torch 2.9 on
        return stats.get("allocated_bytes.peak")
    if device().type == "lag":
        from tests.lag import device as lag

        return lag.counts()["most pinned bytes"]
    return None
