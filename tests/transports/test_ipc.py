"""`IPCTransport` beyond the contract: other processes, deaths at every step, hostile messages, memory."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import torchrl_ext as tx
from tests.processes import python, running_python
from tests.transports.contract import WAIT_S, any_bits, same_bits
from torchrl_ext.cli.bench import track_peak
from torchrl_ext.errors import (
    ConfigError,
    DeadlineError,
    IntegrityError,
    NotConnectedError,
    TransportError,
    WeightSyncError,
)
from torchrl_ext.transports.links import shared_address
from torchrl_ext.transports.segments import attach, create
from torchrl_ext.transports.staging import Lander, Packer, stage_layout
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.source import MappingSource, checked

SMALL_BYTES = 4096

WORKER = """
import sys
import torch, torchrl_ext as tx
worker = tx.make_transport("ipc", channel=sys.argv[1], timeout_s=60)
print("up", flush=True)
while True:
    received = worker.receive_weights(60)
    if received is None:
        break
    print(worker.received_version, int(sum(tensor.sum() for tensor in received.values())), flush=True)
"""
FROZEN_WORKER = """
import os, signal, sys
import torch, torchrl_ext as tx
worker = tx.make_transport("ipc", channel=sys.argv[1], timeout_s=60)
print("up", flush=True)
info = worker.poll(60)
for index, _ in enumerate(worker.receive(info, {})):
    if index == int(sys.argv[3]):
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""
FATAL_TRAINER = """
import os, signal, sys
import torch, torchrl_ext as tx
from torchrl_ext.weights.source import MappingSource
class Fatal(MappingSource):
    def __iter__(self):
        for index, pair in enumerate(super().__iter__()):
            if index == int(sys.argv[3]):
                os.kill(os.getpid(), getattr(signal, sys.argv[2]))
            yield pair
trainer = tx.make_transport("ipc", channel=sys.argv[1], bucket_bytes=4096, timeout_s=60)
trainer.send_weights(Fatal({f"{i:02d}": torch.ones(300) for i in range(40)}))
os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""


@pytest.fixture
def channel(tmp_path):
    return str(tmp_path)


@pytest.fixture
def make(channel):
    made = []

    def end(**settings):
        made.append(tx.make_transport("ipc", channel=channel, **{"bucket_bytes": SMALL_BYTES, **settings}))
        return made[-1]

    yield end
    for transport in made:
        transport.shutdown()
    assert everywhere() == []


def weights(value=1.0, count=40):
    return {f"{i:02d}": torch.full((300,), float(value)) for i in range(count)}


def everywhere():
    """Staging buffers that any process of this user holds open or maps, other than those of tests beside this one."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and _related(int(process.name)):
            try:
                names = [os.readlink(path) for path in (process / "fd").iterdir()]
                names += [line for line in (process / "maps").read_text().splitlines()]
            except OSError:
                continue
            found += [(process.name, name) for name in names if "memfd:torchrl_ext" in name]
    return found


def _related(pid):
    """This process, or one that it started."""
    while pid > 1:
        if pid == os.getpid():
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False


