"""Deltas within one process: bits after commits on other streams."""

from __future__ import annotations

import tempfile
import threading
from contextlib import nullcontext

import torch

from tests.gpu.ends import device, keep_busy, same, settle
from torchrl_ext import WeightReceiver, make_transport
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.messages import Finish, Join, Load, Prefetch, Start
from torchrl_ext.data.transports.base import Update
from torchrl_ext.data.weights.derived import as_source

WAIT_S = 40


class Chain:
    """Deltas from a trainer to a worker, which changes ``held`` in place."""

    def __init__(self, root, weights):
        self.held, self._version = {name: tensor.clone() for name, tensor in weights.items()}, 0
        self._trainer, self._worker = make_transport("delta", root=root, timeout_s=WAIT_S), WeightReceiver(self.held)
        params = as_source(weights).params()
        offer = self._trainer.open(1, params, Deadline(WAIT_S)).info
        self._worker.handle(Join(transport="delta", params=params, offer=offer))
        self.publish(weights)
        self.stage()
        self.commit()

    def publish(self, weights):
        self._version += 1
        update = Update(source=as_source(weights), version=self._version)
        self._handoff = self._trainer.prepare(update, Deadline(WAIT_S))

    def stage(self):
        self._worker.handle(Prefetch(version=self._version))

    def commit(self):
        load = Load(version=self._version, handoff=self._handoff.info)
        for message in (Start(), load, Finish(version=self._version)):
            self._worker.handle(message)
        self._handoff.served(self._version)


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
