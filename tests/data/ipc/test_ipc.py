"""`IPCTransport` beyond the contract: other processes, and deaths at every step."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

import torchrl_ext as tx
from tests.data.ipc import ipc_ends
from tests.data.ipc.ipc_ends import (
    SMALL_BYTES,
    everywhere,
    exchange,
    follows,
    frame,
    stops_sending,
    stops_taking,
    weights,
)
from tests.memory import track_peak
from tests.processes import calling, files_of, maps_of, running_python
from torchrl_ext.base.errors import DeadlineError, NotConnectedError, TransportError, WeightSyncError
from torchrl_ext.data.group.links import shared_address
from torchrl_ext.data.ipc.memory import create
from torchrl_ext.data.ipc.messages import Announce, IPCLoad, Welcome
from torchrl_ext.data.weights.source import MappingSource
from torchrl_ext.testing import WAIT_S

channel, make = ipc_ends.channel, ipc_ends.make


class TestBetweenProcesses:
    def test_several_workers_share_a_buffer_and_outlive_trainers(self, make, channel):
        """Several workers read the same buffer and receive the versions of the next trainer, too."""
        program = calling(follows, channel)
        with running_python(program) as a, running_python(program) as b, running_python(program) as c:
            for values in ((1, 2, 3), (4, 5)):
                trainer = make(workers=3)
                for value in values:
                    trainer.send_weights(weights(value))
                trainer.shutdown()
            said = ["up", "1 12000", "2 24000", "3 36000", "1 48000", "2 60000"]
            for child in (a, b, c):
                assert [child.stdout.readline() for _ in said] == [f"{line}\n" for line in said]

    def test_a_worker_that_comes_late_gets_the_next_version(self, make, channel):
        trainer, first = make(workers=1), make()
        exchange(trainer, first)
        with running_python(calling(follows, channel)) as second:
            assert second.stdout.readline() == "up\n"
            heard = ""
            while not heard:  # it is let in at one of these
                exchange(trainer, first)
                heard = second.stdout.readline() if select.select([second.stdout], [], [], 0)[0] else ""
            assert heard.endswith(" 60000\n")

    def test_a_forked_child_keeps_nothing_of_its_parent_alive(self, make, channel):
        trainer = make()
        with running_python(calling(follows, channel)):
            trainer.send_weights(weights())
            leave, wait = os.pipe(), os.pipe()
            pid = os.fork()
            if pid == 0:
                os.write(wait[1], b"x")
                os.read(leave[0], 1)
                os._exit(0)
            os.read(wait[0], 1)
            held = "".join([*files_of(pid), maps_of(pid)])
            os.write(leave[1], b"x")
            os.waitpid(pid, 0)
            for end in (*leave, *wait):
                os.close(end)
        assert "memfd:torchrl_ext" not in held


@pytest.mark.parametrize("at", [0, 20, 39])
class TestDeaths:
    def test_killed_trainer_frees_the_buffer_and_worker_reports(self, make, channel, at):
        """A killed trainer frees the buffer; its worker raises an error and receives from the next trainer."""
        worker = make(timeout_s=WAIT_S)
        with running_python(calling(stops_sending, channel, int(signal.SIGKILL), at)) as child:
            with pytest.raises(WeightSyncError, match=r"the trainer.*is gone"):
                worker.receive_weights(WAIT_S)
            child.wait(WAIT_S)  # a dying process closes its sockets before its other files
            assert everywhere() == []
        assert worker.receive_weights(0.0) is None
        exchange(make(), worker)

    def test_killed_worker_is_named_and_the_next_send_arrives(self, make, channel, at):
        trainer, worker = make(timeout_s=WAIT_S), make()
        with running_python(calling(stops_taking, channel, int(signal.SIGKILL), at)) as bad:
            named = pytest.raises(TransportError, match=rf"did not arrive: a worker \(pid {bad.pid}\)")
            with named if at < 39 else nullcontext():  # at 39 it had every byte
                trainer.send_weights(weights())
        exchange(trainer, worker)

    def test_a_failure_of_one_worker_ends_it_for_the_others(self, make, channel, at):
        trainer, worker = make(workers=2, timeout_s=WAIT_S), make()
        with running_python(calling(stops_taking, channel, int(signal.SIGKILL), at)), ThreadPoolExecutor(1) as pool:
            arriving = pool.submit(worker.receive_weights, WAIT_S)
            with pytest.raises(TransportError) if at < 39 else nullcontext():
                trainer.send_weights(weights())
            with pytest.raises(NotConnectedError, match=r"the trainer.*is gone") if at < 39 else nullcontext():
                arriving.result(WAIT_S)


def test_what_a_trainer_said_before_it_died_is_forgotten_with_it(make, channel):
    """It let the worker in and announced a version, and its buffer was gone before the worker looked."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(WAIT_S)
    with closing(create(2 * SMALL_BYTES)) as segment:
        welcome = Welcome(session="x", segment=replace(segment.handle, pid=ended.pid))
    announce = Announce(version=1, params=(), load=IPCLoad(session="x", handoff=1))
    lines = b"".join(frame(json.dumps(message.to_json()).encode()) for message in (welcome, announce))
    worker = make()
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind("\0" + shared_address(channel))
        listener.listen()
        receiving = pool.submit(worker.receive_weights, WAIT_S)
        with listener.accept()[0] as dying:
            dying.sendall(lines)  # the worker leaves at the first
            with pytest.raises(TransportError, match="the trainer is gone"):
                receiving.result(WAIT_S)
    assert worker.receive_weights(0.0) is None and not worker.check_connection()
    exchange(make(), worker)


