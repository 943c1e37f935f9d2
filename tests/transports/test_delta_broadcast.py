"""Delta by broadcast: what is kept where, who holds which version, and what a group may deliver."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import torchrl_ext as tx
from tests.processes import python
from tests.transports.members import beside, enter, group, same
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import (
    ConfigError,
    DeadlineError,
    ManifestError,
    StaleBaseError,
    TransportError,
    WeightSyncError,
)
from torchrl_ext.stores import Chain, version_name
from torchrl_ext.stores.base import MemoryStore
from torchrl_ext.testing import WAIT_S
from torchrl_ext.transports.base import Arrival, Worker
from torchrl_ext.transports.collective.transport import CollectiveWorker
from torchrl_ext.transports.delta.broadcast import Broadcast


def weights(value=0.0):
    return {"a": torch.full((300,), value), "b": torch.arange(600.0).reshape(20, 30), "empty": torch.empty(0)}


def member(port, rank, size, **settings):
    settings = {"encoding": "xor", "timeout_s": WAIT_S, **settings}
    return tx.DeltaTransport(carrier="collective", master_port=port, rank=rank, world_size=size, **settings)


def exchange(trainer, *workers, value):
    """Send; what each worker received or raised, and the trainer's error."""
    calls = [lambda one=one: one.receive_weights(WAIT_S) for one in workers]
    *received, error = beside(*calls, lambda: trainer.send_weights("policy", weights(value)))
    return received, error


def test_it_needs_no_filesystem_for_a_model():
    python(WITHOUT_FILES)


WITHOUT_FILES = """
import resource, signal, torch, torchrl_ext as tx
from torch import nn
from torchrl_ext.sync.engines.inprocess import InProcessEngine
policy, served = (nn.Linear(1000, 1000) for _ in range(2))
sender = tx.WeightSender(tx.make_transport("delta", carrier="collective", encoding="xor"), InProcessEngine(served))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # a file as large as the model fits nowhere
for step in range(3):
    with torch.no_grad():
        policy.weight[step] += 1
    report = sender.update_weights(policy)
    assert report.verified and torch.equal(policy.weight, served.weight)
assert report.density < 0.01
sender.shutdown()
"""


def test_ends_that_left_keep_no_weights():
    with group(2, member) as (trainer, worker):
        for step in range(3):
            received, error = exchange(trainer, worker, value=float(step))
            assert error is None and same(received[0], weights(float(step)))
            assert not trainer._kept.tensors and not worker._reader._broadcast.full.tensors
        assert worker._store.list() == ["latest", version_name(3)]
    assert trainer._store.list() == worker._store.list() == ["latest"]


def test_a_worker_that_was_started_again_gets_the_next_version_in_full():
    with group(2, member) as (trainer, worker):
        exchange(trainer, worker, value=1.0)
        exchange(trainer, worker, value=2.0)
        worker.shutdown()
        again = member(trainer._group.master_port, 1, 2)
        assert enter(trainer, again) == [None, None]
        for value in (3.0, 4.0, 5.0):
            (received,), error = exchange(trainer, again, value=value)
            assert error is None and same(received, weights(value))
        again.shutdown()


def test_a_worker_that_lacks_the_base_is_named_and_the_version_after_is_a_full_one():
    with group(3, member) as (trainer, whole, lacking):
        exchange(trainer, whole, lacking, value=1.0)
        lacking._store.delete(version_name(1))
        received, error = exchange(trainer, whole, lacking, value=2.0)
        assert same(received[0], weights(2.0)) and isinstance(received[1], StaleBaseError)
        assert isinstance(error, TransportError)
        assert "rank 2" in str(error) and "does not hold" in str(error) and "rank 1" not in str(error)
        for value in (3.0, 4.0):
            received, error = exchange(trainer, whole, lacking, value=value)
            assert error is None and all(same(one, weights(value)) for one in received)


