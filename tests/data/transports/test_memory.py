from __future__ import annotations

import pytest
import torch

import torchrl_ext as tx
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import IntegrityError
from torchrl_ext.data.transports.base import Arrival, Worker
from torchrl_ext.testing import WAIT_S


def join(info):
    return tx.MemoryTransport.join(info, Worker(rank=1), Deadline(WAIT_S))


def test_a_worker_that_leaves_does_not_take_the_channel_with_it():
    trainer, alone = tx.MemoryTransport("shared"), tx.MemoryTransport("shared")
    info = trainer.open(2, (), Deadline(WAIT_S)).info
    join(info).close()
    join(info)
    trainer.send_weights({"x": torch.ones(1)})
    assert alone.receive_weights(0.0)["x"] == 1


def held_by(transport):
    """What a worker finds of the first version."""
    within = Deadline(WAIT_S)
    return dict(transport.attend(within).receive(Arrival(version=1, params=(), info={}), {}, within))


def test_a_trainer_that_shuts_down_leaves_no_copy_of_the_model():
    trainer, worker = tx.MemoryTransport("left"), tx.MemoryTransport("left")
    trainer.send_weights({"x": torch.ones(1)})
    worker.shutdown()
    assert held_by(trainer)["x"] == 1  # which another worker may want
    trainer.shutdown()
    with pytest.raises(IntegrityError, match="is not in memory channel 'left'"):
        held_by(trainer)


def test_an_engine_keeps_no_copy_in_the_channel():
    transport = tx.MemoryTransport("served")
    sender = tx.WeightSender(transport, tx.make_engine("inprocess", engine={"x": torch.zeros(1)}))
    assert sender.update_weights({"x": torch.ones(1)}).version == 1
    with pytest.raises(IntegrityError, match="is not in memory channel 'served'"):
        held_by(transport)
