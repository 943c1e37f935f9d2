"""What every transport inherits that works alone, and what the simplest one, of memory, keeps."""

import threading
from functools import partial

import pytest
import torch
from torch import nn
from torchrl.weight_update.weight_sync_schemes import WeightStrategy

import torchrl_ext as tx
from tests.data.transports.standalone import Ends, assert_arrived
from torchrl_ext.base.deadline import Deadline, in_thread
from torchrl_ext.base.errors import IntegrityError, WeightSyncError
from torchrl_ext.base.messages import Join, Prefetch
from torchrl_ext.data.transports import disk
from torchrl_ext.data.transports.base import Arrival
from torchrl_ext.testing import WAIT_S, assert_held


@pytest.fixture
def ends(tmp_path):
    made = Ends(*(tx.MemoryTransport(channel=str(tmp_path)) for _ in range(2)))
    yield made
    made.worker.shutdown()
    made.trainer.shutdown()


def layers():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


@pytest.mark.parametrize("strategy", [None, "tensordict", "state_dict"])
@pytest.mark.filterwarnings("ignore:state_dict strategy")
def test_a_nested_model_takes_weights_also_by_a_torchrl_strategy(ends, strategy):
    sent, held = layers(), layers()
    before = held[0].weight
    how = {"strategy": WeightStrategy(strategy)} if strategy else {}
    assert_arrived(ends.exchange("policy", sent, model=held, **how), sent)
    assert_held(dict(held.named_parameters()), dict(sent.named_parameters()))
    assert strategy or held[0].weight is before


# an abort


WORDS = {"a version": "weight_v000003|version 3", "the trainer": "the trainer's root was not found before"}


@pytest.mark.parametrize("step", WORDS)
@pytest.mark.parametrize("name", ["delta", "disk"])
def test_abort_ends_the_current_wait_and_no_later_wait(tmp_path, monkeypatch, name, step):
    """An abort ends the wait in progress, and a later wait neither ends by it nor spins."""
    monkeypatch.setattr(disk, "VISIBLE_S", 3 * WAIT_S)
    trainer = tx.make_transport(name, root=str(tmp_path), timeout_s=3 * WAIT_S)
    receiver = tx.WeightReceiver({})
    offer = {**trainer.open(1, (), Deadline(WAIT_S)).info, "timeout_s": 3 * WAIT_S}
    join = Join(transport=name, params=(), offer=offer)
    looked, pauses = threading.Event(), Deadline.pauses

    def looks(within, **how):
        turns = pauses(within, **how)
        yield next(turns)
        looked.set()
        yield from turns

    waits = partial(receiver.connect, join)
    if step == "a version":
        receiver.connect(join)
        waits = partial(receiver.prefetch, Prefetch(version=3))
    trainer.shutdown()  # which takes the probe with it
    monkeypatch.setattr(Deadline, "pauses", looks)
    receiver.abort()  # of an earlier update
    for _ in range(2):
        looked.clear()
        waiting = in_thread(waits, "waits")
        assert looked.wait(WAIT_S) and not waiting.done() and not receiver._within.stop.is_set()
        receiver.abort()
        with pytest.raises(WeightSyncError, match=WORDS[step]):
            waiting.result(WAIT_S)
    receiver.close()


# the memory transport


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
