"""What fails at either end of `IPCTransport`, and whatever the other one says: errors of ours, and nothing lost."""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis.strategies import randoms

from tests.data.group.members import Interrupted, broken
from tests.data.ipc import ipc_ends
from tests.data.ipc.ipc_ends import SMALL_BYTES, exchange, frame, joined, opened, prepared, weights
from tests.hostile import worse_bytes, worse_json
from tests.processes import calling, python, running_python
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import (
    ConfigError,
    DeadlineError,
    NotConnectedError,
    TransportError,
    WeightSyncError,
)
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.group.links import LocalListener, new_address, shared_address
from torchrl_ext.data.ipc import device_memory
from torchrl_ext.data.ipc import transport as ipc
from torchrl_ext.data.ipc.device_memory import DeviceHandle
from torchrl_ext.data.ipc.memory import HostHandle, create
from torchrl_ext.data.ipc.messages import Announce, Done, Hello, IPCLoad, Welcome
from torchrl_ext.data.ipc.worker import IPCWorker
from torchrl_ext.data.ipc.workers import ConnectedWorkers
from torchrl_ext.data.transports.base import Arrival, Update
from torchrl_ext.data.weights.source import MappingSource
from torchrl_ext.testing import WAIT_S

channel, make = ipc_ends.channel, ipc_ends.make
NOBODY = 65534


@contextmanager
def receiving(worker):
    """The block runs beside a worker that waits for a version; yields what becomes of that."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(worker.receive_weights, WAIT_S)


def no_memory(nbytes):
    raise TransportError(f"{nbytes} bytes of shared memory cannot be allocated")


class TestFailures:
    def test_failing_source_ends_the_workers_wait(self, make):
        """A source that fails ends the worker's wait, and the next send arrives."""
        trainer, worker = make(), make()
        with receiving(worker) as arriving:
            with pytest.raises(ValueError, match="the source broke"):
                trainer.send_weights(Interrupted(weights(), 30, broken))
            with pytest.raises(NotConnectedError, match=r"the trainer.*is gone"):
                arriving.result(WAIT_S)
        exchange(trainer, worker)

    def test_worker_that_stops_loading_is_named_in_the_error(self, make):
        """The trainer's error names a worker that stops loading, and the next send arrives."""
        trainer, worker = make(), make()

        def take_one():
            within = Deadline(WAIT_S)
            next(worker.attend(within).receive(worker.attend(within).next(within), {}, within))

        with ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(take_one)
            with pytest.raises(TransportError, match=rf"version 1 did not arrive: a worker \(pid {os.getpid()}"):
                trainer.send_weights(weights())
            stopping.result(WAIT_S)
        exchange(trainer, worker)

    def test_deadline_names_missing_workers_and_refused_connections(self, make):
        """The deadline's error names the ranks that did not connect and the processes that were refused."""
        with pytest.raises(DeadlineError, match=r"1 of 1 workers did not connect within 0\.2 s"):
            make(timeout_s=0.2).send_weights(weights())
        info, wait = opened(make(timeout_s=1.0), 2)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect("\0" + info["address"])
            stranger.sendall(frame(b'{"kind": "hello", "rank": []}'))
            with pytest.raises(DeadlineError, match=f"ranks 1, 2 did not connect.*pid {os.getpid()}.* is malformed"):
                wait()

    def test_two_trainers_on_one_channel_are_refused(self, make):
        first, second, worker = make(), make(), make()
        exchange(first, worker)
        with pytest.raises(TransportError, match=rf"process of this user \(pid {os.getpid()}\) already listens"):
            second.send_weights(weights())

    @pytest.mark.parametrize("how", ["stop", "close"])
    def test_a_workers_wait_can_be_ended(self, make, how):
        trainer, within = make(), Deadline(WAIT_S)
        with joined(trainer) as worker, ThreadPoolExecutor(1) as pool:
            _, arrival = prepared(trainer, weights(), within)
            receiving = pool.submit(list, worker.receive(arrival, {}, within))
            within.stop.set() if how == "stop" else worker.close()
            with pytest.raises(TransportError if how == "stop" else NotConnectedError):
                receiving.result(WAIT_S)

    def test_trainers_wait_for_an_idle_worker_can_be_ended(self, make):
        trainer, within = make(), Deadline(10 * WAIT_S)
        with joined(trainer), ThreadPoolExecutor(1) as pool:
            handoff, _ = prepared(trainer, weights(), within)
            sending = pool.submit(handoff.transfer, within)
            within.stop.set()
            with pytest.raises(TransportError, match="rank 1"):
                sending.result(WAIT_S)

    def test_a_trainer_without_memory_for_the_buffer_says_so_at_once(self, make, monkeypatch):
        monkeypatch.setattr(ipc, "create", no_memory)
        trainer, worker = make(timeout_s=10 * WAIT_S), make()
        with receiving(worker) as arriving:
            with pytest.raises(TransportError, match="4096 bytes of shared memory cannot be allocated"):
                trainer.send_weights(weights())
            worker.abort()
            assert arriving.result(WAIT_S) is None

    def test_where_memory_is_short_a_default_buffer_is_smaller(self, make, monkeypatch):
        def short(nbytes):
            return (create if nbytes <= 5 << 20 else no_memory)(nbytes)

        monkeypatch.setattr(ipc, "create", short)
        trainer, worker = make(bucket_bytes=None), make()
        exchange(trainer, worker)
        assert trainer.staging_bytes == 4 << 20

    def test_handoff_of_too_many_buckets_is_refused_by_both_ends(self, make):
        """Trainer and worker refuse a handoff of too many buckets before either of them waits."""
        trainer, within = make(), Deadline(10 * WAIT_S)
        huge = (ParamMeta("huge", torch.uint8, ((SMALL_BYTES << 19) + 1,)),)

        class Huge(MappingSource):
            def params(self):
                return huge

        with joined(trainer) as worker:
            with pytest.raises(ConfigError, match=r"1,048,577 buckets.* larger bucket_bytes"):
                trainer.prepare(Update(source=Huge({}), version=1), within)
            handoff, arrival = prepared(trainer, weights(), within)
            with ThreadPoolExecutor(1) as pool:
                sending = pool.submit(handoff.transfer, within)
                with pytest.raises(ConfigError, match="1,048,577 buckets"):
                    list(worker.receive(replace(arrival, params=huge), {}, within))
                with pytest.raises(TransportError, match=r"rank 1 .* is gone"):
                    sending.result(WAIT_S)