class TestBetweenProcesses:
    def test_several_workers_take_the_same_buffer(self, make, channel):
        trainer = make(workers=3)
        with (
            running_python(WORKER, channel) as a,
            running_python(WORKER, channel) as b,
            running_python(WORKER, channel) as c,
        ):
            for version in (1, 2, 3):
                trainer.send_weights(weights(version))
            assert len(trainer._segments) == 1
            for child in (a, b, c):
                assert child.stdout.readline() == "up\n"
                for version in (1, 2, 3):
                    assert child.stdout.readline() == f"{version} {version * 12000}\n"

    def test_a_worker_that_comes_late_gets_the_next_version(self, make, channel):
        trainer = make()
        with running_python(WORKER, channel) as first:
            trainer.send_weights(weights(1))
            with running_python(WORKER, channel) as second:
                assert second.stdout.readline() == "up\n"
                trainer._count = 2
                trainer.send_weights(weights(2))
                assert second.stdout.readline() == "2 24000\n"
            assert [first.stdout.readline() for _ in range(3)][-1] == "2 24000\n"

    def test_a_worker_outlives_its_trainer_and_follows_the_next(self, make, channel):
        with running_python(WORKER, channel) as child:
            for value in (1, 2):
                trainer = make()
                trainer.send_weights(weights(value))
                trainer.shutdown()
            assert [child.stdout.readline() for _ in range(3)] == ["up\n", "1 12000\n", "1 24000\n"]

    def test_a_forked_child_keeps_nothing_of_its_parent_alive(self, make, channel):
        trainer = make()
        with running_python(WORKER, channel):
            trainer.send_weights(weights())
            leave, wait = os.pipe(), os.pipe()
            pid = os.fork()
            if pid == 0:
                os.write(wait[1], b"x")
                os.read(leave[0], 1)
                os._exit(0)
            os.read(wait[0], 1)
            held = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
            maps = Path(f"/proc/{pid}/maps").read_text()
            os.write(leave[1], b"x")
            os.waitpid(pid, 0)
            for end in (*leave, *wait):
                os.close(end)
        assert not [name for name in held if "memfd:torchrl_ext" in name]
        assert "memfd:torchrl_ext" not in maps


@pytest.mark.parametrize("at", [0, 20, 39])
class TestDeaths:
    def test_a_trainer_that_is_killed_frees_the_buffer_and_the_worker_says_so(self, make, channel, at):
        worker = make(timeout_s=WAIT_S)
        with running_python(FATAL_TRAINER, channel, "SIGKILL", at) as child:
            with pytest.raises(WeightSyncError, match=r"the trainer.*is gone"):
                worker.receive_weights(WAIT_S)
            child.wait(WAIT_S)  # a dying process closes its sockets before its other files
            assert everywhere() == []
        assert worker.receive_weights(0.0) is None
        trainer = make()
        with ThreadPoolExecutor(1) as pool:
            arriving = pool.submit(worker.receive_weights, WAIT_S)
            trainer.send_weights(weights(5))
            assert arriving.result(WAIT_S)["00"][0] == 5

    def test_a_worker_that_is_killed_is_named_and_the_others_have_everything(self, make, channel, at):
        trainer = make(workers=2, timeout_s=WAIT_S)
        with running_python(WORKER, channel) as good, running_python(FROZEN_WORKER, channel, "SIGKILL", at) as bad:
            assert [child.stdout.readline() for child in (good, bad)] == ["up\n", "up\n"]
            if at == 39:  # it had every byte by then
                trainer.send_weights(weights())
            else:
                with pytest.raises(TransportError, match=rf"not taken by a worker \(pid {bad.pid}\)"):
                    trainer.send_weights(weights())
            assert good.stdout.readline() == "1 12000\n"
            trainer._count = 1
            trainer.send_weights(weights(2))
            assert good.stdout.readline() == "2 24000\n"


def test_what_a_trainer_said_before_it_died_is_forgotten_with_it(make, channel):
    """It let the worker in and announced a version, and its buffer was gone before the worker looked."""
    segment, ended = create("cpu", 2 * SMALL_BYTES), subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(WAIT_S)
    welcome = {"session": "x", "segment": {**segment.handle, "pid": ended.pid}}
    announce = {"session": "x", "version": 1, "handoff": 1, "params": []}
    worker = make()
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind("\0" + shared_address(channel))
        listener.listen()
        receiving = pool.submit(worker.receive_weights, WAIT_S)
        with listener.accept()[0] as dying:
            dying.sendall(
                b"".join(json.dumps(said).encode() + b"\n" for said in ({"welcome": welcome}, {"announce": announce}))
            )
            with pytest.raises(TransportError, match="the trainer is gone"):
                receiving.result(WAIT_S)
    assert worker.receive_weights(0.0) is None and not worker.check_connection()
    trainer = make()
    with ThreadPoolExecutor(1) as pool:
        arriving = pool.submit(worker.receive_weights, WAIT_S)
        trainer.send_weights(weights(5))
        assert arriving.result(WAIT_S)["00"][0] == 5


