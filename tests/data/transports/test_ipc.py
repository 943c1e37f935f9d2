"""`IPCTransport` beyond the contract: other processes, deaths in the middle, and halves of the buffer in turn."""

import os
import re
import signal
import threading
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import torchrl_ext as tx
from tests.data.group.members import Interrupted, beside, enter, group
from tests.memory import track_peak
from tests.processes import calling, family, files_of, maps_of, running_python
from torchrl_ext.base.deadline import Deadline, in_thread
from torchrl_ext.base.errors import ConfigError, TransportError, WeightSyncError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.transports.base import Arrival, Update, Worker
from torchrl_ext.data.weights.source import MappingSource
from torchrl_ext.testing import SMALL_BYTES, WAIT_S, free_port


def end(port, rank, size, **settings):
    settings = {"bucket_bytes": SMALL_BYTES, "timeout_s": WAIT_S, **settings}
    return tx.IPCTransport(port, rank, size, **settings)


def follows(port, rank, size):
    """A worker that takes one version after the other, and says of each which it is and what its tensors add up to."""
    worker = end(port, rank, size)
    worker.init_all_workers_group({})
    with suppress(WeightSyncError):  # the trainer is gone
        while (received := worker.receive_weights(60)) is not None:
            print(worker.received_version, int(sum(tensor.sum() for tensor in received.values())), flush=True)


def stops_taking(port, at):
    """A worker that is killed at a parameter of its first version."""
    worker = end(port, 1, 2)
    worker.init_all_workers_group({})
    within = Deadline(WAIT_S)
    own = worker.attend(within)
    for index, _ in enumerate(own.receive(own.next(within), {}, within)):
        if index == at:
            os.kill(os.getpid(), signal.SIGKILL)


def stops_sending(port, at):
    """A trainer that is killed at a parameter of its first version."""
    trainer = end(port, 0, 2)
    trainer.init_all_workers_group({})
    trainer.send_weights(Interrupted(weights(), at, partial(os.kill, os.getpid(), signal.SIGKILL)))


def everywhere():
    """Staging buffers that this process, or one that it started, holds open or maps."""
    found = []
    for pid in family(os.getpid()):
        with suppress(OSError):  # it ends
            held = (*files_of(pid), *maps_of(pid).splitlines())
            found += [(pid, name) for name in held if "memfd:torchrl_ext" in name]
    return found


def weights(value=1.0, count=40):
    return {f"{i:02d}": torch.full((300,), float(value)) for i in range(count)}


@contextmanager
def joined(trainer):
    """A worker of a trainer that a control layer drives."""
    within = Deadline(trainer.timeout_s)
    opening = trainer.open(1, (), within)
    join = partial(tx.IPCTransport.join, opening.info, Worker(rank=1), within)
    worker, _ = beside(join, lambda: opening.transfer(within))
    with closing(worker):
        yield worker


def test_several_workers_share_a_buffer_that_leaves_with_its_trainer():
    port = free_port()
    with running_python(calling(follows, port, 1, 3)) as a, running_python(calling(follows, port, 2, 3)) as b:
        with end(port, 0, 3) as trainer:
            trainer.init_all_workers_group({})
            for value in (1, 2, 3):
                trainer.send_weights(weights(value))
            (own,) = trainer._segments.values()
            assert own.flat.numel() == SMALL_BYTES
        for child in (a, b):
            assert [child.stdout.readline() for _ in range(3)] == ["1 12000\n", "2 24000\n", "3 36000\n"]
    assert everywhere() == []


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells")
def test_a_send_adds_no_more_memory_than_the_staging_buffer():
    port, sent = free_port(), {f"{i}": torch.ones(8 << 20, dtype=torch.uint8) for i in range(8)}
    with running_python(calling(follows, port, 1, 2)), end(port, 0, 2, bucket_bytes=4 << 20) as trainer:
        trainer.init_all_workers_group({})
        trainer.send_weights(sent)
        rounds = []
        for _ in range(3):  # what else lives in this process only ever adds to a round
            with track_peak() as extra:
                trainer.send_weights(sent)
            rounds.append(extra[0])
    assert min(rounds) <= 4 << 20


