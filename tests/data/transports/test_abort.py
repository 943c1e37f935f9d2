"""An abort ends who waits for a version, and nobody who comes later."""

import threading
from functools import partial

import pytest
from torch.distributed import HashStore

import torchrl_ext as tx
from tests.processes import WAIT_S
from torchrl_ext.base.deadline import Deadline, in_thread
from torchrl_ext.base.errors import TransportError, WeightSyncError
from torchrl_ext.base.messages import Join, Prefetch
from torchrl_ext.data.group.ranks import RankStore, TrainerRanks
from torchrl_ext.data.transports import delta, disk

WORDS = {"a version": "weight_v000003|version 3", "the trainer": "the trainer's root was not found before"}


@pytest.mark.parametrize("step", WORDS)
@pytest.mark.parametrize("name", ["delta", "disk"])
def test_abort_ends_the_current_wait_and_no_later_wait(tmp_path, monkeypatch, name, step):
    """An abort ends the wait in progress, and a later wait neither ends by it nor spins."""
    for module in (delta, disk):
        monkeypatch.setattr(module, "VISIBLE_S", 3 * WAIT_S)
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


def test_an_abort_ends_the_wait_of_a_trainer_rank_for_rank_0():
    transport, looked = tx.MemoryTransport(), threading.Event()

    class Store(HashStore):
        def add(self, key, more):
            looked.set()
            return super().add(key, more)

    group = RankStore(1, 2, Store())
    transport.ranks = TrainerRanks("abort", WAIT_S, group=lambda: group)
    following = in_thread(lambda: transport.send_weights({"x": 1}), "rank 1")
    assert looked.wait(WAIT_S)
    transport.abort()
    with pytest.raises(TransportError, match="trainer rank 0 began no update before a failure elsewhere"):
        following.result(WAIT_S)
