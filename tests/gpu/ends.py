"""A trainer and a worker, each a process of its own on one GPU: ``main ROLE TRANSPORT PLACE MEGABYTES``.

The trainer sends a version for every number it reads; the worker says of each version whether it has every bit of it,
which it can tell because both make weights from the same seeds.
"""

from __future__ import annotations

import sys
import time

import torch

import torchrl_ext as tx
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.transports.base import Arrival, Update, Worker
from torchrl_ext.data.transports.native import NAME, NativeTransport, layout_of
from torchrl_ext.data.weights.derived import as_source

WAIT_S = 300
GROUPS = ("collective", "broadcast", "sglang", "vllm")
"""Roads on which both ends meet in a group, at a port; the last two are the wires of stock engines."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the latter to try this file itself
BUCKET_BYTES = 256 << 20
SHAPE = (4096, 4096)  # 32 MiB in bfloat16


def tensor_of(number, version):
    """Tensor ``number`` of ``version``: random ones, of which each version turns the sign of one in a hundred."""
    generator = torch.Generator(DEVICE).manual_seed(number)
    found = torch.empty(SHAPE, dtype=torch.bfloat16, device=DEVICE).normal_(generator=generator)
    for step in range(version):
        generator.manual_seed(1_000_000 * (step + 1) + number)
        turned = torch.rand(SHAPE, device=DEVICE, generator=generator) < 0.01
        found = torch.where(turned, -found, found)
    return found


def names(megabytes):
    return [f"layers.{number:04d}.weight" for number in range(max(1, megabytes // 32))]


def model(megabytes, version):
    return {name: tensor_of(number, version) for number, name in enumerate(names(megabytes))}


def holds(received, megabytes, version):
    """Whether every bit is there; one tensor is made at a time."""
    return all(
        torch.equal(received[name].view(torch.int16), tensor_of(number, version).view(torch.int16))
        for number, name in enumerate(names(megabytes))
    )


class StockWire:
    """The wire of a stock engine, of which both ends know what a control layer would say."""

    def __init__(self, role, make, port):
        self.trains, self.make, self.received_version = role == "trainer", make, 0
        self.name = f"{NAME}-1" if make == "sglang" else NAME
        self.where = {"master_address": "127.0.0.1", "master_port": port}
        self.backend = "nccl" if DEVICE == "cuda" else "gloo"

    def init_all_workers_group(self, metadata):
        self.params = tuple(ParamMeta(name, *rest) for name, rest in metadata.items())
        if self.trains:
            how = {"make": self.make, "backend": self.backend, "bucket_bytes": BUCKET_BYTES, "timeout_s": WAIT_S}
            self.own = NativeTransport(**self.where, **how)
            self.own.open(1, self.params, Deadline(WAIT_S)).transfer(Deadline(WAIT_S))
        else:
            group = {**self.where, "world_size": 2, "group_name": self.name, "backend": self.backend}
            offer = {"make": self.make, "group": group, "bucket_bytes": BUCKET_BYTES}
            self.own = NativeTransport.join(offer, Worker(rank=1), Deadline(WAIT_S))

    def send_weights(self, model_id, weights):
        self.received_version += 1
        update = Update(source=as_source(weights), version=self.received_version)
        self.own.prepare(update, Deadline(WAIT_S)).transfer(Deadline(WAIT_S))

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


def end(role, transport, place):
    """One end, not connected yet."""
    if transport == "collective":
        return tx.VLLMCollectiveTransport("127.0.0.1", int(place), int(role == "worker"), 2, timeout_s=WAIT_S)
    if transport == "broadcast":
        own = {"master_port": int(place), "rank": int(role == "worker"), "world_size": 2}
        return tx.make_transport("delta", carrier="collective", timeout_s=WAIT_S, **own)
    if transport in ("sglang", "vllm"):
        return StockWire(role, transport, int(place))
    if transport == "delta":
        return tx.make_transport("delta", root=place, timeout_s=WAIT_S)
    return tx.make_transport("ipc", channel=place, timeout_s=WAIT_S)


def _settle():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def main(role, transport, place, megabytes):
    megabytes = int(megabytes)
    own = end(role, transport, place)
    if transport in GROUPS:
        own.init_all_workers_group({name: (torch.bfloat16, torch.Size(SHAPE)) for name in names(megabytes)})
    print("up", flush=True)
    if role == "trainer":
        for line in sys.stdin:
            weights = model(megabytes, int(line))
            _settle()
            began = time.perf_counter()
            own.send_weights("policy", weights)
            print("sent", line.strip(), f"{time.perf_counter() - began:.3f} s", flush=True)
    else:
        held = model(megabytes, 0)
        while own.receive_weights(WAIT_S, weights=held) is not None:
            print("got", own.received_version, holds(held, megabytes, own.received_version), flush=True)
    own.shutdown()