def test_a_worker_that_freezes_is_disconnected_at_the_deadline(make, channel):
    trainer = make(workers=2, timeout_s=5)
    with running_python(WORKER, channel) as good, running_python(FROZEN_WORKER, channel, "SIGSTOP", 20) as bad:
        assert [child.stdout.readline() for child in (good, bad)] == ["up\n", "up\n"]
        with pytest.raises(TransportError, match=rf"pid {bad.pid}\): it did not take bucket"):
            trainer.send_weights(weights())
        assert good.stdout.readline() == "1 12000\n"


def test_a_trainer_that_freezes_is_named_at_the_workers_deadline(make, channel):
    worker = make(timeout_s=1)
    with running_python(FATAL_TRAINER, channel, "SIGSTOP", 20) as child:
        with pytest.raises(DeadlineError, match=rf"pid {child.pid}\) did not fill bucket"):
            worker.receive_weights(WAIT_S)
        child.send_signal(signal.SIGCONT)


class TestFailures:
    def test_a_source_that_fails_tells_the_worker_and_the_next_send_arrives(self, make):
        class Broken(MappingSource):
            def __iter__(self):
                for index, pair in enumerate(super().__iter__()):
                    if index == 30:
                        raise ValueError("the gather failed")
                    yield pair

        trainer, worker = make(), make()
        with ThreadPoolExecutor(1) as pool:
            arriving = pool.submit(worker.receive_weights, WAIT_S)
            with pytest.raises(ValueError, match="the gather failed"):
                trainer.send_weights(Broken(weights()))
            with pytest.raises(TransportError, match="stopped: ValueError: the gather failed"):
                arriving.result(WAIT_S)
            arriving = pool.submit(worker.receive_weights, WAIT_S)
            trainer.send_weights(weights(3))
            assert arriving.result(WAIT_S)["39"][0] == 3

    def test_a_worker_that_stops_loading_is_named_and_stays_connected(self, make):
        trainer, worker = make(), make()

        def take_one():
            for _ in worker.receive(worker.poll(WAIT_S), {}):
                break

        with ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(take_one)
            with pytest.raises(TransportError, match="it stopped loading after '00'"):
                trainer.send_weights(weights())
            stopping.result(WAIT_S)
            arriving = pool.submit(worker.receive_weights, WAIT_S)
            trainer.send_weights(weights(2))
            assert arriving.result(WAIT_S)["00"][0] == 2

    def test_nobody_there_is_an_error_at_the_deadline(self, make):
        with pytest.raises(DeadlineError, match=r"1 of 1 workers did not connect within 0\.2 s"):
            make(timeout_s=0.2).send_weights(weights())

    def test_ranks_that_do_not_come_are_named(self, make):
        with pytest.raises(DeadlineError, match="ranks 1, 2 did not connect"):
            make(timeout_s=0.2).open(2, ()).transfer()

    def test_two_trainers_on_one_channel_are_refused(self, make):
        first, second, worker = make(), make(), make()
        with ThreadPoolExecutor(1) as pool:
            arriving = pool.submit(worker.receive_weights, WAIT_S)
            first.send_weights(weights())
            arriving.result(WAIT_S)
        with pytest.raises(TransportError, match="another trainer of this user sends on this channel"):
            second.send_weights(weights())

    def test_abort_ends_a_workers_wait(self, make):
        trainer, worker = make(), make()
        info = {**trainer.open(1, ()).info, "rank": 1}
        with ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(worker.join, info)
            trainer._crew.admit(1)
            waiting.result(WAIT_S)
            (handoff,) = trainer.prepare(MappingSource(weights()), 1)
            receiving = pool.submit(list, worker.receive(handoff.info, {}))
            worker.abort()
            with pytest.raises(NotConnectedError):
                receiving.result(WAIT_S)

    def test_abort_ends_a_trainers_wait_for_a_worker_that_does_nothing(self, make):
        trainer, worker = make(timeout_s=WAIT_S), make()
        opening = trainer.open(1, ())
        with ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(opening.transfer)
            worker.join({**opening.info, "rank": 1})
            waiting.result(WAIT_S)
            (handoff,) = trainer.prepare(MappingSource(weights()), 1)
            sending = pool.submit(handoff.transfer)
            trainer.abort()
            with pytest.raises(TransportError, match="rank 1"):
                sending.result(WAIT_S)

    @pytest.mark.parametrize("settings", [{"bucket_bytes": 100}, {"workers": 0}, {"timeout_s": 0}])
    def test_settings_that_cannot_work_are_refused(self, settings):
        with pytest.raises(ConfigError):
            tx.IPCTransport(**settings)


