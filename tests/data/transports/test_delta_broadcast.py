"""Delta by broadcast: what is kept where, who holds which version, and what a group may deliver."""

import resource
import signal

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import torchrl_ext as tx
from tests.data.group.members import beside, enter, group, same
from tests.processes import calling, python
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import DeadlineError, ManifestError, WeightSyncError
from torchrl_ext.control.serving.processes import free_port
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.manifest import version_name
from torchrl_ext.data.stores.store import MemoryStore
from torchrl_ext.data.transports.base import Arrival
from torchrl_ext.data.transports.broadcast import Broadcast
from torchrl_ext.data.transports.collective import CollectiveWorker
from torchrl_ext.sync.local.inprocess import InProcessEngine
from torchrl_ext.testing import WAIT_S


def weights():
    return {"a": torch.zeros(300), "b": torch.arange(600.0).reshape(20, 30), "empty": torch.empty(0)}


def member(port, rank, size, **settings):
    settings = {"encoding": "deltas_zstd", "timeout_s": WAIT_S, **settings}
    return tx.DeltaTransport(carrier="collective", master_port=port, rank=rank, world_size=size, **settings)


def test_only_a_worker_that_knows_the_secret_is_let_in():
    port = free_port()
    trainer, worker = member(port, 0, 2, secret="rose", timeout_s=1.0), member(port, 1, 2, secret="tulip")
    absent, refused = enter(trainer, worker)
    assert isinstance(absent, DeadlineError) and "give every rank the same secret" in str(refused)
    members = [trainer, member(port, 1, 2, secret="rose")]
    assert enter(*members) == [None, None]
    for one in members:
        one.shutdown()


def sends_without_files():
    policy, served = (nn.Linear(1000, 1000) for _ in range(2))
    transport = tx.make_transport("delta", carrier="collective", encoding="deltas")
    sender = tx.WeightSender(transport, InProcessEngine(served))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # a file as large as the model fits nowhere
    for step in range(3):
        with torch.no_grad():
            policy.weight[step] += 1
        report = sender.update_weights(policy)
        assert report.verified and torch.equal(policy.weight, served.weight)
    assert report.density < 0.01
    sender.shutdown()


def test_it_needs_no_filesystem_for_a_model():
    python(calling(sends_without_files))


def test_parameter_called_files_is_refused_before_any_send():
    with group(2, member) as (trainer, worker):
        with pytest.raises(ManifestError, match="called '/files'"):
            trainer.send_weights("policy", {"/files": torch.zeros(3)})
        assert enter(trainer, worker) == [None, None]
        _, received = beside(lambda: trainer.send_weights("policy", weights()), worker.receive_weights)
        assert same(received, weights())


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


def test_missing_version_raises_a_deadline_naming_the_trainer():
    with (
        group(2, member, timeout_s=1.0) as (_, worker),
        pytest.raises(DeadlineError, match="did not come from the trainer"),
    ):
        worker.attend(Deadline(1.0)).stage(1, None, Deadline(1.0))


class Announced:
    """A worker's end of a group whose trainer says what a test likes."""

    def __init__(self, arrival, pairs):
        self._arrival, self._pairs = arrival, pairs

    def next(self, within):
        return self._arrival

    def receive(self, arrival, into, within):
        return iter(self._pairs)


FILES = [
    {"manifest.json": 4, "delta": 4},
    {"../x": 8},
    {"manifest.json": -1},
    {"": 8},
    {"delta/changes": 8},
]
ODD = [None, -1, 1.5, "1", [], {}, True, 1 << 80]
TENSORS = [torch.zeros(count, dtype=torch.uint8) for count in (8, 0, 9)] + [torch.zeros(2)]


@given(
    st.sampled_from([1, 2, 7, -1, 1 << 80]),
    st.sampled_from(FILES * 3 + ODD),
    st.lists(st.tuples(st.sampled_from(["a", "/files", "../x"]), st.sampled_from(TENSORS)), max_size=3),
)
@example(1, FILES[0], [("a", TENSORS[3]), ("/files", TENSORS[0])])
def test_any_announcement_gives_a_version_or_our_own_error(version, files, pairs):
    store, info = MemoryStore(), {"files": files}
    broadcast = Broadcast(Announced(Arrival(version=version, params=(), info=info), pairs), store, Chain(store))
    try:
        broadcast.fetch(Deadline(0.0))
        assert store.list() == ["latest", version_name(version)]
    except WeightSyncError:
        assert not store.list() and not broadcast.kept.tensors
