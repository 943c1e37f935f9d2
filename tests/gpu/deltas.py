"""Deltas within one process: bits after commits on other streams, and figures of each stage."""

from __future__ import annotations

import tempfile
import threading
import time
import warnings
from contextlib import contextmanager, nullcontext
from functools import partial

import torch

from tests.gpu.ends import copy_speed, device, keep_busy, model, same, settle
from torchrl_ext import WeightReceiver, make_transport
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.messages import Finish, Join, Load, Prefetch, Start
from torchrl_ext.data.landing.loader import TensorsLoader
from torchrl_ext.data.transports.base import Update
from torchrl_ext.data.weights.derived import as_source

WAIT_S = 40
_NUMEL = 2048  # of a small tensor


class Chain:
    """Deltas from a trainer to a worker's model: each version is published, staged and committed.

    Attributes:
        held: the weights of the worker, which changes them in place.
        seconds: how long each stage took last.
    """

    def __init__(self, root, weights):
        self.held, self.seconds, self._version = {name: tensor.clone() for name, tensor in weights.items()}, {}, 0
        self._trainer, self._worker = make_transport("delta", root=root, timeout_s=WAIT_S), WeightReceiver(self.held)
        params = as_source(weights).params()
        offer = self._trainer.open(1, params, Deadline(WAIT_S)).info
        self._worker.handle(Join(transport="delta", params=params, offer=offer))
        self.publish(weights)
        self.stage()
        self.commit()

    def publish(self, weights):
        self._version += 1
        with _timed(self.seconds, "find, code, write"):
            update = Update(source=as_source(weights), version=self._version)
            self._handoff = self._trainer.prepare(update, Deadline(WAIT_S))

    def stage(self):
        with _timed(self.seconds, "read, stage"):
            self._worker.handle(Prefetch(version=self._version))

    def commit(self):
        with _timed(self.seconds, "commit"):
            self._worker.handle(Start())
            self._worker.handle(Load(version=self._version, handoff=self._handoff.info))
        self._worker.handle(Finish(version=self._version))
        self._handoff.served(self._version)


@contextmanager
def _timed(into, name):
    began = time.perf_counter()
    yield
    into[name] = time.perf_counter() - began


def turn(weights, generator):
    """Turn the sign of one element in a hundred in place, on the current stream."""
    for tensor in weights.values():
        flat = tensor.view(-1)
        where = torch.randint(0, flat.numel(), (1 + flat.numel() // 100,), generator=generator).unique().to(device())
        flat.index_copy_(0, where, -flat.index_select(0, where))


def staged(scale):
    """Changes staged in a thread while another stream is busy; commits are on that one and on a third in turn."""
    rounds, generator, wrong, busy_then = max(4, int(200 * scale)), torch.Generator().manual_seed(1), [], 0
    weights = {str(n): torch.randn(1 << 16, generator=generator).to(device(), torch.bfloat16) for n in range(48)}
    busy, quiet = (nullcontext() if device().type == "cpu" else torch.Stream(device()) for _ in range(2))
    settle()
    with tempfile.TemporaryDirectory() as root:
        chain = Chain(root, weights)
        for number in range(rounds):
            turn(weights, generator)
            settle()
            chain.publish(weights)
            with busy:
                keep_busy(400)
            _beside(chain.stage)
            busy_then += device().type == "cuda" and not busy.query()
            with quiet if number % 2 else busy:
                chain.commit()
                wrong += [f"round {number}: {name}" for name in weights if not same(chain.held[name], weights[name])]
            settle()
    found = {"rounds": rounds, "compared": rounds * len(weights), "failures": wrong[:5]}
    return found | ({"rounds_that_were_staged_beside_work": busy_then} if device().type == "cuda" else {})


def _beside(call):
    failed = []

    def noting():
        try:
            call()
        except Exception as error:  # noqa: BLE001 - raised below
            failed.append(error)

    thread = threading.Thread(target=noting, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), f"staging did not end in {WAIT_S} s"
    if failed:
        raise failed[0]


def _equal(count):
    return {str(n): torch.full((_NUMEL,), 1 + n % 99, dtype=torch.bfloat16, device=device()) for n in range(count)}


def figures(scale):
    """Seconds, GB/s and waits of digests and deltas, for few large tensors and for many small ones."""
    mib, many = max(6, int(4096 * scale)), max(500, int(20_000 * scale))
    copy = copy_speed(min(mib << 20, 1 << 30))
    found = {"copy_gbps": round(copy / 1e9, 2), "compared": 0, "failures": []}
    for name, make in {f"{mib} MiB": partial(model, mib, 0), f"{many} small": partial(_equal, many)}.items():
        weights = make()
        seconds, waits, wrong = _stages(weights)
        nbytes = sum(tensor.nbytes for tensor in weights.values())
        found[name] = {
            stage: {
                "s": round(took, 4),
                "gbps": round(nbytes / took / 1e9, 3),
                "of_copy": round(nbytes / took / copy, 4),
                "us_per_tensor": round(1e6 * took / len(weights), 1),
                **({} if waits[stage] is None else {"waits_per_tensor": round(waits[stage] / len(weights), 3)}),
            }
            for stage, took in seconds.items()
        }
        found["compared"] += len(weights)
        found["failures"] += wrong[:5]
        del weights
    return found


def _stages(weights):
    """Seconds and waits of each stage, and the names of tensors that are wrong in the end."""
    generator, waits, digest, loader = torch.Generator().manual_seed(1), {}, {}, TensorsLoader(weights)
    loader.check(as_source(weights).params())
    for _ in range(2):  # the second time everything is compiled, and the memory is there
        with counted(waits, "digest"), _timed(digest, "digest"):
            loader.digests()
    with tempfile.TemporaryDirectory() as root:
        chain = Chain(root, weights)
        for _ in range(2):
            turn(weights, generator)
            settle()
            with counted(waits, "find, code, write"):
                chain.publish(weights)
            with counted(waits, "read, stage"):
                chain.stage()
            with counted(waits, "commit"):
                chain.commit()
            settle()
        wrong = [name for name in weights if not same(chain.held[name], weights[name])]
    return digest | chain.seconds, waits, wrong


@contextmanager
def counted(into, name):
    """Note how often the host waits for the device in the block; None where nobody counts."""
    into[name] = None
    if device().type == "lag":
        from tests.lag import device as lag

        before = lag.waits()
        yield
        into[name] = lag.waits() - before
    elif device().type == "cuda":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")  # it counts no wait for a stream or an event that is asked for
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
        into[name] = sum("synchroniz" in str(one.message) for one in caught)
    else:
        yield
