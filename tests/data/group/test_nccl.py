"""NCCL over a stand-in for its package: the contract of carriers, and what is its own: errors that come by themselves,
streams, memory after an abort, and its environment."""

import gc
import os
import sys
import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from tests.data.group import fake_nccl
from tests.data.group.contract import MIB, CarrierContract, arrived
from tests.data.group.members import SHORT_S, WAIT_S, beside
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import DeadlineError, TransportError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.group import nccl
from torchrl_ext.data.group.buckets import Packer
from torchrl_ext.data.group.carrier import DEVICE
from torchrl_ext.data.group.group import Group
from torchrl_ext.data.group.nccl import NcclCarrier
from torchrl_ext.data.transports import collective, native
from torchrl_ext.data.transports.base import Worker
from torchrl_ext.data.transports.collective import Incoming, buckets_of, send_buckets
from torchrl_ext.data.transports.native import NativeTransport

CPU = torch.device("cpu")


class TestNccl(CarrierContract):
    backend = "nccl"

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def world(cls, class_patch):
        return fake_nccl.install(class_patch)

    def carrier(self, seat):
        return NcclCarrier(seat)


KIT = TestNccl()


@pytest.fixture
def fabric(monkeypatch):
    return fake_nccl.install(monkeypatch)


@contextmanager
def met(size=2, **how):
    """Ends of a group, of which ranks 0 and 1 have exchanged a byte: their connection is there."""
    with KIT.groups(size, **how) as ends:
        KIT.carry(*ends[:2], nbytes=1)
        yield ends


# errors


def test_an_asynchronous_error_ends_the_wait_in_nccls_words(fabric):
    with met() as (first, _):
        work = first.receive(KIT.blank(9), 1)
        assert first.carrier.error() == ""
        first.carrier._communicator.failed = fake_nccl.REMOTE_ERROR
        words = r"from rank 1 \(pid 1001\): NCCL reports remote process exited.*\(socket closed\)"
        with pytest.raises(TransportError, match=words):
            first.wait(work)
        with pytest.raises(TransportError, match=r"to rank 1 \(pid 1001\): NCCL failed: remote process exited"):
            first.send(KIT.filled(9), 1)
    with met():
        pass  # the process lives, and the next group forms


def test_what_an_abort_cuts_short_has_not_landed(fabric):
    """Its stream goes on as if it had."""
    with met() as (first, _):
        work = first.receive(KIT.blank(9), 1)
        first.carrier.abort()
        fabric.until(lambda: first.carrier.arrives(work, 0.1))
        assert "aborted" in str(work.failure) and work.landed == 0


@pytest.mark.parametrize("how", ["error", "deadline", "stop"])
def test_a_communicator_that_does_not_form_is_aborted(fabric, monkeypatch, how):
    with KIT.seats(2, SHORT_S if how == "deadline" else WAIT_S) as seats:
        error, words = TransportError, r"formed no communicator .* an abort, ended the wait"
        if how == "error":
            communicator = sys.modules["nccl"].core.Communicator
            monkeypatch.setattr(communicator, "get_async_error", lambda self: fake_nccl.REMOTE_ERROR)
            words = "NCCL reports remote process"
        elif how == "stop":
            threading.Timer(0.2, seats[0].within.stop.set).start()
        else:
            error, words = DeadlineError, "NCCL formed no communicator with the other end within 1 s"
        with pytest.raises(error, match=words):
            Group.form(seats[0], NcclCarrier)
        fabric.until(lambda: fabric.seen[0] == ["abort"])


@pytest.mark.parametrize("left", ["no hex", 7, "00ff"])
def test_a_damaged_unique_id_is_refused(left, fabric):
    with KIT.seats(2) as seats:
        seats[0].store.set("group/nccl", left)
        with pytest.raises(TransportError, match=r"rank 0 left .* 128 bytes|buffer length must be 128 bytes"):
            Group.form(seats[1], NcclCarrier)


# streams and memory


def test_bytes_are_read_behind_what_the_caller_queued(fabric):
    """On a stream of the carrier's own; and what the caller queues after the wait runs behind the transfer."""
    go = threading.Event()
    with met() as (first, second):
        flat, read, stream = KIT.blank(9), KIT.blank(9), nccl.cuda.current_stream()
        stream.put(go.wait)
        stream.put(lambda: flat.fill_(7))
        work = first.broadcast(flat)
        lands = second.broadcast(read)
        assert not first.carrier.arrives(work, 0.2)
        go.set()
        landed = work.handle
        first.wait(work)
        second.wait(lands)
        assert int(read[0]) == 7
        assert first.carrier._stream is not stream and stream.waited[-2] is landed


