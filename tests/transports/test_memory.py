from __future__ import annotations

import pytest
import torch

import torchrl_ext as tx
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import TransportError
from torchrl_ext.testing import WAIT_S
from torchrl_ext.transports.base import Worker


def join(info):
    return tx.MemoryTransport.join(info, Worker(rank=1), Deadline(WAIT_S))


def test_a_channel_of_another_process_is_refused():
    with pytest.raises(TransportError, match="does not exist in this process"):
        join({"channel": "elsewhere"})


def test_a_worker_that_leaves_does_not_take_the_channel_with_it():
    trainer, alone = tx.MemoryTransport("shared"), tx.MemoryTransport("shared")
    info = trainer.open(2, (), Deadline(WAIT_S)).info
    join(info).close()
    join(info)
    trainer.send_weights({"x": torch.ones(1)})
    assert alone.receive_weights(0.0)["x"] == 1


def test_a_trainer_that_shuts_down_leaves_no_copy_of_the_model():
    trainer = tx.MemoryTransport()
    worker = tx.MemoryTransport(trainer._name)
    trainer.send_weights({"x": torch.ones(1)})
    worker.shutdown()
    assert trainer._channel.tensors is not None  # which another worker may want
    trainer.shutdown()
    assert trainer._channel.tensors is None