@pytest.mark.parametrize("at", [0, 20, 39])
@pytest.mark.parametrize("dies", ["trainer", "worker"])
def test_an_end_that_is_killed_is_named_and_leaves_no_memory(dies, at):
    port = free_port()
    program = calling(stops_taking, port, at) if dies == "worker" else calling(stops_sending, port, at)
    with running_python(program) as child, end(port, int(dies == "trainer"), 2) as own:
        own.init_all_workers_group({})
        with pytest.raises(WeightSyncError, match=rf"(rank \d \(pid|no process) {child.pid}\b"):
            own.send_weights(weights()) if dies == "worker" else own.receive_weights(WAIT_S)
        child.wait(WAIT_S)  # a dying process closes its sockets before its other files
        assert not own.check_connection()
        own.shutdown()
        assert everywhere() == []


def test_a_half_is_filled_again_once_it_was_copied():
    """While a worker stops after its first bucket, the trainer does not pack the fourth one."""
    within, early, go_on = Deadline(WAIT_S), [], threading.Event()
    with end(0, 0, None) as trainer, joined(trainer) as worker:
        for version in (1, 2):
            go_on.clear()
            source = Interrupted(weights(version), 5, lambda: early.append(not go_on.is_set()))  # of the fourth bucket
            handoff = trainer.prepare(Update(source=source, version=version), within)
            sending = in_thread(partial(handoff.transfer, within), "sends")
            arrival = Arrival(version=version, params=source.params(), info=handoff.info)
            pairs = worker.receive(arrival, {}, within)
            held = [next(pairs)]
            assert not go_on.wait(0.2)  # the trainer has time to do it wrong
            go_on.set()
            held += pairs
            assert all(bool((tensor == version).all()) for _, tensor in held) and len(held) == 40
            sending.result(WAIT_S)
    assert early == [False, False]


def test_too_many_buckets_are_refused_before_they_are_laid_out():
    source, within = MappingSource(weights()), Deadline(WAIT_S)
    huge = (ParamMeta("huge", torch.uint8, (SMALL_BYTES // 2 * (1 << 20) + 1,)),)
    many = MappingSource({"huge": torch.empty(huge[0].shape, dtype=torch.uint8, device="meta")})
    with end(0, 0, None) as trainer, joined(trainer) as worker:
        with pytest.raises(ConfigError, match=r"1,048,577 buckets.* larger bucket_bytes"):
            trainer.prepare(Update(source=many, version=1), within)
        handoff = trainer.prepare(Update(source=source, version=1), within)
        sending = in_thread(partial(handoff.transfer, within), "sends")
        arrival = Arrival(version=1, params=source.params(), info=handoff.info)
        with pytest.raises(ConfigError, match="1,048,577 buckets"):
            list(worker.receive(replace(arrival, params=huge), {}, within))
        with pytest.raises(
            TransportError, match=r"rank 1 .* could not read a handoff: a handoff takes 1,048,577 buckets"
        ):
            sending.result(WAIT_S)


def test_a_worker_that_cannot_map_the_buffer_says_why():
    within = Deadline(WAIT_S)
    with end(0, 0, None) as trainer, joined(trainer) as worker:
        handoff = trainer.prepare(Update(source=MappingSource(weights()), version=1), within)
        handoff.info["segments"]["cpu"]["pid"] = 1 << 30  # there is none
        arrival = Arrival(version=1, params=MappingSource(weights()).params(), info=handoff.info)
        sent, received = beside(partial(handoff.transfer, within), lambda: list(worker.receive(arrival, {}, within)))
        for error in (sent, received):
            assert isinstance(error, TransportError) and re.search("cannot be mapped here: no process", str(error))


def test_ends_that_fail_connect_again():
    with group(2, end) as (trainer, worker):
        wrong = {"00": torch.zeros(7)}
        sent, received = beside(
            lambda: trainer.send_weights(weights()), lambda: worker.receive_weights(WAIT_S, weights=wrong)
        )
        assert isinstance(sent, TransportError) and isinstance(received, WeightSyncError) and "'01'" in str(sent)
        assert enter(trainer, worker) == [None, None]
        _, received = beside(lambda: trainer.send_weights(weights(5)), lambda: worker.receive_weights(WAIT_S))
        assert received["39"][0] == 5