class TestHandles:
    def test_a_segment_is_plain_json_and_shows_what_is_written(self):
        own = create("cpu", 8192)
        other = attach(json.loads(json.dumps(own.handle)))
        own.flat[5000:5003] = torch.tensor([1, 2, 3], dtype=torch.uint8)
        assert other.flat[5000:5003].tolist() == [1, 2, 3]
        for segment in (own, other):
            segment.close()
            segment.close()

    def test_nobody_can_cut_a_segment_that_others_map(self):
        own = create("cpu", 8192)
        with pytest.raises(PermissionError):
            os.truncate(f"/proc/self/fd/{own.handle['fd']}", 0)
        own.close()

    @pytest.mark.parametrize(
        "change",
        [
            {"inode": [0, 0]},
            {"bytes": 4096},
            {"bytes": 1 << 50},
            {"bytes": -1},
            {"bytes": True},
            {"pid": "1/../self"},
            {"fd": None},
            {"kind": "pickle"},
            {"kind": None},
        ],
        ids=str,
    )
    def test_a_handle_that_lies_is_refused(self, change):
        own = create("cpu", 8192)
        with pytest.raises(IntegrityError):
            attach({**own.handle, **change})
        own.close()

    def test_a_process_that_is_gone_is_named(self):
        child = subprocess.Popen([sys.executable, "-c", ""])
        child.wait()
        with pytest.raises(TransportError, match=f"no process {child.pid}.*pid namespace"):
            attach({"kind": "host", "pid": child.pid, "fd": 3, "inode": [1, 1], "bytes": 64})

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
    def test_another_user_is_refused_with_the_reason(self):
        own = create("cpu", 8192)
        code = """
import json, os, sys
from torchrl_ext.transports.segments import attach
os.setuid(65534)
try:
    attach(json.loads(sys.argv[1]))
except Exception as error:
    print(type(error).__name__, error)
"""
        assert "belongs to another user" in python(code, json.dumps(own.handle))
        own.close()

    def test_a_file_that_is_not_sealed_memory_is_refused(self, tmp_path):
        (tmp_path / "file").write_bytes(bytes(64))
        with open(tmp_path / "file", "rb+") as file:
            found = os.fstat(file.fileno())
            handle = {"pid": os.getpid(), "fd": file.fileno(), "inode": [found.st_dev, found.st_ino], "bytes": 64}
            with pytest.raises(WeightSyncError):
                attach({"kind": "host", **handle})

    @pytest.mark.parametrize("address", [None, 7, "", "/tmp/socket", "torchrl_ext-ipc-0-../x"])
    def test_an_address_of_something_else_is_refused(self, make, address):
        with pytest.raises(ConfigError, match="no address of a trainer"):
            make().join({"address": address, "rank": 1, "session": "x"})

    @pytest.mark.parametrize(
        "said",
        [b"\xff\n", b"[1]\n", b"{}\n", b'{"welcome": 3}\n', b'{"welcome": {"session": "y", "segment": {}}}\n'],
        ids=repr,
    )
    def test_what_is_no_trainer_is_refused_by_a_worker(self, make, said):
        address = shared_address("stranger")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("\0" + address)
            listener.listen()
            worker = make(timeout_s=0.5)
            with ThreadPoolExecutor(1) as pool:
                joining = pool.submit(worker.join, {"address": address, "rank": 1, "session": "x"})
                stranger = listener.accept()[0]
                stranger.sendall(said)
                with pytest.raises(WeightSyncError):
                    joining.result(WAIT_S)
                stranger.close()

    @pytest.mark.parametrize("said", [b"\xff\n", b"[]\n", b"{}\n", b'{"hello": {}}\n', b'{"hello": {"devices": 1}}\n'])
    def test_what_is_no_worker_is_sent_away_by_a_trainer(self, make, said):
        trainer, worker = make(timeout_s=WAIT_S), make()
        opening = trainer.open(1, ())
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect("\0" + opening.info["address"])
            stranger.sendall(said)
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(opening.transfer)
                worker.join({**opening.info, "rank": 1})
                waiting.result(WAIT_S)

    @pytest.mark.parametrize(
        "change", [{"handoff": None}, {"session": "other"}, {"params": [["a"]]}, {"params": [["a", "pickle", [1]]]}]
    )
    def test_a_handoff_that_cannot_be_is_refused_before_anything_lands(self, make, change):
        trainer, worker = make(), make()
        opening = trainer.open(1, ())
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(opening.transfer)
            worker.join({**opening.info, "rank": 1})
            waiting.result(WAIT_S)
        (handoff,) = trainer.prepare(MappingSource(weights()), 1)
        into = {name: torch.zeros(300) for name in weights()}
        with pytest.raises(WeightSyncError):
            list(worker.receive({**handoff.info, **change}, into))
        assert not any(tensor.any() for tensor in into.values())


