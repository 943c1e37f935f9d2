"""Both ends of `IPCTransport`, in this process and in others."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

import torchrl_ext as tx
from torchrl_ext.deadline import Deadline
from torchrl_ext.testing import WAIT_S
from torchrl_ext.transports.base import Arrival, Update, Worker
from torchrl_ext.weights.source import MappingSource

SMALL_BYTES = 4096

WORKER = """
import sys
import torch, torchrl_ext as tx
worker = tx.make_transport("ipc", channel=sys.argv[1], timeout_s=60)
print("up", flush=True)
while True:
    received = worker.receive_weights(60)
    if received is None:
        break
    print(worker.received_version, int(sum(tensor.sum() for tensor in received.values())), flush=True)
"""
FROZEN_WORKER = """
import os, signal, sys
import torch, torchrl_ext as tx
from torchrl_ext.deadline import Deadline
worker = tx.make_transport("ipc", channel=sys.argv[1], timeout_s=60)
print("up", flush=True)
within = Deadline(60)
arrival = worker.mailbox.get(within)
for index, _ in enumerate(worker.attend(within).receive(arrival, {}, within)):
    if index == int(sys.argv[3]):
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""
FATAL_TRAINER = """
import os, signal, sys
import torch, torchrl_ext as tx
from torchrl_ext.weights.source import MappingSource
class Fatal(MappingSource):
    def __iter__(self):
        for index, pair in enumerate(super().__iter__()):
            if index == int(sys.argv[3]):
                os.kill(os.getpid(), getattr(signal, sys.argv[2]))
            yield pair
trainer = tx.make_transport("ipc", channel=sys.argv[1], bucket_bytes=4096, timeout_s=60)
trainer.send_weights(Fatal({f"{i:02d}": torch.ones(300) for i in range(40)}))
os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""


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


def everywhere():
    """Staging buffers that any process of this user holds open or maps, other than those of tests beside this one."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and _related(int(process.name)):
            try:
                names = [os.readlink(path) for path in (process / "fd").iterdir()]
                names += [line for line in (process / "maps").read_text().splitlines()]
            except OSError:
                continue
            found += [(process.name, name) for name in names if "memfd:torchrl_ext" in name]
    return found


def _related(pid):
    """This process, or one that it started."""
    while pid > 1:
        if pid == os.getpid():
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False


def opened(trainer, workers=1):
    """An invitation, and the wait for its workers."""
    within = Deadline(trainer.timeout_s)
    opening = trainer.open(workers, (), within)
    return opening.info, lambda: opening.transfer(within)


def join(info, timeout_s=WAIT_S, rank=1):
    """A worker that joins by an invitation."""
    return tx.IPCTransport.join(info, Worker(rank=rank), Deadline(timeout_s))


@contextmanager
def joined(trainer):
    """A worker of a trainer that a control layer drives."""
    info, wait = opened(trainer)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        worker = join(info)
        waiting.result(WAIT_S)
    with closing(worker):
        yield worker


def prepared(trainer, tensors, within):
    """A handoff of version 1, and how a worker hears of it."""
    source = MappingSource(tensors)
    handoff = trainer.prepare(Update(source=source, version=1), within)
    return handoff, Arrival(version=1, params=source.params(), info=handoff.info)
