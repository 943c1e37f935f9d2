"""What every transport inherits that works alone, and what the simplest one, of memory, keeps."""

import pytest
import torch
from torch import nn
from torchrl.weight_update.weight_sync_schemes import WeightStrategy

import torchrl_ext as tx
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import IntegrityError
from torchrl_ext.data.transports.base import Arrival, Worker
from torchrl_ext.testing import WAIT_S, Ends, assert_arrived, assert_held


@pytest.fixture
def ends(tmp_path):
    made = Ends(*(tx.MemoryTransport(channel=str(tmp_path)) for _ in range(2)))
    yield made
    made.worker.shutdown()
    made.trainer.shutdown()


def layers():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def test_nested_names_are_joined(ends):
    weights = {"a": {"b": torch.randn(2)}, ("c", "d"): torch.randn(3), "e.f": torch.randn(1)}
    received = ends.exchange("policy", weights)
    assert_arrived(received, weights)
    assert set(received.keys()) == {"a.b", "c.d", "e.f"}


@pytest.mark.parametrize("into", ["weights", "model"])
def test_a_module_takes_the_weights_in_place(ends, into):
    sent, held = layers(), layers()
    before = held[0].weight
    assert_arrived(ends.exchange("policy", sent, **{into: held}), sent)
    assert_held(held, sent)
    assert held[0].weight is before


@pytest.mark.parametrize("extract_as", ["tensordict", "state_dict"])
@pytest.mark.filterwarnings("ignore:state_dict strategy")
def test_a_torchrl_strategy_applies_them_to_a_nested_model(ends, extract_as):
    sent, held = layers(), layers()
    ends.exchange("policy", sent, model=held, strategy=WeightStrategy(extract_as))
    assert_held(dict(held.named_parameters()), dict(sent.named_parameters()))


# the memory transport


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


def test_what_a_worker_took_outlives_the_trainers_copies(lag):
    trainer, worker = tx.MemoryTransport("lives"), tx.MemoryTransport("lives")
    with torch.Stream(lag) as training:
        trainer.send_weights({"x": torch.arange(5).to(lag) + 1})
    taken = worker.receive_weights(WAIT_S)
    with training:
        trainer.send_weights({"x": torch.zeros(5).to(lag)})
    training.synchronize()  # by which the memory of the first copies is others'
    assert taken["x"].tolist() == [1, 2, 3, 4, 5]
