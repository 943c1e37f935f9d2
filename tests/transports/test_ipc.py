"""`IPCTransport` beyond the contract: other processes, and deaths at every step."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

import torchrl_ext as tx
from tests.processes import running_python
from tests.transports import ipc_ends
from tests.transports.ipc_ends import FATAL_TRAINER, FROZEN_WORKER, SMALL_BYTES, WORKER, everywhere, weights
from torchrl_ext.bench.runner import track_peak
from torchrl_ext.errors import DeadlineError, TransportError, WeightSyncError
from torchrl_ext.rpc.pool import Pool
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.testing import WAIT_S, any_bits, same_bits
from torchrl_ext.transports.ipc.cuda_memory import CudaHandle
from torchrl_ext.transports.ipc.memory import create
from torchrl_ext.transports.ipc.messages import Announce, Load, Welcome
from torchrl_ext.transports.links import shared_address

channel, make = ipc_ends.channel, ipc_ends.make


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
            named = pytest.raises(TransportError, match=rf"not taken by a worker \(pid {bad.pid}\)")
            with named if at < 39 else nullcontext():  # at 39 it had every byte
                trainer.send_weights(weights())
            assert good.stdout.readline() == "1 12000\n"
            trainer._count = 1
            try:
                trainer.send_weights(weights(2))
            except TransportError as error:  # one that had every byte may be missed only now
                assert at == 39 and f"(pid {bad.pid})" in str(error)
            assert good.stdout.readline() == "2 24000\n"


def test_what_a_trainer_said_before_it_died_is_forgotten_with_it(make, channel):
    """It let the worker in and announced a version, and its buffer was gone before the worker looked."""
    segment, ended = create("cpu", 2 * SMALL_BYTES), subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(WAIT_S)
    welcome = Welcome(session="x", segment=replace(segment.handle, pid=ended.pid))
    announce = Announce(version=1, params=(), load=Load(session="x", handoff=1))
    worker = make()
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind("\0" + shared_address(channel))
        listener.listen()
        receiving = pool.submit(worker.receive_weights, WAIT_S)
        with listener.accept()[0] as dying:
            lines = [json.dumps(message.to_json()).encode() for message in (welcome, announce)]
            dying.sendall(b"".join(len(data).to_bytes(4, "big") + data for data in lines))  # it leaves at the first
            with pytest.raises(TransportError, match="the trainer is gone"):
                receiving.result(WAIT_S)
    assert worker.receive_weights(0.0) is None and not worker.check_connection()
    trainer = make()
    with ThreadPoolExecutor(1) as pool:
        arriving = pool.submit(worker.receive_weights, WAIT_S)
        trainer.send_weights(weights(5))
        assert arriving.result(WAIT_S)["00"][0] == 5


def test_a_worker_that_freezes_is_disconnected_at_the_deadline(make, channel):
    trainer = make(workers=2, timeout_s=2)
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


class TestFleet:
    def test_an_engine_that_fails_is_left_out_and_the_others_serve(self):
        policy = torch.nn.Linear(300, 200)
        good, bad = torch.nn.Linear(300, 200), torch.nn.Linear(300, 200)
        receivers = [tx.WeightReceiver(model) for model in (good, bad)]
        engines = [InProcessEngine(one, url=name) for one, name in zip(receivers, ("good", "bad"), strict=True)]
        sender = tx.WeightSender(tx.make_transport("ipc", bucket_bytes=SMALL_BYTES), Pool(engines))
        sender.update_weights(policy)
        assert torch.equal(bad.weight, policy.weight)
        receivers[1]._end.close()  # its connection breaks
        with torch.no_grad():
            policy.weight.add_(1)
        with pytest.raises(WeightSyncError, match="bad"):
            sender.update_weights(policy)
        assert torch.equal(good.weight, policy.weight) and engines[0].rows()[0].state == "serving"
        assert sender.update_weights(policy).verified
        assert torch.equal(bad.weight, policy.weight)
        sender.shutdown()


class TestStaging:
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

    def test_an_update_much_larger_than_the_buffer_loses_nothing(self, make):
        trainer, worker = make(bucket_bytes=4 << 20), make()
        sent = {f"{i}": any_bits(torch.uint8, (16 << 20) + i, seed=i) for i in range(5)}
        held = {name: torch.zeros_like(tensor) for name, tensor in sent.items()}
        with ThreadPoolExecutor(1) as pool:
            arriving = pool.submit(worker.receive_weights, WAIT_S, weights=held)
            trainer.send_weights(sent)
            arriving.result(WAIT_S)
        for name, tensor in sent.items():
            assert same_bits(held[name], tensor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGPU:
    def test_two_processes_share_an_allocation(self, channel):
        trainer = tx.make_transport("ipc", channel=channel, bucket_bytes=1 << 20)
        with running_python(WORKER, channel) as child:
            for version in (1, 2):
                trainer.send_weights({name: tensor.cuda() for name, tensor in weights(version).items()})
            assert [child.stdout.readline() for _ in range(3)] == ["up\n", "1 12000\n", "2 24000\n"]
        assert [type(segment.handle) for segment in trainer._segments.values()] == [CudaHandle]
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
