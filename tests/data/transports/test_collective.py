"""`VLLMCollectiveTransport` beyond the contract: forming groups, and members that refuse, stop, freeze or die."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from functools import partial

import pytest
import torch

from tests.data.group.members import (
    BUCKET,
    SHORT_S,
    WAIT_S,
    Interrupted,
    beside,
    broken,
    enter,
    group,
    member,
    same,
    stop,
    weights,
)  # fmt: skip
from tests.processes import calling, running_python
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import ConfigError, DeadlineError, ManifestError, TransportError, WeightSyncError
from torchrl_ext.control.serving.processes import free_port
from torchrl_ext.data.transports.base import Arrival, Update, Worker
from torchrl_ext.data.transports.collective import VLLMCollectiveTransport
from torchrl_ext.data.weights.source import MappingSource
from torchrl_ext.testing import any_bits


def test_the_signature_is_that_of_torchrl():
    transport = VLLMCollectiveTransport("127.0.0.1", 29500, 1, 3, "cpu", "engine")
    assert (transport.rank, transport.world_size, transport.vllm_engine) == (1, 3, "engine")
    assert (transport.device, transport.backend) == (torch.device("cpu"), "gloo")


@pytest.mark.parametrize("bucket_bytes", [0, BUCKET, 1 << 20])
def test_three_workers_receive_every_bit_and_keep_each_version(bucket_bytes):
    kept, before = [], dict(os.environ)
    with group(4, bucket_bytes=bucket_bytes) as (trainer, *workers):
        for seed in range(4):
            receives = [worker.receive_weights for worker in workers]
            _, *received = beside(lambda s=seed: trainer.send_weights("policy", weights(s)), *receives)
            kept.append(received)
        assert dict(os.environ) == before and not torch.distributed.is_initialized()
    assert all(same(one, weights(seed)) for seed, received in enumerate(kept) for one in received)


def test_a_rank_that_never_arrives_is_named_on_both_sides():
    port = free_port()
    trainer, worker = member(port, 0, 3, timeout_s=SHORT_S), member(port, 1, 3, timeout_s=3 * SHORT_S)
    for error in enter(trainer, worker):
        assert isinstance(error, DeadlineError)
        assert "rank 2 of world size 3 did not arrive" in str(error)
    assert not trainer.check_connection() and not worker.check_connection()
    trainer.shutdown()


def test_a_worker_without_a_trainer_says_where_it_looked():
    port = free_port()
    with pytest.raises(DeadlineError, match=rf"no trainer \(rank 0\) listened at 127.0.0.1:{port}"):
        member(port, 1, 2, timeout_s=SHORT_S).init_all_workers_group({})


def test_a_trainer_alone_must_know_how_many_workers_there_are():
    with pytest.raises(ConfigError, match="world_size"):
        VLLMCollectiveTransport(device="cpu").init_all_workers_group({})


def test_a_taken_port_is_an_error_that_says_so():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        transport = member(taken.getsockname()[1], 0, 2)
        with pytest.raises(TransportError, match="pick another master_port"):
            transport.init_all_workers_group({})


def test_port_is_free_after_shutdown_and_world_size_optional():
    """A new group takes the same port, and a worker may leave the world size to the trainer."""
    port = free_port()
    for size in (2, None, 2):
        members = [member(port, 0, 2), member(port, 1, size)]
        assert enter(*members) == [None, None]
        for one in members:
            one.shutdown()


# roles


def test_only_rank_0_sends_and_only_others_receive():
    with group(2) as (trainer, worker):
        with pytest.raises(RuntimeError, match="send_weights was called on rank 1"):
            worker.send_weights("policy", weights())
        with pytest.raises(TransportError, match="rank 0, the trainer"):
            trainer.receive_weights(0.01)


def test_what_was_not_agreed_on_is_not_sent():
    port = free_port()
    members = [member(port, rank, 2) for rank in range(2)]
    enter(*members, metadata={"p00": (torch.float32, (5000,))})
    with pytest.raises(ManifestError, match="'p01'"):
        members[0].send_weights("policy", weights(count=2))
    for one in members:
        one.shutdown()


# members that fail: the others learn it, and the next try works


def take_until(worker, stop_at):
    """Receive one version as a loader does that stops at a parameter, by its number."""
    within = Deadline(WAIT_S)
    end = worker.attend(within)
    pairs = end.receive(end.next(within), {}, within)
    for number, _ in enumerate(pairs if stop_at >= 0 else ()):
        if number == stop_at:
            break


@pytest.mark.parametrize("how", ["cannot take it", "stops half-way"])
def test_worker_that_takes_no_version_gives_the_reason(how):
    """All sides name the rank and tensor of a worker that refuses or stops, and can connect again."""
    first, second = weights(0), weights(1)
    given = {**{name: torch.zeros(5000) for name in first}, "p07": torch.zeros(4)}
    with group(3) as (trainer, other, refuses):
        refuse = (
            partial(take_until, refuses, 7)
            if how == "stops half-way"
            else partial(refuses.receive_weights, weights=given)
        )
        told, lost, declined = beside(lambda: trainer.send_weights("policy", first), other.receive_weights, refuse)
        assert isinstance(declined, ManifestError) == (how == "cannot take it") and not given["p00"].any()
        for error in (told, lost):
            assert isinstance(error, TransportError) and "rank 2" in str(error) and "'p07'" in str(error)
        assert not any(one.check_connection() for one in (trainer, other, refuses))
        assert enter(trainer, other, refuses) == [None] * 3
        _, *both = beside(
            lambda: trainer.send_weights("policy", second), other.receive_weights, refuses.receive_weights
        )
        assert all(same(one, second) for one in both)
        assert (other.received_version, trainer.latest_version()) == (2, 2)


def test_a_loader_may_stop_at_any_parameter():
    """Wherever a loader stops, the trainer hears where, and the next update passes."""
    sizes = [1, 7, 50, 300, 300, 700, 3000, 700, 300, 20]  # most share buckets, one is too large
    sent = {f"p{index}": any_bits(torch.float32, size, seed=index) for index, size in enumerate(sizes)}
    with group(2) as (trainer, worker):
        for stop_at in range(-1, len(sizes)):
            told, _ = beside(lambda: trainer.send_weights("policy", sent), partial(take_until, worker, stop_at))
            words = "it loaded nothing" if stop_at < 0 else f"stopped loading after 'p{stop_at}'"
            assert isinstance(told, TransportError) and "rank 1 (pid" in str(told) and words in str(told)
            assert enter(trainer, worker) == [None, None]
            _, received = beside(lambda: trainer.send_weights("policy", sent), worker.receive_weights)
            assert same(received, sent)


@pytest.mark.parametrize("who", ["trainer", "worker"])
def test_an_abort_from_another_thread_ends_both_sides_at_once(who):
    with group(2) as (trainer, worker):
        reached, aborted = threading.Event(), threading.Event()
        stuck = Interrupted(weights(count=40), 30, lambda: (reached.set(), aborted.wait(WAIT_S)))

        def abort():
            assert reached.wait(WAIT_S)
            {"trainer": trainer, "worker": worker}[who].abort()
            aborted.set()

        began = time.monotonic()
        sent, received, _ = beside(lambda: trainer.send_weights("policy", stuck), worker.receive_weights, abort)
        assert time.monotonic() - began < WAIT_S
        assert isinstance(sent, WeightSyncError) and isinstance(received, WeightSyncError)
        assert "aborted" in str({"trainer": sent, "worker": received}[who])


def test_an_abort_ends_the_wait_for_ranks_that_do_not_arrive():
    trainer, within = member(0, 0, None), Deadline(WAIT_S)
    handoff = trainer.open(1, (), within)
    timer = threading.Timer(0.2, within.stop.set)
    timer.start()
    with pytest.raises(TransportError, match="an abort"):
        handoff.transfer(within)
    trainer.shutdown()


def opened(trainer, workers):
    """Form a group with workers that a control layer invites, and return their ends."""
    opening = trainer.open(workers, (), Deadline(WAIT_S))
    info = json.loads(json.dumps(opening.info))
    here = [Worker(rank=rank) for rank in range(1, 1 + workers)]
    joins = [partial(VLLMCollectiveTransport.join, info, one, Deadline(WAIT_S)) for one in here]
    return beside(lambda: opening.transfer(Deadline(WAIT_S)), *joins)[1:]


def sent_to(trainer, source, version, ends):
    """Send a version to these ends; return what each side returned or raised."""
    handoff = trainer.prepare(Update(source=source, version=version), Deadline(WAIT_S))
    arrival = Arrival(version=version, params=source.params(), info=json.loads(json.dumps(handoff.info)))
    receives = (lambda end=end: dict(end.receive(arrival, {}, Deadline(WAIT_S))) for end in ends)
    return beside(lambda: handoff.transfer(Deadline(WAIT_S)), *receives)


def test_trainer_reconnects_to_other_workers_after_source_error():
    """After its source failed, a trainer connects to another number of workers."""
    trainer, sent = member(0, 0, None), weights()
    for workers in (1, 2, 1):
        ends = opened(trainer, workers)
        _, *received = sent_to(trainer, MappingSource(sent), 1, ends)
        assert all(same(one, sent) for one in received)
        failed, *lost = sent_to(trainer, Interrupted(sent, 12, broken), 2, ends)
        assert isinstance(failed, ValueError)
        for error in lost:
            assert isinstance(error, TransportError) and "the source broke" in str(error) and "rank 0" in str(error)
        assert not trainer.check_connection() and not any(end.check_connection() for end in ends)
        for end in ends:
            end.close()
    trainer.shutdown()


def test_numbers_of_workers_that_do_not_fit_are_refused():
    info = member(0, 0, None).open(1, (), Deadline(WAIT_S)).info
    with pytest.raises(ConfigError, match="rank 2 does not exist in world_size 2"):
        VLLMCollectiveTransport.join(info, Worker(rank=2), Deadline(WAIT_S))
    with pytest.raises(ConfigError, match=r"world_size 2, but the engines have 3 workers"):
        member(0, 0, 2).open(3, (), Deadline(WAIT_S))


# processes that end, die or freeze


def receives(port, rank, size, stop_at):
    """A worker that stops at a parameter until a line comes, takes the rest, and leaves."""
    end = member(port, rank, size)
    print("started", flush=True)
    end.init_all_workers_group({})
    print("connected", flush=True)
    within = Deadline(WAIT_S)
    worker = end.attend(within)
    for number, _ in enumerate(worker.receive(worker.next(within), {}, within)):
        if number == stop_at:
            stop()
    print("took", flush=True)
    end.shutdown()
    print("left", flush=True)


def sends(port):
    """A trainer that stops in the middle of its version until a line comes."""
    end = member(port, 0, 2)
    print("started", flush=True)
    end.init_all_workers_group({})
    print("connected", flush=True)
    sys.stdin.readline()
    end.send_weights("policy", Interrupted(weights(count=40), 30, stop))


FROZEN_S = 3
LARGE = {f"p{i}": torch.ones(1 << 20) for i in range(40)}


@pytest.mark.parametrize(("how", "kind"), [(signal.SIGKILL, TransportError), (signal.SIGSTOP, DeadlineError)])
def test_worker_process_that_dies_or_freezes_ends_the_send(how, kind):
    """The send ends with an error that names the rank and process of the worker."""
    port = free_port()
    with running_python(calling(receives, port, 1, 2, 3)) as child:
        trainer = member(port, 0, 2, timeout_s=WAIT_S if how is signal.SIGKILL else FROZEN_S)
        assert child.stdout.readline() == "started\n"
        trainer.init_all_workers_group({})
        assert child.stdout.readline() == "connected\n"

        def strike():
            assert child.stdout.readline() == "now\n"
            os.kill(child.pid, how)

        began = time.monotonic()
        sent, _ = beside(lambda: trainer.send_weights("policy", LARGE), strike)
        assert isinstance(sent, kind)
        assert f"no answer came from rank 1 (pid {child.pid}" in str(sent)
        assert time.monotonic() - began < WAIT_S
        trainer.shutdown()


@pytest.mark.parametrize("slow_one_dies", [False, True])
def test_fast_worker_stays_in_the_group_until_slow_worker_ends(slow_one_dies):
    """A worker with all its weights leaves the group only after the slower worker took them or died."""
    port, last = free_port(), 20
    programs = calling(receives, port, 1, 3, last), calling(receives, port, 2, 3, -1)
    with running_python(programs[0]) as slow, running_python(programs[1]) as fast:
        trainer = member(port, 0, 3)
        trainer.init_all_workers_group({})

        def watch():
            assert [slow.stdout.readline() for _ in range(3)] == ["started\n", "connected\n", "now\n"]
            assert [fast.stdout.readline() for _ in range(3)] == ["started\n", "connected\n", "took\n"]
            assert not select.select([fast.stdout], [], [], 1)[0]  # it stays for the slow one
            if slow_one_dies:
                slow.kill()
                assert fast.stdout.readline() == "left\n"
                trainer.abort()
            else:
                slow.stdin.write("\n")
                slow.stdin.flush()
                assert [slow.stdout.readline() for _ in range(2)] == ["took\n", "left\n"]
                assert fast.stdout.readline() == "left\n"

        sent, watched = beside(lambda: trainer.send_weights("policy", weights(count=1 + last)), watch)
        assert watched is None
        assert isinstance(sent, TransportError) if slow_one_dies else sent is None
        trainer.shutdown()


@pytest.mark.parametrize(
    ("how", "moment"),
    [
        (signal.SIGKILL, "idle"),
        (signal.SIGKILL, "half"),
        pytest.param(signal.SIGSTOP, "idle", marks=pytest.mark.exhaustive),
        (signal.SIGSTOP, "half"),
    ],
)
def test_trainer_process_that_dies_or_freezes_ends_the_worker(how, moment):
    """The worker's wait ends with an error that names rank 0, the trainer."""
    port = free_port()
    with running_python(calling(sends, port)) as child:
        worker = member(port, 1, 2, timeout_s=WAIT_S if how is signal.SIGKILL else FROZEN_S)
        assert child.stdout.readline() == "started\n"
        worker.init_all_workers_group({})
        assert child.stdout.readline() == "connected\n"

        def strike():
            if moment == "half":
                child.stdin.write("\n")
                child.stdin.flush()
                assert child.stdout.readline() == "now\n"
            os.kill(child.pid, how)

        began = time.monotonic()
        lost, _ = beside(lambda: worker.receive_weights(WAIT_S), strike)
        assert isinstance(lost, (TransportError, DeadlineError))
        assert "rank 0" in str(lost)
        assert time.monotonic() - began < WAIT_S
        assert not worker.check_connection()
        worker.shutdown()
