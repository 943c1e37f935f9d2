"""Every registered transport passes the same suite."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

import torchrl_ext as tx
from torchrl_ext.registry import transports
from torchrl_ext.testing import SMALL_BYTES, WAIT_S, Ends, StandaloneContract, TransportContract, free_port
from torchrl_ext.transports.base import Arrival, Handoff, Transport, WorkerEnd
from torchrl_ext.transports.standalone import Mailbox, StandaloneTransport
from torchrl_ext.weights.source import checked


class OnChannel(StandaloneContract):
    """Ends that meet on a named channel of this machine."""

    settings: ClassVar = {}

    def make_ends(self, tmp_path):
        return Ends(*(tx.make_transport(self.name, channel=str(tmp_path), **self.settings) for _ in range(2)))

    def make_trainer(self, tmp_path):
        return tx.make_transport(self.name, **self.settings)


class TestMemory(OnChannel):
    name = "memory"


class TestIPC(OnChannel):
    name, settings = "ipc", {"bucket_bytes": SMALL_BYTES}


class UnderRoot(StandaloneContract):
    """Ends that share a directory."""

    settings: ClassVar = {}

    def make_ends(self, tmp_path):
        return Ends(self.make_trainer(tmp_path / "root"), tx.make_transport(self.name, root=tmp_path / "root"))

    def make_trainer(self, tmp_path):
        return tx.make_transport(self.name, root=tmp_path, shard_bytes=SMALL_BYTES, **self.settings)


class TestDisk(UnderRoot):
    name = "disk"


class TestDelta(UnderRoot):
    name, settings = "delta", {"encoding": "auto", "keyframe_every": 2}


class TestDeltaInFlushFiles(UnderRoot):
    name, settings = "delta", {"encoding": "deltas_zstd", "keyframe_every": 0}


class TestDeltaInWholeFiles(UnderRoot):
    name, settings = "delta", {"encoding": "xor", "keyframe_every": 0}


class InGroup(StandaloneContract):
    """Ends that meet in a group of two, of which member 0 is the trainer."""

    settings: ClassVar = {}

    def make_ends(self, tmp_path):
        port = free_port()
        return Ends(*(self.make_member(rank, port) for rank in (0, 1)), in_group=True)

    def make_trainer(self, tmp_path):
        return self.make_member(0, free_port())

    def make_member(self, rank, port):
        settings = {**self.seat(rank), **self.settings, "timeout_s": WAIT_S}
        return tx.make_transport(self.name, master_port=port, **settings)

    def seat(self, rank):
        return {"rank": rank, "world_size": 2}


class TestCollective(InGroup):
    name, settings = "collective", {"master_address": "127.0.0.1", "bucket_bytes": SMALL_BYTES}


class TestNativeSGLang(InGroup):
    name, settings = "native", {"make": "sglang", "backend": "gloo", "bucket_bytes": SMALL_BYTES}


class TestNativeVLLM(InGroup):
    name, settings = "native", {"make": "vllm", "backend": "gloo", "bucket_bytes": SMALL_BYTES}


class TestDeltaByBroadcast(InGroup):
    name, settings = "delta", {"carrier": "collective"}


class TestSharded(InGroup):
    name, settings = "sharded", {"master_address": "127.0.0.1", "bucket_bytes": SMALL_BYTES}

    def seat(self, rank):
        return {"worker": None if rank == 0 else 0, "workers": 1}


def test_every_registered_transport_is_under_the_contract():
    covered = {suite.name for kind in (OnChannel, UnderRoot, InGroup) for suite in kind.__subclasses__()}
    assert covered == set(tx.transports()) - {"shelf", "slot"}


@pytest.fixture(autouse=True, scope="module")
def registered():
    """Two transports of another package are known by their names."""
    for kind in (Shelf, Slot):
        transports.register(kind.name, f"{__name__}:{kind.__name__}", kind.__doc__)
    yield
    for kind in (Shelf, Slot):
        del transports._entries[kind.name]


class Slot(Transport):
    """A transport that has what every transport must have, and no more."""

    name = "slot"
    held = None

    def open(self, workers, params, within):
        return Handoff()

    def prepare(self, update, within):
        Slot.held = update.version, {meta.name: tensor.clone() for meta, tensor in checked(update.source)}
        return Handoff()

    @classmethod
    def join(cls, info, here, within):
        return SlotWorker()

    def check_connection(self):
        return True

    def shutdown(self):
        Slot.held = None


class SlotWorker(WorkerEnd):
    def receive(self, arrival, into, within):
        version, tensors = Slot.held
        assert version == arrival.version
        yield from tensors.items()

    def close(self):
        pass


class TestSlot(TransportContract):
    name = "slot"

    def make_trainer(self, tmp_path):
        return Slot()


class Shelf(StandaloneTransport, Mailbox, WorkerEnd):
    """A transport of another package, whose constructor knows nothing of ours."""

    name = "shelf"
    newest = None

    def __init__(self):
        self.mine = True

    @property
    def mailbox(self):
        return self

    def open(self, workers, params, within):
        return Handoff()

    def prepare(self, update, within):
        arrival = Arrival(version=update.version, params=update.source.params())
        Shelf.newest = arrival, dict(update.source)
        return Handoff()

    @classmethod
    def join(cls, info, here, within):
        return cls()

    def attend(self, within):
        return self

    def get(self, within, received=None):
        return self.newest[0]

    def receive(self, arrival, into, within):
        yield from ((meta.name, self.newest[1][meta.name]) for meta in arrival.params)

    def close(self):
        self.mine = False


def test_a_transport_whose_constructor_leaves_ours_out_sends_alone_and_to_an_engine():
    policy, served = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    Shelf().send_weights(policy)
    worker = Shelf()
    assert torch.equal(worker.receive_weights()["weight"], policy.weight)
    assert (worker.received_version, worker.timeout_s) == (1, 60.0)
    sender = tx.WeightSender(Shelf(), tx.make_engine("inprocess", engine=served))
    report = sender.update_weights(policy)
    assert report.verified and torch.equal(served.weight, policy.weight)
    sender.shutdown()
