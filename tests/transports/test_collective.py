"""The collective beyond the shared contract: forming groups, several workers, and parties that fail half-way."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
import torch

import torchrl_ext as tx
from tests.processes import running_python
from tests.transports.contract import any_bits, same_bits
from torchrl_ext.errors import (
    ConfigError,
    DeadlineError,
    ManifestError,
    NotConnectedError,
    TransportError,
    WeightSyncError,
)
from torchrl_ext.transports.collective import VLLMCollectiveTransport
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.source import WeightSource

WAIT_S = 60
SHORT_S = 2
BUCKET = 4096


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def member(port, rank, size, **settings):
    settings = {"bucket_bytes": BUCKET, "timeout_s": WAIT_S, **settings}
    return VLLMCollectiveTransport("127.0.0.1", port, rank, size, "cpu", **settings)


def beside(*calls):
    """Run the calls beside each other; what each returned or raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception(3 * WAIT_S) or future.result() for future in futures]


def enter(*members, metadata=()):
    return beside(*(lambda one=one: one.init_all_workers_group(dict(metadata)) for one in members))


@contextmanager
def group(size, **settings):
    port = free_port()
    members = [member(port, rank, size, **settings) for rank in range(size)]
    try:
        assert enter(*members) == [None] * size
        yield members
    finally:
        for one in members:
            one.shutdown()


def weights(seed=0, count=20, numel=5000):
    return {f"p{i:02d}": any_bits(torch.float32, numel, seed=100 * seed + i) for i in range(count)}


def same(received, sent):
    return all(same_bits(received[name], tensor) for name, tensor in sent.items())


# forming a group


def test_the_signature_is_that_of_torchrl():
    transport = VLLMCollectiveTransport("127.0.0.1", 29500, 1, 3, "cpu", "engine")
    assert (transport.rank, transport.world_size, transport.device, transport.vllm_engine) == (
        1,
        3,
        torch.device("cpu"),
        "engine",
    )
    assert transport.backend == "gloo"


def test_it_is_connected_from_forming_the_group_until_its_end():
    port = free_port()
    members = [member(port, rank, 2) for rank in range(2)]
    assert [one.check_connection() for one in members] == [False, False]
    enter(*members)
    assert [one.check_connection() for one in members] == [True, True]
    for one in members:
        one.shutdown()
        one.shutdown()
    assert [one.check_connection() for one in members] == [False, False]


def test_neither_a_default_group_nor_the_environment_is_touched():
    before = dict(os.environ)
    with group(2):
        assert not torch.distributed.is_initialized()
        assert dict(os.environ) == before


@pytest.mark.parametrize("bucket_bytes", [0, BUCKET, 1 << 20])
def test_every_one_of_three_workers_receives_every_bit(bucket_bytes):
    sent = weights()
    with group(4, bucket_bytes=bucket_bytes) as (trainer, *workers):
        for seed in range(3):
            sent = weights(seed)
            receives = [worker.receive_weights for worker in workers]
            _, *received = beside(lambda now=sent: trainer.send_weights("policy", now), *receives)
            assert all(same(one, sent) for one in received)


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
    with pytest.raises(DeadlineError, match=rf"no trainer \(rank 0\) listens at 127.0.0.1:{port}"):
        member(port, 1, 2, timeout_s=SHORT_S).init_all_workers_group({})


def test_a_worker_whose_trainer_listens_but_does_not_enter_names_it():
    trainer = member(0, 0, None)
    info = trainer.open(1, ()).info
    worker = member(info["master_port"], 1, 2, timeout_s=SHORT_S)
    with pytest.raises(DeadlineError, match="rank 0, which did not arrive"):
        worker.init_all_workers_group({})
    trainer.shutdown()


def test_ranks_that_were_given_different_world_sizes_say_both():
    port = free_port()
    trainer, worker = member(port, 0, 2), member(port, 1, 3)
    for error in enter(trainer, worker):
        assert isinstance(error, ConfigError)
        assert "world_size 3, the trainer 2" in str(error)
    trainer.shutdown()


