"""Carriers over torch's backends under the contract, and which carrier a device gets."""

import sys
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.data.group import fake_nccl
from tests.data.group.contract import MIB, CarrierContract
from tests.data.group.members import WAIT_S, beside, meet, place
from tests.processes import calling, finished
from torchrl_ext.base.deadline import in_thread
from torchrl_ext.base.devices import backend_of
from torchrl_ext.base.errors import ConfigError
from torchrl_ext.control.serving.processes import free_port
from torchrl_ext.data.group import backends, nccl
from torchrl_ext.data.group.backends import GlooCarrier, TorchCarrier, carrier_of, choose_backend
from torchrl_ext.data.group.carrier import HOST
from torchrl_ext.data.group.nccl import NcclCarrier
from torchrl_ext.data.transports.collective import VLLMCollectiveTransport

CPU = torch.device("cpu")


# gloo


class TestGloo(CarrierContract):
    any_order = True

    def carrier(self, seat):
        return GlooCarrier(seat)


def leaves(how):
    port = free_port()
    members = [place(port) for _ in range(2)]
    first, _ = beside(lambda: meet(members[0], 0), lambda: meet(members[1], 1))
    blank = [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in (64 * MIB, 8)]
    works = [first.send(blank[0], 1), first.receive(blank[1], 1)]  # noqa: F841 - kept, and never waited for
    print("left", flush=True)
    if how == "exit":
        sys.exit(3)
    for member in members:
        member.close()


@pytest.mark.parametrize(("how", "status"), [("exit", 3), ("close", 0)])
def test_a_process_that_leaves_transfers_half_way_ends_in_peace(how, status):
    done = finished(calling(leaves, how))
    assert (done.stdout, done.returncode) == ("left\n", status), done.stderr[-2000:]


# torch's NCCL, with gloo in its place


class Played:
    """What NCCL is to torch: coalesced sends, and works that complete by themselves."""

    Options = SimpleNamespace

    def __init__(self, store, rank, size, _):
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=WAIT_S)
        self._own, self._block = dist.ProcessGroupGloo(store, rank, size, options), None

    def broadcast(self, flat, root):
        return Work([self._own.broadcast(flat, root)])

    def allreduce(self, tensors):
        return Work([self._own.allreduce(tensors)])

    def _start_coalescing(self):
        self._block = []

    def send(self, tensors, peer, tag):
        self._block.append(self._own.send(tensors, peer, tag))

    def recv(self, tensors, peer, tag):
        self._block.append(self._own.recv(tensors, peer, tag))

    def _end_coalescing(self):
        return Work(self._block)

    def abort(self):
        backends._close_connections(self._own, 1)


class Work:
    def __init__(self, works):
        self._over = [in_thread(lambda work=work: work.wait(timedelta(seconds=WAIT_S)), "work") for work in works]

    def is_completed(self):
        return all(one.done() for one in self._over) or any(one.done() and one.exception() for one in self._over)

    def wait(self):
        for one in self._over:
            if one.done():
                one.result()


class TestTorch(CarrierContract):
    backend = "nccl"

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def world(cls, class_patch):
        class_patch.setattr(dist, "ProcessGroupNCCL", Played, raising=False)

    def carrier(self, seat):
        return TorchCarrier(seat)

    def test_the_first_transfer_is_read_behind_its_callers_stream(self, monkeypatch):
        """It begins in another thread, since torch forms a communicator then, without a deadline."""
        seen = []
        monkeypatch.setattr(backends, "recorded", lambda devices: ("point of", threading.get_ident(), [*devices]))
        monkeypatch.setattr(backends, "wait_for", lambda point: seen.append((point, threading.get_ident())))
        with self.groups(size=2):
            for (_, caller, devices), reader in seen:
                assert devices == [CPU] and caller != reader
            assert len(seen) == 2

    def test_torchs_store_lies_behind_the_secret(self, monkeypatch):
        """No open store of torch's is made; and NCCL's monitor, which asks for ever, hears of nothing."""
        monkeypatch.setattr(dist, "TCPStore", None)
        with self.groups(size=2) as (_, second):
            store = second.carrier._store
            store.set("0", bytes(range(128, 256)))
            assert store.get("0") == bytes(range(128, 256)) and store.check(["0"])
        assert not store.check(["exception_dump"])

    def test_a_user_is_warned_of_torchs_watchdog(self, monkeypatch, caplog):
        monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
        backends._warn_of_the_watchdog.cache_clear()
        with self.groups(size=2):
            (warning,) = {one.message for one in caplog.records if "watchdog" in one.message}
        assert "ends this process" in warning and "torchrl_ext[nccl]" in warning


# which carrier


@pytest.mark.parametrize(("device", "backend"), [("cuda", "nccl"), ("xpu", "gloo"), ("cpu", "gloo")])
def test_each_device_has_the_backend_of_its_vendor(device, backend):
    assert backend_of(SimpleNamespace(type=device)) == backend  # a torch without the vendor's names knows not all


def test_gloo_copies_through_the_host_and_others_do_not():
    for asked in (("cpu", None), (None, "gloo"), (None, None), ("meta", None), ("cuda:7", "gloo")):
        assert choose_backend(*asked) == (CPU, "gloo")
    for asked, words in (("cpu", "nccl"), "nccl cannot move tensors on cpu"), ((None, "mpi"), "no .* backend 'mpi'"):
        with pytest.raises(ConfigError, match=words):
            choose_backend(*asked)
    assert VLLMCollectiveTransport(device="cpu").bucket_bytes == HOST.bucket_bytes


def test_nccl_is_carried_by_its_own_package_where_it_can_be(monkeypatch):
    assert nccl.package() is None  # here
    assert [carrier_of(name) for name in ("gloo", "nccl")] == [GlooCarrier, TorchCarrier]
    fake_nccl.install(monkeypatch)
    assert carrier_of("nccl") is NcclCarrier
    library = sys.modules["nccl"].core.get_version().libnccl
    monkeypatch.setattr(library.version, "release", (2, 21, 5))  # without a call that the package makes
    assert carrier_of("nccl") is TorchCarrier
    monkeypatch.setattr(sys.modules["nccl"].core, "get_version", lambda: SimpleNamespace(libnccl=None))
    assert carrier_of("nccl") is TorchCarrier