def test_what_a_group_leaves_on_a_device_lands_on_the_host(monkeypatch):
    class OnDevice(torch.Tensor):
        def numpy(self, *_, **__):
            raise TypeError("can't convert a device tensor to numpy")

        def cpu(self):
            return self.as_subclass(torch.Tensor)

    receive = CollectiveWorker.receive

    def on_device(self, arrival, into, within):
        return ((name, tensor.as_subclass(OnDevice)) for name, tensor in receive(self, arrival, into, within))

    monkeypatch.setattr(CollectiveWorker, "receive", on_device)
    with group(2, member) as (trainer, worker):
        for value in (1.0, 2.0):
            (received,), error = exchange(trainer, worker, value=value)
            assert error is None and same(received, weights(value))


def test_a_parameter_with_the_name_of_the_files_is_refused_before_anything_is_sent():
    with group(2, member) as (trainer, worker):
        with pytest.raises(ManifestError, match="called '/files'"):
            trainer.send_weights("policy", {"/files": torch.zeros(3)})
        exchange(trainer, worker, value=1.0)


def test_damage_on_the_way_is_found_by_name_and_changes_no_model(monkeypatch):
    policy, served = nn.Linear(30, 40), nn.Linear(30, 40)
    before = served.weight.detach().clone()
    receive = CollectiveWorker.receive

    def damaged(self, arrival, into, within):
        pairs = receive(self, arrival, into, within)
        return ((name, tensor + 1 if name == "weight" else tensor) for name, tensor in pairs)

    monkeypatch.setattr(CollectiveWorker, "receive", damaged)
    with group(2, member) as (trainer, worker):
        error, _ = beside(
            lambda: worker.receive_weights(WAIT_S, model=served), lambda: trainer.send_weights("policy", policy)
        )
        assert isinstance(error, WeightSyncError) and "'weight' of version 1 came damaged" in str(error)
        assert torch.equal(served.weight, before)


def test_a_trainer_of_another_release_is_refused_before_anything_is_joined():
    for number in (1, 2):
        with pytest.raises(ConfigError, match=f"broadcasts versions in format {number}"):
            tx.DeltaTransport.join({"group": {}, "format": number}, Worker(rank=1), Deadline(WAIT_S))


def test_a_version_that_does_not_come_ends_in_a_deadline_that_names_the_trainer():
    with (
        group(2, member, timeout_s=1.0) as (_, worker),
        pytest.raises(DeadlineError, match="did not come from the trainer"),
    ):
        worker.attend(Deadline(1.0)).stage(1, None, Deadline(1.0))


class _Told:
    """A worker's end of a group whose trainer says what a test likes."""

    def __init__(self, arrival, pairs):
        self._arrival, self._pairs = arrival, pairs

    def get(self, within):
        return self._arrival

    def receive(self, arrival, into, within):
        return iter(self._pairs)

    def refuse(self, arrival, error):
        assert isinstance(error, StaleBaseError)


def test_whatever_a_trainer_announces_ends_in_a_version_or_an_error_of_ours():
    draw, ended = random.Random(7), {True: 0, False: 0}
    odd = [None, -1, 1.5, "1", [], {}, True, 1 << 80]
    sizes = [{"../x": 8}, {"manifest.json": -1}, {"": 8}, {"manifest.json": 4, "/etc/passwd": 4}, {"delta/changes": 8}]
    bytes_of = [torch.zeros(count, dtype=torch.uint8) for count in (0, 8, 9)]
    tensors = [*bytes_of, torch.zeros(2), torch.zeros(2, 4, dtype=torch.uint8)]
    for _ in range(400):
        files = {"manifest.json": 4, "delta-00001.bin": 4}
        version, info = draw.choice([1, 2, 7, -1, 1 << 80]), {"base": draw.choice([None, 0, 1]), "files": files}
        pairs = [("a", torch.zeros(2)), ("/files", bytes_of[1])]
        for _ in range(draw.randrange(3)):
            info[draw.choice([*info])] = draw.choice([*odd, *sizes])
            pairs[draw.randrange(2)] = (draw.choice(["a", "/files", "../x"]), draw.choice(tensors))
        store = MemoryStore()
        broadcast = Broadcast(_Told(Arrival(version=version, params=(), info=info), pairs), store, Chain(store))
        try:
            broadcast.fetch(Deadline(0.0))
            assert store.list() == ["latest", version_name(version)]
            ended[True] += 1
        except WeightSyncError:
            assert not store.list() and not broadcast.full.tensors
            ended[False] += 1
    assert min(ended.values()) > 10, ended