class TestHandles:
    def test_host_segment_is_shared_by_json_and_cannot_be_truncated(self):
        """A host segment's handle is plain JSON, its memory is shared, and no process can truncate it."""
        own = create(8192)
        other = HostHandle.from_json(json.loads(json.dumps(own.handle.to_json()))).attach()
        own.flat[5000:5003] = torch.tensor([1, 2, 3], dtype=torch.uint8)
        assert other.flat[5000:5003].tolist() == [1, 2, 3]
        with pytest.raises(PermissionError):
            os.truncate(f"/proc/self/fd/{own.handle.fd}", 0)
        for segment in (own, other):
            segment.close()
            segment.close()

    def test_a_process_that_is_gone_is_named(self):
        child = subprocess.Popen([sys.executable, "-c", ""])
        child.wait()
        with pytest.raises(TransportError, match=f"no process {child.pid}.*pid namespace"):
            HostHandle(pid=child.pid, fd=3, inode=(1, 1), bytes=128).attach()

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
    def test_another_user_is_refused_with_the_reason(self):
        with closing(create(8192)) as own:
            assert "belongs to another user" in python(calling(attaches_as_nobody, own.handle.to_json()))

    def test_a_file_that_is_not_sealed_memory_is_refused(self, tmp_path):
        (tmp_path / "file").write_bytes(bytes(128))
        with open(tmp_path / "file", "rb+") as file:
            found = os.fstat(file.fileno())
            inode = (found.st_dev, found.st_ino)
            with pytest.raises(TransportError, match="cannot be mapped here"):
                HostHandle(pid=os.getpid(), fd=file.fileno(), inode=inode, bytes=128).attach()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