def test_worker_may_leave_before_the_trainer_sees_completion(make):
    """A worker that received every tensor may shut down before the trainer looks; the send succeeds."""
    worker, left = make(), threading.Event()

    class Waits(MappingSource):
        def __iter__(self):
            yield from super().__iter__()
            assert left.wait(WAIT_S)

    def takes():
        received = worker.receive_weights(WAIT_S)
        worker.shutdown()
        left.set()
        return received

    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(takes)
        make().send_weights(Waits(weights()))
    assert taking.result()["39"][0] == 1


def test_a_worker_that_freezes_is_named_at_the_deadline(make, channel):
    trainer = make(timeout_s=2)
    frozen = calling(stops_taking, channel, int(signal.SIGSTOP), 20)
    with running_python(frozen), pytest.raises(DeadlineError, match=r"pid \d+\) did not take bucket"):
        trainer.send_weights(weights())


def test_a_trainer_that_freezes_is_named_at_the_workers_deadline(make, channel):
    worker = make(timeout_s=1)
    with running_python(calling(stops_sending, channel, int(signal.SIGSTOP), 20)) as child:
        with pytest.raises(DeadlineError, match=rf"pid {child.pid}\) did not fill bucket"):
            worker.receive_weights(WAIT_S)
        child.send_signal(signal.SIGCONT)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells")
def test_a_send_adds_no_more_memory_than_the_staging_buffer(make, channel):
    trainer = make(bucket_bytes=4 << 20)
    sent = {f"{i}": torch.ones(8 << 20, dtype=torch.uint8) for i in range(8)}
    with running_python(calling(follows, channel)):
        trainer.send_weights(sent)
        rounds = []
        for _ in range(3):  # what else lives in this process only ever adds to a round
            with track_peak() as extra:
                trainer.send_weights(sent)
            rounds.append(extra[0])
    assert min(rounds) <= 4 << 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGPU:
    def test_both_ends_in_one_process_share_it_too(self, channel):
        trainer, worker = (tx.make_transport("ipc", channel=channel, bucket_bytes=1 << 20) for _ in range(2))
        held = {name: tensor.cuda() for name, tensor in weights(0).items()}
        with ThreadPoolExecutor(1) as pool:
            arriving = pool.submit(worker.receive_weights, WAIT_S, weights=held)
            trainer.send_weights({name: tensor.cuda() for name, tensor in weights(7).items()})
            arriving.result(WAIT_S)
        assert all(bool((tensor == 7).all()) for tensor in held.values())
        worker.shutdown()
        trainer.shutdown()

    def test_a_killed_worker_gives_the_memory_back(self, channel):
        trainer = tx.make_transport("ipc", channel=channel, bucket_bytes=64 << 20, timeout_s=WAIT_S)
        with running_python(calling(stops_taking, channel, int(signal.SIGKILL), 3)), pytest.raises(TransportError):
            trainer.send_weights({name: tensor.cuda() for name, tensor in weights(count=4000).items()})
        trainer.shutdown()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        again = tx.make_transport("ipc", channel=channel, bucket_bytes=64 << 20)
        segment = again._segment_on(again._devices())
        assert free - torch.cuda.mem_get_info()[0] >= 60 << 20
        del segment
        again.shutdown()
        torch.cuda.empty_cache()
        assert torch.cuda.mem_get_info()[0] >= free - (4 << 20)
