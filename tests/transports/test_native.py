"""Transport native: its wires against readers that know only what stock engines do, and its trainer end against their
workers. The suite of every transport runs over both ends of ours."""

from __future__ import annotations

import hashlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.transports.stock_workers import WAIT_S, stock_workers
from torchrl_ext.errors import ConfigError, DeadlineError, TransportError, WeightSyncError
from torchrl_ext.testing import DTYPES, any_bits
from torchrl_ext.transports.native.meeting import Meeting, keep_store
from torchrl_ext.transports.native.transport import NativeTransport
from torchrl_ext.transports.native.wire import wire_of
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.digests import byte_view
from torchrl_ext.weights.source import MappingSource, as_source

SHORT_S = 2


# how tensors are cut


def some_params(seed, count=60):
    chance = random.Random(seed)
    shapes = [(), (0, 3), (1,), (7,), (33,), (40, 50), (3, 1, 5)]
    return [ParamMeta(f"p{i}", chance.choice(DTYPES), chance.choice(shapes)) for i in range(count)]


def places(params, first, stop):
    """Where each tensor of a call begins that has bytes, one after the other without padding."""
    at = 0
    for meta in params[first:stop]:
        if meta.nbytes:
            yield meta, at
        at += meta.nbytes


@pytest.mark.parametrize("make", ["sglang", "vllm"])
@pytest.mark.parametrize("seed", range(6))
def test_calls_and_broadcasts_cover_every_parameter_once_and_in_order(make, seed):
    params = some_params(seed)
    wire = wire_of(params, make, 512)
    named = [index for first, stop in wire.calls for index in range(first, stop)]
    carried = [index for one in wire.buckets for span in one.spans for index in range(span.first, span.stop)]
    assert named == carried == list(range(len(params)))
    assert sum(bucket.nbytes for bucket in wire.buckets) == sum(meta.nbytes for meta in params)


@pytest.mark.parametrize("seed", range(6))
def test_a_call_to_sglang_is_one_broadcast_in_which_every_tensor_is_aligned(seed):
    params = some_params(seed)
    wire = wire_of(params, "sglang", 512)
    spans = [[bucket.spans[0].first, bucket.spans[-1].stop] for bucket in wire.buckets]
    assert spans == wire.calls
    for first, stop in wire.calls:
        found = list(places(params, first, stop))
        assert all(at % meta.dtype.itemsize == 0 for meta, at in found)
        assert sum(meta.nbytes for meta, _ in found) <= 512 or len(found) == 1


@pytest.mark.parametrize("seed", range(6))
def test_a_call_to_vllm_is_cut_where_a_broadcast_grows_past_its_size(seed):
    params, size = some_params(seed), 512
    wire = wire_of(params, "vllm", size)
    expected = []
    for first, stop in wire.calls:
        filled = 0
        for meta in params[first:stop]:  # as vLLM's packer and its reader both count
            assert not meta.nbytes or filled % meta.dtype.itemsize == 0
            filled += meta.nbytes
            if filled > size:
                expected.append(filled)
                filled = 0
        expected += [filled] if filled else []
    assert [bucket.nbytes for bucket in wire.buckets if bucket.nbytes] == expected


# the trainer's end, and workers of torch's calls alone


@pytest.fixture(scope="module")
def workers():
    with stock_workers(4) as found:
        yield found


@pytest.fixture
def trainer(workers):
    made = NativeTransport(timeout_s=WAIT_S, bucket_bytes=1 << 16)
    yield made
    made.shutdown()


def connect(trainer, workers, wait=True):
    handoff = trainer.open(len(workers), ())
    for rank, worker in enumerate(workers, 1):
        worker.tell("init", group=handoff.info["group"], rank=rank)
    if wait:
        handoff.transfer()
        assert [worker.answer() for worker in workers] == [{"ok": None}] * len(workers)
    return handoff


def tell_to_receive(handoff, workers, name):
    for first, stop in handoff.info["calls"]:
        for worker in workers:
            worker.tell("receive", name=name, params=handoff.info["params"][first:stop])


def received(handoff, worker):
    return {name: digest for _ in handoff.info["calls"] for name, digest in worker.answer()["ok"].items()}


def weights(seed=0):
    found = {f"{dtype}".replace("torch.", ""): any_bits(dtype, 37, 11, seed=seed) for dtype in DTYPES}
    return found | {"large": any_bits(torch.bfloat16, 300, 400, seed=seed), "scalar": any_bits(torch.float32)}


def digests(named):
    return {name: hashlib.sha256(byte_view(tensor).numpy().tobytes()).hexdigest() for name, tensor in named.items()}


def send(trainer, workers, name, version=1):
    sent = weights(version)
    handoff = trainer.prepare(as_source(sent), version)
    tell_to_receive(handoff, workers, name)
    handoff.transfer()
    for worker in workers:
        assert received(handoff, worker) == digests(sent)


def leave(workers, name):
    for worker in workers:
        worker.tell("destroy", name=name)
    return [worker.answer() for worker in workers]


