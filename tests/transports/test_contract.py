"""Every registered transport passes the same suite."""

from __future__ import annotations

import pytest
import torch

import torchrl_ext as tx
from torchrl_ext.registry import transports
from torchrl_ext.testing import SMALL_BYTES, WAIT_S, Ends, StandaloneContract, TransportContract, free_port
from torchrl_ext.transports.base import Arrival, Handoff, Transport, WorkerEnd
from torchrl_ext.transports.standalone import Mailbox, StandaloneTransport
from torchrl_ext.weights.source import checked


class TestMemory(StandaloneContract):
    name = "memory"

    def make_ends(self, tmp_path):
        return Ends(
            tx.make_transport("memory", channel=str(tmp_path)), tx.make_transport("memory", channel=str(tmp_path))
        )

    def make_trainer(self, tmp_path):
        return tx.make_transport("memory")


class TestIPC(StandaloneContract):
    name = "ipc"

    def make_ends(self, tmp_path):
        return Ends(*(tx.make_transport("ipc", channel=str(tmp_path), bucket_bytes=SMALL_BYTES) for _ in range(2)))

    def make_trainer(self, tmp_path):
        return tx.make_transport("ipc", bucket_bytes=SMALL_BYTES)


class TestDisk(StandaloneContract):
    name = "disk"

    def make_ends(self, tmp_path):
        return Ends(
            tx.make_transport("disk", root=tmp_path / "root", shard_bytes=SMALL_BYTES),
            tx.make_transport("disk", root=tmp_path / "root"),
        )

    def make_trainer(self, tmp_path):
        return tx.make_transport("disk", root=tmp_path, shard_bytes=SMALL_BYTES)


class TestDelta(StandaloneContract):
    name = "delta"
    encoding = "auto"
    keyframe_every = 2

    def make_ends(self, tmp_path):
        return Ends(self.make_trainer(tmp_path / "root"), tx.make_transport("delta", root=tmp_path / "root"))

    def make_trainer(self, tmp_path):
        return tx.make_transport(
            "delta",
            root=tmp_path,
            encoding=self.encoding,
            keyframe_every=self.keyframe_every,
            shard_bytes=SMALL_BYTES,
        )


class TestDeltaInFlushFiles(TestDelta):
    encoding = "deltas_zstd"
    keyframe_every = 0


class TestDeltaInWholeFiles(TestDelta):
    encoding = "xor"
    keyframe_every = 0


class InGroup(StandaloneContract):
    """Ends that meet in a group of two."""

    def make_ends(self, tmp_path):
        port = free_port()
        return Ends(*(self.make_member(rank, port) for rank in (0, 1)), in_group=True)

    def make_trainer(self, tmp_path):
        return self.make_member(0, free_port())


class TestCollective(InGroup):
    name = "collective"

    def make_member(self, rank, port):
        return tx.make_transport(
            "collective",
            master_address="127.0.0.1",
            master_port=port,
            rank=rank,
            world_size=2,
            bucket_bytes=SMALL_BYTES,
            timeout_s=WAIT_S,
        )


class TestNativeSGLang(InGroup):
    name = "native"
    speaks = "sglang"

    def make_member(self, rank, port):
        return tx.make_transport(
            "native",
            make=self.speaks,
            backend="gloo",
            master_port=port,
            rank=rank,
            world_size=2,
            bucket_bytes=SMALL_BYTES,
            timeout_s=WAIT_S,
        )


class TestNativeVLLM(TestNativeSGLang):
    speaks = "vllm"


class TestSharded(InGroup):
    name = "sharded"

    def make_member(self, rank, port):
        return tx.make_transport(
            "sharded",
            master_address="127.0.0.1",
            master_port=port,
            worker=None if rank == 0 else 0,
            workers=1,
            bucket_bytes=SMALL_BYTES,
            timeout_s=WAIT_S,
        )


class TestDeltaByBroadcast(InGroup):
    name = "delta"

    def make_member(self, rank, port):
        return tx.make_transport(
            "delta", carrier="collective", master_port=port, rank=rank, world_size=2, timeout_s=WAIT_S
        )


def test_every_registered_transport_is_under_the_contract():
    suites = [*StandaloneContract.__subclasses__(), *InGroup.__subclasses__()]
    covered = {suite.name for suite in suites if suite is not InGroup}
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
