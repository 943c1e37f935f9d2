"""Both ends of `IPCTransport`, in this process and in others."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial

import pytest
import torch

import torchrl_ext as tx
from tests.data.group.members import Interrupted
from tests.processes import family, files_of, maps_of
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.data.transports.base import Arrival, Update, Worker
from torchrl_ext.data.weights.source import MappingSource
from torchrl_ext.testing import WAIT_S

SMALL_BYTES = 4096


def follows(channel):
    """A worker that takes one version after the other, and says of each which it is and what its tensors add up to."""
    worker = tx.make_transport("ipc", channel=channel, timeout_s=60)
    print("up", flush=True)
    while (received := worker.receive_weights(60)) is not None:
        print(worker.received_version, int(sum(tensor.sum() for tensor in received.values())), flush=True)


def stops_taking(channel, number, at):
    """A worker that gets a signal at a parameter of its first version."""
    worker = tx.make_transport("ipc", channel=channel, timeout_s=60)
    print("up", flush=True)
    within = Deadline(60)
    end = worker.attend(within)
    for index, _ in enumerate(end.receive(end.next(within), {}, within)):
        if index == at:
            os.kill(os.getpid(), number)


def stops_sending(channel, number, at):
    """A trainer that gets a signal at a parameter of its first version, or after it."""
    die = partial(os.kill, os.getpid(), number)
    trainer = tx.make_transport("ipc", channel=channel, bucket_bytes=SMALL_BYTES, timeout_s=60)
    trainer.send_weights(Interrupted(weights(), at, die))
    die()


@pytest.fixture
def channel(tmp_path):
    return str(tmp_path)


@pytest.fixture
def make(channel):
    made = []

    def end(**settings):
        made.append(tx.make_transport("ipc", channel=channel, **{"bucket_bytes": SMALL_BYTES, **settings}))
        return made[-1]

    yield end
    for transport in made:
        transport.shutdown()
    assert everywhere() == []


def weights(value=1.0, count=40):
    return {f"{i:02d}": torch.full((300,), float(value)) for i in range(count)}


def exchange(trainer, worker, value=5.0):
    """Send a version, and require that it arrives."""
    with receiving(worker) as arriving:
        trainer.send_weights(weights(value))
        assert arriving.result(WAIT_S)["39"][0] == value


def everywhere():
    """Staging buffers that this process, or one that it started, holds open or maps."""
    found = []
    for pid in family(os.getpid()):
        with suppress(OSError):  # it ends
            found += [
                (pid, name) for name in (*files_of(pid), *maps_of(pid).splitlines()) if "memfd:torchrl_ext" in name
            ]
    return found


@contextmanager
def receiving(worker, **how):
    """The block runs beside a worker that waits for a version; yields what becomes of that."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(worker.receive_weights, WAIT_S, **how)


@contextmanager
def joined(trainer):
    """A worker of a trainer that a control layer drives."""
    within = Deadline(trainer.timeout_s)
    opening = trainer.open(1, (), within)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(opening.transfer, within)
        worker = tx.IPCTransport.join(opening.info, Worker(rank=1), within)
        waiting.result(WAIT_S)
    with closing(worker):
        yield worker


def prepared(trainer, tensors, within):
    """A handoff of version 1, and how a worker hears of it."""
    source = MappingSource(tensors)
    handoff = trainer.prepare(Update(source=source, version=1), within)
    return handoff, Arrival(version=1, params=source.params(), info=handoff.info)