class TestOtherUsers:
    def test_one_who_connects_all_the_time_keeps_nobody_waiting(self, make, channel):
        trainer, worker = make(timeout_s=WAIT_S), make()
        exchange(trainer, worker)
        with calling_as_nobody(connects_all_the_time, shared_address(channel)) as stranger:
            worker.shutdown()
            exchange(trainer, make())
            trainer.shutdown()
            with pytest.raises(DeadlineError, match="1 of 1 workers did not connect"):
                make(timeout_s=0.2).send_weights(weights())
            assert select.select([stranger.stdout], [], [], 0)[0] == []  # it still goes on

    def test_one_who_has_the_address_first_is_named_by_both_ends(self, make, channel):
        with calling_as_nobody(listens, shared_address(channel)) as stranger:
            with pytest.raises(TransportError, match=rf"user {NOBODY} \(pid {stranger.pid}\) already listens"):
                make().send_weights(weights())
            with pytest.raises(TransportError, match=rf"pid {stranger.pid}\) belongs to user {NOBODY}"):
                make().receive_weights(WAIT_S)

    def test_address_bound_by_a_process_that_does_not_listen(self, make, channel):
        """An address that another process has bound fails the send, even if that process does not listen."""
        words = "another process, perhaps of another user, already listens"
        with calling_as_nobody(binds, shared_address(channel)), pytest.raises(TransportError, match=words):
            make().send_weights(weights())


def test_a_trainer_that_may_open_no_more_files_says_so():
    assert "Too many open files" in python(calling(accepts_without_descriptors, new_address()))


def accepts_without_descriptors(address):
    with closing(LocalListener(address)) as listener, socket.socket(socket.AF_UNIX) as worker:
        worker.connect("\0" + address)
        resource.setrlimit(resource.RLIMIT_NOFILE, (worker.fileno() + 1, worker.fileno() + 1))
        try:
            listener.accept(Deadline(WAIT_S))
        except TransportError as error:
            print(error)


@contextmanager
def calling_as_nobody(function, address):
    """A process of another user that calls ``function`` beside the block; the block begins when it is at work."""
    with running_python(calling(function, address)) as stranger:
        assert stranger.stdout.readline() == "at work\n"
        yield stranger


def binds(address, listening=False):
    os.setuid(NOBODY)
    with socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.bind("\0" + address)
        if listening:
            endpoint.listen()
        print("at work", flush=True)
        sys.stdin.read()


def listens(address):
    binds(address, listening=True)


def connects_all_the_time(address):
    """For half a minute, and a little longer after it has said so, which whoever waits for its end can read."""
    os.setuid(NOBODY)
    print("at work", flush=True)
    for within in (Deadline(30.0), Deadline(0.5)):
        while not within.over:
            with socket.socket(socket.AF_UNIX) as endpoint, suppress(OSError):
                endpoint.setblocking(False)
                endpoint.connect("\0" + address)
        print("ended", flush=True)


def attaches_as_nobody(handle):
    os.setuid(NOBODY)
    try:
        HostHandle.from_json(handle).attach()
    except TransportError as error:
        print(error)


class TestMemoryOfADevice:
    """Torch's sharing is played by its arguments, so that a machine without a GPU tells too."""

    SHARED = (b"handle", 8192, 512, False, b"counter", 3, b"event", True)

    @pytest.fixture
    def played(self, monkeypatch):
        rebuilt, empty = [], torch.empty
        monkeypatch.setattr(device_memory, "accelerator", lambda: "cuda")
        monkeypatch.setattr(device_memory, "uuids", lambda: ["GPU-0"])
        monkeypatch.setattr(torch, "empty", lambda *size, device, **how: empty(*size, **how))
        monkeypatch.setattr(device_memory, "reduce_tensor", lambda flat: (None, (None, *self.SHARED)))
        monkeypatch.setattr(device_memory, "rebuild_cuda_tensor", lambda *given: rebuilt.append(given) or empty(8192))
        return rebuilt

    def test_cuda_handle_is_rebuilt_in_another_process_only(self, played):
        """Another process rebuilds the CUDA memory from its handle; the process that owns it maps nothing."""
        own = device_memory.create_on("GPU-0", 8192)
        handle = DeviceHandle.from_json(json.loads(json.dumps(own.handle.to_json())))
        assert handle.attach().flat is own.flat and not played
        msgspec.structs.replace(handle, key="another process's").attach()
        assert played[0][7:] == self.SHARED