class TestStaging:
    @pytest.mark.parametrize("capacity", [64, 192, 1024, 1 << 20])
    def test_whatever_the_size_of_a_bucket_the_same_bytes_come_out(self, capacity):
        dtypes = [torch.uint8, torch.bfloat16, torch.float64, torch.complex128, torch.int32]
        sent = {f"{i:03d}": any_bits(dtypes[i % 5], (i * 37) % 301, seed=i) for i in range(60)}
        sent["010"] = any_bits(torch.float32, 50, 40, seed=1).t()
        params = MappingSource(sent).params()
        packer = Packer(params, checked(MappingSource(sent), params))
        into = {name: torch.zeros_like(tensor) for name, tensor in sent.items() if int(name) % 3}
        lander = Lander(params, into, torch.device("cpu"), capacity)
        slot, found = torch.zeros(capacity, dtype=torch.uint8), []
        for bucket in stage_layout(params, capacity):
            packer.fill(bucket, [slot])
            found += lander.take(bucket, slot)
            slot.fill_(255)
        packer.finish()
        assert [name for name, _ in found] == [meta.name for meta in params]
        for name, tensor in found:
            assert same_bits(tensor, sent[name]), name
            assert name not in into or tensor.data_ptr() == into[name].data_ptr()

    def test_no_bucket_but_the_last_is_much_less_than_full(self):
        params = [ParamMeta(str(i), torch.bfloat16, (1000 + 7 * i, 64)) for i in range(50)]
        buckets = stage_layout(params, 1 << 20)
        assert len(buckets) <= -(-sum(meta.nbytes for meta in params) // ((1 << 20) - (128 << 10)))

    @pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells")
    def test_a_send_adds_no_more_memory_than_the_staging_buffer(self, make, channel):
        trainer = make(bucket_bytes=4 << 20)
        sent = {f"{i}": torch.ones(8 << 20, dtype=torch.uint8) for i in range(8)}
        with running_python(WORKER, channel):
            trainer.send_weights(sent)
            rounds = []
            for _ in range(3):  # what else lives in this process only ever adds to a round
                with track_peak() as extra:
                    trainer.send_weights(sent)
                rounds.append(extra[0])
        assert min(rounds) <= 4 << 20

    def test_large_updates_go_around_the_caches_and_lose_nothing(self, make):
        trainer, worker = make(bucket_bytes=4 << 20), make()
        sent = {f"{i}": any_bits(torch.uint8, (16 << 20) + i, seed=i) for i in range(5)}
        held = {name: torch.zeros_like(tensor) for name, tensor in sent.items()}
        with ThreadPoolExecutor(1) as pool:
            arriving = pool.submit(worker.receive_weights, WAIT_S, weights=held)
            trainer.send_weights(sent)
            arriving.result(WAIT_S)
        for name, tensor in sent.items():
            assert same_bits(held[name], tensor)


class TestFleet:
    def test_an_engine_that_fails_is_left_out_and_the_others_serve(self):
        class Failing(tx.MemoryTransport):
            pass

        policy = torch.nn.Linear(300, 200)
        good, bad = torch.nn.Linear(300, 200), torch.nn.Linear(300, 200)
        receivers = [tx.WeightReceiver(model) for model in (good, bad)]
        engines = [tx.InProcessEngine(one, url=name) for one, name in zip(receivers, ("good", "bad"), strict=True)]
        sender = tx.WeightSender(tx.make_transport("ipc", bucket_bytes=SMALL_BYTES), tx.Fleet(engines))
        sender.update_weights(policy)
        assert torch.equal(bad.weight, policy.weight)
        receivers[1]._transport.abort()  # its connection breaks
        with torch.no_grad():
            policy.weight.add_(1)
        with pytest.raises(WeightSyncError, match="bad"):
            sender.update_weights(policy)
        assert torch.equal(good.weight, policy.weight) and engines[0].rows()[0].state == "serving"
        assert sender.update_weights(policy).verified
        assert torch.equal(bad.weight, policy.weight)
        sender.shutdown()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGPU:
    def test_two_processes_share_an_allocation(self, channel):
        trainer = tx.make_transport("ipc", channel=channel, bucket_bytes=1 << 20)
        with running_python(WORKER, channel) as child:
            for version in (1, 2):
                trainer.send_weights({name: tensor.cuda() for name, tensor in weights(version).items()})
            assert [child.stdout.readline() for _ in range(3)] == ["up\n", "1 12000\n", "2 24000\n"]
        assert [segment.handle["kind"] for segment in trainer._segments.values()] == ["cuda"]
        json.dumps([segment.handle for segment in trainer._segments.values()])
        trainer.shutdown()

    def test_both_ends_in_one_process_share_it_too(self, channel):
        trainer, worker = (tx.make_transport("ipc", channel=channel, bucket_bytes=1 << 20) for _ in range(2))
        held = {name: tensor.cuda() for name, tensor in weights(0).items()}
        arrived = threading.Thread(target=worker.receive_weights, args=(WAIT_S,), kwargs={"weights": held})
        arrived.start()
        trainer.send_weights({name: tensor.cuda() for name, tensor in weights(7).items()})
        arrived.join(WAIT_S)
        assert all(bool((tensor == 7).all()) for tensor in held.values())
        worker.shutdown()
        trainer.shutdown()

    def test_a_killed_worker_gives_the_memory_back(self, channel):
        trainer = tx.make_transport("ipc", channel=channel, bucket_bytes=64 << 20, timeout_s=WAIT_S)
        with running_python(FROZEN_WORKER, channel, "SIGKILL", 3), pytest.raises(TransportError):
            trainer.send_weights({name: tensor.cuda() for name, tensor in weights(count=4000).items()})
        trainer.shutdown()
        free = torch.cuda.mem_get_info()[0]
        again = tx.make_transport("ipc", channel=channel, bucket_bytes=64 << 20)
        segment = again._segment_on(again._devices())
        assert free - torch.cuda.mem_get_info()[0] >= 60 << 20
        del segment
        again.shutdown()
        assert torch.cuda.mem_get_info()[0] >= free - (4 << 20)