@pytest.mark.parametrize("other", [(torch.float32, (3,)), (torch.bfloat16, (2,)), None])
def test_a_parameter_on_which_ranks_disagree_is_named(other):
    port = free_port()
    trainer, worker = member(port, 0, 2), member(port, 1, 2)
    mine = {"same": (torch.int8, (1,)), "layer.weight": (torch.float32, (2,))}
    theirs = {**mine, "layer.weight": other} if other else {"same": (torch.int8, (1,))}
    for error in beside(lambda: trainer.init_all_workers_group(mine), lambda: worker.init_all_workers_group(theirs)):
        assert isinstance(error, ManifestError)
        assert "'layer.weight'" in str(error)
    trainer.shutdown()


def test_a_worker_may_leave_the_world_size_to_the_trainer():
    port = free_port()
    members = [member(port, 0, 2), member(port, 1, None)]
    assert enter(*members) == [None, None]
    for one in members:
        one.shutdown()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rank": 2, "world_size": 2}, "rank 2 does not exist in world_size 2"),
        ({"backend": "mpi"}, "no collective backend 'mpi'"),
        ({"backend": "nccl", "device": "cpu"}, "NCCL cannot move tensors on cpu"),
        ({"bucket_bytes": -1}, "bucket_bytes=-1"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(settings, words):
    with pytest.raises(ConfigError, match=words):
        VLLMCollectiveTransport(**settings)


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


def test_the_port_is_free_again_after_the_end():
    port = free_port()
    for _ in range(3):
        members = [member(port, rank, 2) for rank in range(2)]
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


def test_before_a_group_is_formed_everything_says_what_to_call():
    for call in (lambda: member(1, 0, 2).send_weights("policy", weights()), lambda: member(1, 1, 2).receive_weights(0)):
        with pytest.raises(NotConnectedError, match="init_all_workers_group"):
            call()


def test_what_was_not_agreed_on_is_not_sent():
    port = free_port()
    members = [member(port, rank, 2) for rank in range(2)]
    enter(*members, metadata={"p00": (torch.float32, (5000,))})
    with pytest.raises(ManifestError, match="'p01'"):
        members[0].send_weights("policy", weights(count=2))
    for one in members:
        one.shutdown()


# memory


def test_large_tensors_are_received_in_the_tensor_that_was_given():
    sent = {"large": any_bits(torch.bfloat16, 3 << 20), "strided": torch.randn(600, 500).t(), "small": torch.randn(3)}
    given = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in sent.items()}
    given["strided"] = torch.zeros(600, 500).t()
    with group(2, bucket_bytes=1 << 20) as (trainer, worker):

        def receive():
            info = worker.poll(WAIT_S)
            return dict(worker.receive(info, given))

        _, received = beside(lambda: trainer.send_weights("policy", sent), receive)
    assert all(received[name] is given[name] for name in given)
    assert all(torch.equal(given[name], tensor) for name, tensor in sent.items() if name != "large")
    assert same_bits(given["large"], sent["large"])


@pytest.mark.parametrize("bucket_bytes", [0, BUCKET])
def test_what_a_worker_keeps_is_never_written_again(bucket_bytes):
    kept = []
    with group(2, bucket_bytes=bucket_bytes) as (trainer, worker):
        for seed in range(4):
            _, received = beside(lambda s=seed: trainer.send_weights("policy", weights(s)), worker.receive_weights)
            kept.append(received)
    assert all(same(received, weights(seed)) for seed, received in enumerate(kept))


# failures that leave the group whole