def test_a_large_tensor_travels_uncut_between_devices(fabric):
    meta = ParamMeta("large", torch.uint8, (20 * MIB,))
    buckets = buckets_of((meta,), 256 * MIB, DEVICE)
    with met() as (first, second):
        del fabric.seen[0][:]
        packer = Packer((meta,), iter([(meta, KIT.filled(20 * MIB))]))
        sends = lambda: send_buckets(first, buckets, packer, bucket_bytes=256 * MIB)  # noqa: E731
        incoming = Incoming(second, buckets, (meta,), {}, bucket_bytes=256 * MIB)
        _, received = beside(sends, lambda: dict(incoming.pairs()))
        assert arrived(received["large"], 0)
        assert fabric.seen[0] == [[("broadcast", None)]]


def test_memory_is_held_until_an_abort_is_over(fabric, monkeypatch):
    """A kernel of NCCL's may write it until then, when the caller has long dropped it."""
    ended, abort = threading.Event(), sys.modules["nccl"].core.Communicator.abort
    with met() as (first, _):
        flat = KIT.blank(9)
        memory = weakref.ref(flat)
        work = first.receive(flat, 1)
        communicator = sys.modules["nccl"].core.Communicator
        monkeypatch.setattr(communicator, "abort", lambda self: (ended.wait(WAIT_S), abort(self)))
        first.sever()
        del flat, work
        gc.collect()
        assert memory() is not None
        ended.set()
        fabric.until(lambda: memory() is None)


# the environment


@pytest.fixture
def pinned(monkeypatch):
    """A vLLM that pins variables of NCCL's for its own communicators, as its `vllm.utils.nccl` does."""
    monkeypatch.setenv("NCCL_PROTO", "Simple")
    monkeypatch.setenv("NCCL_ALGO", "ring,tree;allreduce:tree")

    @contextmanager
    def unpinned_nccl_env():
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("NCCL_PROTO", raising=False)
            patch.setenv("NCCL_ALGO", "ring")
            yield

    monkeypatch.setitem(sys.modules, "vllm.utils.nccl", SimpleNamespace(unpinned_nccl_env=unpinned_nccl_env))


def test_communicators_form_without_what_vllm_pins(pinned, fabric, monkeypatch):
    seen, core = [], sys.modules["nccl"].core
    initialize, get_unique_id = core.Communicator.initialize, core.get_unique_id

    def note():
        seen.append((os.environ.get("NCCL_PROTO"), os.environ["NCCL_ALGO"]))

    monkeypatch.setattr(core.Communicator, "initialize", lambda *args: (note(), initialize(*args)))
    monkeypatch.setattr(core, "get_unique_id", lambda: (note(), get_unique_id())[1])
    with KIT.seats(1) as seats:
        Group.form(seats[0], NcclCarrier).sever()
    assert seen == [(None, "ring")] * 2
    assert os.environ["NCCL_PROTO"] == "Simple"


# the wire of stock vLLM


@contextmanager
def meetings(make):
    """A trainer that invites a worker of this make, and what forms the ends of their group."""
    trainer = NativeTransport(make, device=CPU, backend="nccl", timeout_s=WAIT_S)
    opening = trainer.open(1, (), Deadline(WAIT_S))
    join = lambda: NativeTransport.join(opening.info, Worker(rank=1), Deadline(WAIT_S))  # noqa: E731
    yield trainer, opening, join
    trainer.shutdown()


@pytest.fixture(autouse=True)
def any_device(monkeypatch):
    """Have NCCL carry what is on the host."""
    for module in (native, collective):
        monkeypatch.setattr(module, "choose_backend", lambda device, backend: (CPU, backend))


def test_a_group_with_stock_vllm_is_carried_by_the_package(fabric):
    with meetings("vllm") as (trainer, opening, join):
        assert len(opening.info["group"]["nccl_unique_id_b64"]) == 172  # base64 of 128 bytes
        _, worker = beside(lambda: opening.transfer(Deadline(WAIT_S)), join)
        groups = [end.member.group(Deadline(WAIT_S)) for end in (trainer, worker)]
        assert {type(group.carrier) for group in groups} == {NcclCarrier}
        flats = [KIT.filled(9), KIT.blank(9)]
        moves = [lambda pair=pair: pair[0].wait(pair[0].broadcast(pair[1])) for pair in zip(groups, flats, strict=True)]
        assert beside(*moves) == [None, None]
        assert arrived(flats[1], 0)
        worker.close()


def test_a_group_with_stock_sglang_stays_with_torch(fabric, monkeypatch):
    made = []
    monkeypatch.setattr(native, "TorchCarrier", lambda seat, store: made.append(store) or SimpleNamespace(abort=list))
    with meetings("sglang") as (trainer, opening, _):
        assert "nccl_unique_id_b64" not in opening.info["group"]
        opening.transfer(Deadline(WAIT_S))
        assert len(made) == 1 and trainer.check_connection()