# whatever arrives from the other end


def plain(message):
    """A message as the JSON object that travels."""
    return json.loads(json.dumps(message.to_json()))


def line(draw, message):
    """A message on the wire, damaged in one of several ways."""
    data = frame(b"[" * 10_000 if draw.random() < 0.01 else json.dumps(worse_json(message, draw)).encode())
    return worse_bytes(data, draw) if draw.random() < 0.1 else data


def offered(draw, message):
    """What a control layer hands over is a map at least."""
    found = worse_json(message, draw)
    return found if isinstance(found, dict) else {}


PARAMS = (ParamMeta("a", torch.float32, (3,)), ParamMeta("b", torch.uint8, (2, 3)))
LOAD = IPCLoad(session="s", handoff=3)


def send(draw, stranger, first, others):
    """Send a first message, which is sound half of the time, and then damaged ones, or none after a damaged one."""
    with suppress(OSError):  # the other end had enough
        if draw.random() < 0.5:
            stranger.sendall(line(draw, plain(first)))
        else:
            stranger.sendall(frame(json.dumps(plain(first)).encode()))
            yield
            stranger.sendall(b"".join(line(draw, plain(one)) for one in draw.choices(others, k=3)))
        stranger.shutdown(socket.SHUT_WR)
    yield


@given(randoms(use_true_random=False))
def test_a_trainer_takes_any_hello_and_any_answer(draw):
    address = new_address()
    with (
        closing(create(8192)) as segment,
        closing(ConnectedWorkers(address, "s", lambda devices: segment)) as connected,
        socket.socket(socket.AF_UNIX) as stranger,
    ):
        stranger.connect("\0" + address)
        for _ in send(draw, stranger, Hello(rank=1, devices=["cpu"]), (Done(handoff=3, bucket=1),)):
            with suppress(WeightSyncError):
                connected.wait_for(1, Deadline(0.0), [1])
                connected.begin(3)
            with suppress(WeightSyncError):
                connected.await_taken(1, Deadline(0.0))


@given(randoms(use_true_random=False))
def test_a_worker_takes_any_message_of_a_trainer(draw):
    worker = IPCWorker(address := new_address(), lambda: ["cpu"])
    orders = (Announce(version=1, params=PARAMS, load=LOAD), Done(handoff=3, bucket=0))
    with closing(create(8192)) as segment, closing(worker), socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + address)
        listener.listen()
        with suppress(DeadlineError):
            worker.enter("s", Deadline(0.0))  # connects, and hears nothing yet
        with listener.accept()[0] as stranger:
            for _ in send(draw, stranger, Welcome(session="s", segment=segment.handle), orders):
                info = draw.choice([plain(LOAD), offered(draw, plain(LOAD))])
                arrival = Arrival(version=1, params=PARAMS, info=info)
                with suppress(WeightSyncError):
                    worker.enter("s", Deadline(0.0))
                    arrival = draw.choice([arrival, worker.next(Deadline(0.0)) or arrival])
                with suppress(WeightSyncError):
                    list(worker.receive(arrival, {}, Deadline(0.0)))


@given(randoms(use_true_random=False))
def test_any_handle_is_an_error_or_what_it_says(draw):
    with closing(create(8192)) as segment:
        before = len(os.listdir("/proc/self/fd"))
        with suppress(WeightSyncError):
            HostHandle.from_json(worse_json(plain(segment.handle), draw)).attach().close()
        assert len(os.listdir("/proc/self/fd")) == before