def test_a_worker_that_cannot_take_the_weights_says_so_to_the_trainer_and_stays_in_step():
    sent = weights()
    with group(2) as (trainer, worker):
        given = {**{name: torch.zeros(5000) for name in sent}, "p07": torch.zeros(4)}
        refused, declined = beside(
            lambda: trainer.send_weights("policy", sent), lambda: worker.receive_weights(weights=given)
        )
        assert isinstance(declined, ManifestError) and not given["p00"].any()
        assert isinstance(refused, TransportError)
        assert "rank 1" in str(refused) and "'p07'" in str(refused)
        _, received = beside(lambda: trainer.send_weights("policy", sent), worker.receive_weights)
        assert same(received, sent)


def test_a_worker_that_stops_half_way_says_so_to_the_trainer_and_stays_in_step():
    sent = weights()
    with group(3) as (trainer, whole, broken):

        def stop_early():
            info = broken.poll(WAIT_S)
            for name, _ in broken.receive(info, {}):
                if name == "p03":
                    return

        told, received, _ = beside(lambda: trainer.send_weights("policy", sent), whole.receive_weights, stop_early)
        assert isinstance(told, TransportError) and "rank 2" in str(told) and "'p03'" in str(told)
        assert same(received, sent)
        _, *received = beside(
            lambda: trainer.send_weights("policy", sent), whole.receive_weights, broken.receive_weights
        )
        assert all(same(one, sent) for one in received)


# failures that end it


class Interrupted(WeightSource):
    """Yields some parameters, then calls back."""

    def __init__(self, tensors, after, call):
        self._tensors, self._after, self._call = tensors, after, call

    def params(self):
        return tuple(ParamMeta.of(name, tensor) for name, tensor in self._tensors.items())

    def __iter__(self):
        for index, pair in enumerate(self._tensors.items()):
            if index == self._after:
                self._call()
            yield pair


def test_a_source_that_fails_half_way_ends_the_worker_with_the_reason():
    def fail():
        raise ValueError("shard 3 is gone")

    with group(2) as (trainer, worker):
        failed, lost = beside(
            lambda: trainer.send_weights("policy", Interrupted(weights(), 12, fail)), worker.receive_weights
        )
        assert isinstance(failed, ValueError)
        assert isinstance(lost, TransportError) and "shard 3 is gone" in str(lost) and "rank 0" in str(lost)
        assert not trainer.check_connection() and not worker.check_connection()


@pytest.mark.parametrize("who", ["trainer", "worker"])
def test_an_abort_from_another_thread_ends_both_sides_at_once(who):
    with group(2) as (trainer, worker):
        reached = threading.Event()
        stuck = Interrupted(weights(count=40), 30, lambda: (reached.set(), aborted.wait(WAIT_S)))
        aborted = threading.Event()

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
    trainer = member(0, 0, None)
    handoff = trainer.open(1, ())
    timer = threading.Timer(0.2, trainer.abort)
    timer.start()
    with pytest.raises(TransportError, match="aborted"):
        handoff.transfer()
    trainer.shutdown()


def test_after_a_failure_the_same_trainer_connects_again_to_another_number_of_workers():
    trainer, sent = member(0, 0, None), weights()
    for workers in (1, 2, 1):
        handoff = trainer.open(workers, ())
        ends = [VLLMCollectiveTransport.from_info(handoff.info) for _ in range(workers)]
        beside(
            handoff.transfer,
            *(partial(end.join, {**handoff.info, "rank": rank}) for rank, end in enumerate(ends, 1)),
        )

        def update(end, info):
            return dict(end.receive(json.loads(json.dumps(info)), {}))

        (piece,) = trainer.prepare(tx.as_source(sent), 1)
        _, *received = beside(piece.transfer, *(lambda e=e, i=piece.info: update(e, i) for e in ends))
        assert all(same(one, sent) for one in received)
        trainer.abort()
        assert not trainer.check_connection()
        for end in ends:
            with pytest.raises(WeightSyncError):
                end.receive_weights(WAIT_S)
    trainer.shutdown()


