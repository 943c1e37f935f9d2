"""Both ends of `DiskTransport` on one root."""

from __future__ import annotations

import pytest
import torch

import torchrl_ext as tx
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.data.transports.base import Arrival, Update, Worker
from torchrl_ext.data.weights.source import MappingSource
from torchrl_ext.testing import WAIT_S


@pytest.fixture
def root(tmp_path):
    return tmp_path / "updates"


@pytest.fixture
def trainer(root):
    transport = tx.DiskTransport(root, shard_bytes=4096)
    yield transport
    transport.shutdown()


@pytest.fixture
def worker(root):
    transport = tx.DiskTransport(root)
    yield transport
    transport.shutdown()


def everything(root):
    return sorted(path.name for path in root.iterdir())


def versions(root):
    return [name for name in everything(root) if name != "latest"]


def weights(value, count=20):
    return {f"w{i:02d}": torch.full((500,), float(value)) for i in range(count)}


def joined(trainer, count=1):
    """Return the ends of ``count`` workers that joined ``trainer``."""
    info = trainer.open(count, (), Deadline(WAIT_S)).info
    return [tx.DiskTransport.join(info, Worker(rank=rank), Deadline(WAIT_S)) for rank in range(1, 1 + count)]


def publish(trainer, sent, version):
    """Prepare a version; return its handoff, and how workers hear of it."""
    source = MappingSource(sent)
    handoff = trainer.prepare(Update(source=source, version=version), Deadline(WAIT_S))
    return handoff, Arrival(version=version, params=source.params(), info=handoff.info)
