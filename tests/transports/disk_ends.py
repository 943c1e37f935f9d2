"""Both ends of `DiskTransport` on one root."""

from __future__ import annotations

import pytest
import torch

import torchrl_ext as tx


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


def versions(root):
    return sorted(path.name for path in root.iterdir() if path.name != "latest")


def everything(root):
    return sorted(path.name for path in root.iterdir())


def weights(value, count=20):
    return {f"w{i:02d}": torch.full((500,), float(value)) for i in range(count)}