def test_a_rank_offset_that_does_not_fit_is_refused():
    info = member(0, 0, None).open(1, ()).info
    with pytest.raises(ConfigError, match="rank 2 does not exist in world_size 2"):
        VLLMCollectiveTransport.from_info(info).join({**info, "rank": 2})


def test_a_world_size_other_than_the_engines_is_refused():
    with pytest.raises(ConfigError, match=r"world_size 2, but the engines have 3 workers.*world_size 4"):
        member(0, 0, 2).open(3, ())


# processes that die or freeze

WORKER = """
import sys
from torchrl_ext.transports.collective import VLLMCollectiveTransport
port, stop_at = int(sys.argv[1]), int(sys.argv[2])
end = VLLMCollectiveTransport("127.0.0.1", port, 1, 2, "cpu", bucket_bytes=4096, timeout_s=60)
print("started", flush=True)
end.init_all_workers_group({})
print("connected", flush=True)
info = end.poll(60)
for index, (name, tensor) in enumerate(end.receive(info, {})):
    if index == stop_at:
        print("half", flush=True)
        sys.stdin.readline()
"""

TRAINER = """
import sys, torch
from torchrl_ext.transports.collective import VLLMCollectiveTransport
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.source import WeightSource

class Stuck(WeightSource):
    def params(self):
        return tuple(ParamMeta(f"p{i}", torch.float32, (5000,)) for i in range(40))
    def __iter__(self):
        for meta in self.params():
            if meta.name == "p30":
                print("half", flush=True)
                sys.stdin.readline()
            yield meta.name, torch.ones(meta.shape)

end = VLLMCollectiveTransport("127.0.0.1", int(sys.argv[1]), 0, 2, "cpu", bucket_bytes=4096, timeout_s=60)
print("started", flush=True)
end.init_all_workers_group({})
print("connected", flush=True)
sys.stdin.readline()
end.send_weights("policy", Stuck())
"""

LARGE = {f"p{i}": torch.ones(1 << 20) for i in range(40)}


@pytest.mark.parametrize(("how", "kind"), [(signal.SIGKILL, TransportError), (signal.SIGSTOP, DeadlineError)])
def test_a_worker_process_that_dies_or_freezes_half_way_ends_the_send_and_is_named(how, kind):
    port = free_port()
    with running_python(WORKER, port, 3) as child:
        trainer = member(port, 0, 2, timeout_s=WAIT_S if how is signal.SIGKILL else 8)
        assert child.stdout.readline() == "started\n"
        trainer.init_all_workers_group({})
        assert child.stdout.readline() == "connected\n"

        def strike():
            assert child.stdout.readline() == "half\n"
            os.kill(child.pid, how)

        began = time.monotonic()
        sent, _ = beside(lambda: trainer.send_weights("policy", LARGE), strike)
        assert isinstance(sent, kind)
        assert f"no sign of life from rank 1 (pid {child.pid}" in str(sent)
        assert time.monotonic() - began < WAIT_S
        trainer.shutdown()


@pytest.mark.parametrize("moment", ["idle", "half"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_trainer_process_that_dies_or_freezes_ends_the_worker_and_is_named(how, moment):
    port = free_port()
    with running_python(TRAINER, port) as child:
        worker = member(port, 1, 2, timeout_s=WAIT_S if how is signal.SIGKILL else 8)
        assert child.stdout.readline() == "started\n"
        worker.init_all_workers_group({})
        assert child.stdout.readline() == "connected\n"

        def strike():
            if moment == "half":
                child.stdin.write("\n")
                child.stdin.flush()
                assert child.stdout.readline() == "half\n"
            os.kill(child.pid, how)

        began = time.monotonic()
        lost, _ = beside(lambda: worker.receive_weights(WAIT_S), strike)
        assert isinstance(lost, (TransportError, DeadlineError))
        assert "rank 0" in str(lost)
        assert time.monotonic() - began < WAIT_S
        assert not worker.check_connection()
        worker.shutdown()