def test_every_bit_arrives_at_four_workers_in_two_versions(trainer, workers):
    name = connect(trainer, workers).info["group"]["group_name"]
    send(trainer, workers, name)
    send(trainer, workers, name, 2)
    assert leave(workers, name) == [{"ok": None}] * 4


def test_a_trainer_that_gives_up_half_way_frees_all_workers_who_leave_and_the_next_group_works(trainer, workers):
    name = connect(trainer, workers).info["group"]["group_name"]

    sent = weights()

    class Halting(MappingSource):
        def __iter__(self):
            for number, pair in enumerate(super().__iter__()):
                if number == 5:
                    raise RuntimeError("the source broke")
                yield pair

    handoff = trainer.prepare(Halting(sent), 1)
    tell_to_receive(handoff, workers, name)
    with pytest.raises(RuntimeError, match="the source broke"):
        handoff.transfer()
    trainer.abort()  # as a sender does then
    for worker in workers:  # as the client of an engine does after a failure
        worker.tell("destroy", name=name)
    for worker in workers:
        told = [worker.answer() for _ in handoff.info["calls"]]
        assert any("error" in answer for answer in told)
        assert worker.answer() == {"ok": None}
    name = connect(trainer, workers).info["group"]["group_name"]
    send(trainer, workers, name, 2)
    leave(workers, name)


def test_a_rank_that_never_comes_ends_the_wait_of_the_others_at_the_trainers_deadline(workers):
    trainer = NativeTransport(timeout_s=SHORT_S)
    handoff = trainer.open(3, ())
    for rank in (1, 2):
        workers[rank].tell("init", group=handoff.info["group"], rank=rank)
    with pytest.raises(DeadlineError, match="the 4 ranks of a group did not meet"):
        handoff.transfer()
    for rank in (1, 2):
        assert "error" in workers[rank].answer()
    trainer.shutdown()


def test_a_worker_that_is_stopped_ends_an_update_at_the_deadline_and_by_an_abort(workers):
    two = workers[:2]
    trainer = NativeTransport(timeout_s=SHORT_S, bucket_bytes=1 << 16)
    for abort in (False, True):
        name = connect(trainer, two).info["group"]["group_name"]
        sent = {f"p{i}": any_bits(torch.float32, 1 << 20) for i in range(8)}
        handoff = trainer.prepare(as_source(sent), 1)
        two[0].freeze()
        try:
            with ThreadPoolExecutor(1) as pool:
                moving = pool.submit(handoff.transfer)
                if abort:
                    trainer.abort()
                with pytest.raises((DeadlineError, TransportError), match="was not sent to every engine"):
                    moving.result(WAIT_S)
        finally:
            two[0].thaw()
        assert not trainer.check_connection()
        leave(two, name)
    trainer.shutdown()


def test_a_worker_that_dies_ends_the_update_at_once():
    with stock_workers(2) as two:
        trainer = NativeTransport(timeout_s=WAIT_S)
        connect(trainer, two)
        assert trainer.check_connection()
        handoff = trainer.prepare(as_source({f"p{i}": any_bits(torch.float32, 1 << 20) for i in range(8)}), 1)
        two[1].child.kill()
        with pytest.raises(TransportError, match="was not sent to every engine"):
            handoff.transfer()
        trainer.shutdown()


# settings


def test_a_message_lies_in_the_store_until_the_last_worker_has_it():
    stop = threading.Event()
    kept = keep_store("127.0.0.1", 0, WAIT_S, stop)
    how = {"device": torch.device("cpu"), "backend": "gloo", "timeout_s": WAIT_S, "stop": stop}
    trainer, quick, slow = (
        Meeting("sglang", "127.0.0.1", kept.port, None if rank else kept, rank, 3, "group", **how) for rank in range(3)
    )
    before = trainer._store.num_keys()
    for number in range(5):
        trainer.tell({"number": number})
    for one in (quick, slow):
        assert [one.hear(WAIT_S) for _ in range(5)] == [{"number": number} for number in range(5)]
    assert trainer._store.num_keys() == before
    for one in (quick, slow, trainer):
        one.close()


@pytest.mark.parametrize(
    "settings",
    [{"make": "tensorrt"}, {"bucket_bytes": 0}, {"timeout_s": 0}, {"rank": 2, "world_size": 2}, {"make": "vllm"}],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ConfigError):
        NativeTransport(**{"device": "cpu", **settings})


def test_a_port_that_is_taken_is_named(workers):
    first = NativeTransport()
    port = first.open(1, ()).info["group"]["master_port"]
    with pytest.raises(TransportError, match=f"nobody can listen at 127.0.0.1:{port}"):
        NativeTransport(master_port=port).open(1, ())
    first.shutdown()


@pytest.mark.parametrize("broken", [{}, {"group": 1}, {"group": {"master_address": 1}}, {"bucket_bytes": "x"}], ids=str)
def test_an_invitation_that_cannot_be_read_is_refused(broken):
    group = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2, "group_name": "g", "backend": "gloo"}
    info = {"make": "sglang", "group": group, "bucket_bytes": 1, "timeout_s": 1.0}
    with pytest.raises(WeightSyncError):
        NativeTransport.from_info({**info, **broken} if broken else {})
