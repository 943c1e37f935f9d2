"""`IPCTransport` beyond the contract: other processes, deaths at every step, and whatever the other end says."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis.strategies import randoms

import torchrl_ext as tx
from tests.data.group.members import Interrupted, beside
from tests.hostile import worse_json
from tests.memory import track_peak
from tests.processes import calling, family, files_of, maps_of, running_python
from torchrl_ext.base.deadline import Deadline, in_thread
from torchrl_ext.base.errors import ConfigError, DeadlineError, NotConnectedError, TransportError, WeightSyncError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.group.memory import HOST, Bell, create
from torchrl_ext.data.group.store import HostedStore, RemoteStore
from torchrl_ext.data.transports import ipc
from torchrl_ext.data.transports.base import Arrival, Update, Worker
from torchrl_ext.data.transports.ipc import IPCEnd
from torchrl_ext.data.weights.source import MappingSource
from torchrl_ext.testing import SMALL_BYTES, WAIT_S

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")


def follows(channel):
    """A worker that takes one version after the other, and says of each which it is and what its tensors add up to."""
    worker = tx.make_transport("ipc", channel=channel, timeout_s=60)
    print("up", flush=True)
    while (received := worker.receive_weights(60)) is not None:
        print(worker.received_version, int(sum(tensor.sum() for tensor in received.values())), flush=True)


def stops_taking(channel, number, at):
    """A worker that gets a signal at a parameter of its first version."""
    for index, _ in enumerate(taking(tx.make_transport("ipc", channel=channel, timeout_s=60))):
        if index == at:
            os.kill(os.getpid(), number)


def stops_sending(channel, number, at):
    """A trainer that gets a signal at a parameter of its first version, or after it."""
    die = partial(os.kill, os.getpid(), number)
    trainer = tx.make_transport("ipc", channel=channel, bucket_bytes=SMALL_BYTES, timeout_s=60)
    trainer.send_weights(Interrupted(weights(), at, die))
    die()


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


def taking(worker):
    """The pairs of the next version, which may be left half-way."""
    within = Deadline(WAIT_S)
    end = worker.attend(within)
    return end.receive(end.next(within), {}, within)


def exchange(trainer, worker, value=5.0):
    """Send a version, and require that it arrives."""
    sent, received = beside(lambda: trainer.send_weights(weights(value)), lambda: worker.receive_weights(WAIT_S))
    assert sent is None and received["39"][0] == value


@contextmanager
def joined(trainer):
    """A worker of a trainer that a control layer drives."""
    within = Deadline(trainer.timeout_s)
    opening = trainer.open(1, (), within)
    join = partial(tx.IPCTransport.join, opening.info, Worker(rank=1), within)
    worker, _ = beside(join, lambda: opening.transfer(within))
    with closing(worker):
        yield worker


def prepared(trainer, tensors, within):
    """A handoff of version 1, and how a worker hears of it."""
    source = MappingSource(tensors)
    handoff = trainer.prepare(Update(source=source, version=1), within)
    return handoff, Arrival(version=1, params=source.params(), info=handoff.info)


class TestBetweenProcesses:
    def test_several_workers_share_a_buffer_and_outlive_trainers(self, make, channel):
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

    def test_workers_come_late_and_leave_between_versions(self, make, channel):
        trainer, first = make(workers=1), make()
        exchange(trainer, first)
        with running_python(calling(follows, channel)) as second:
            assert second.stdout.readline() == "up\n"
            heard = ""
            while not heard:  # it is let in at one of these
                exchange(trainer, first)
                heard = second.stdout.readline() if select.select([second.stdout], [], [], 0)[0] else ""
            assert heard.endswith(" 60000\n")
        for _ in range(5):
            first.shutdown()
            first = make()
            exchange(trainer, first)

    @pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells")
    def test_a_send_adds_no_more_memory_than_the_staging_buffer(self, make, channel):
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


class TestDeaths:
    @pytest.mark.parametrize("at", [5, 20, 39])  # by 5 the worker has taken the first bucket
    def test_killed_trainer_frees_the_buffer_and_worker_reports(self, make, channel, at):
        worker = make(timeout_s=WAIT_S)
        with running_python(calling(stops_sending, channel, int(signal.SIGKILL), at)) as child:
            with pytest.raises(WeightSyncError, match=r"the trainer.*is gone"):
                worker.receive_weights(WAIT_S)
            child.wait(WAIT_S)  # a dying process closes its sockets before its other files
            assert everywhere() == []
        assert worker.receive_weights(0.0) is None and not worker.check_connection()
        exchange(make(), worker)

    @pytest.mark.parametrize("at", [0, 20, 39])
    def test_killed_worker_is_named_and_the_next_send_arrives(self, make, channel, at):
        trainer, worker = make(workers=2, timeout_s=WAIT_S), make()
        other = in_thread(lambda: worker.receive_weights(WAIT_S), "another worker")
        with running_python(calling(stops_taking, channel, int(signal.SIGKILL), at)) as bad:
            words = rf"did not arrive: .*a worker \(pid {bad.pid}\) is gone"
            with pytest.raises(TransportError, match=words) if at < 39 else nullcontext():  # at 39 it had every byte
                trainer.send_weights(weights())
            with pytest.raises(NotConnectedError, match=rf"pid {bad.pid}\) is gone") if at < 39 else nullcontext():
                other.result(WAIT_S)
        trainer.shutdown()
        exchange(make(), worker)


def test_a_half_is_filled_again_once_it_was_copied(make):
    """In every version: while a worker stops after its first bucket, the trainer does not pack the fourth one."""
    trainer, within, early, go_on = make(), Deadline(WAIT_S), [], threading.Event()
    with joined(trainer) as worker:
        for version in (1, 2):
            go_on.clear()
            source = Interrupted(weights(version), 5, lambda: early.append(not go_on.is_set()))  # of the fourth bucket
            handoff = trainer.prepare(Update(source=source, version=version), within)
            sending = in_thread(partial(handoff.transfer, within), "sends")
            pairs = worker.receive(Arrival(version=version, params=source.params()), {}, within)
            held = [next(pairs)]
            assert not go_on.wait(0.2)  # the trainer has time to do it wrong
            go_on.set()
            held += pairs
            assert all(bool((tensor == version).all()) for _, tensor in held) and len(held) == 40
            sending.result(WAIT_S)
    assert early == [False, False]


OWN = rf"a worker \(pid {os.getpid()}\)"
WAYS = {  # what is sent; how it is taken; what trainer and worker say
    "it cannot load": (
        weights(),
        lambda worker: worker.receive_weights(WAIT_S, weights={"00": torch.zeros(7)}),
        (TransportError, rf"version 1 did not arrive: .*{OWN} gave up: .*'?00"),
        (WeightSyncError, "00"),
    ),
    "it stops loading": (
        weights(),
        lambda worker: next(taking(worker)) and None,
        (TransportError, f"version 1 did not arrive: .*{OWN}"),
        (type(None), "None"),
    ),
}


class TestFailures:
    @pytest.mark.parametrize("way", WAYS)
    def test_both_ends_hear_why_and_the_next_send_arrives(self, make, way):
        trainer, worker = make(), make()
        sent, take, *expected = WAYS[way]
        for said, (kind, words) in zip(
            beside(lambda: trainer.send_weights(sent), lambda: take(worker)), expected, strict=True
        ):
            assert isinstance(said, kind) and re.search(words, str(said)), said
        exchange(trainer, worker)

    def test_worker_may_leave_before_the_trainer_sees_completion(self, make):
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

        received, sent = beside(takes, lambda: make().send_weights(Waits(weights())))
        assert sent is None and received["39"][0] == 1

    def test_a_worker_that_freezes_is_named_at_the_deadline(self, make, channel):
        trainer = make(timeout_s=2)
        frozen = calling(stops_taking, channel, int(signal.SIGSTOP), 20)
        with running_python(frozen), pytest.raises(DeadlineError, match=r"pid \d+\) did not take bucket"):
            trainer.send_weights(weights())

    def test_a_trainer_that_freezes_is_named_at_the_workers_deadline(self, make, channel):
        """Between two answers or before one, it does not hold the worker."""
        worker = make(timeout_s=1)
        with running_python(calling(stops_sending, channel, int(signal.SIGSTOP), 20)) as child:
            words = rf"pid {child.pid}\) did not fill bucket|the trainer .* hangs"
            with pytest.raises((DeadlineError, NotConnectedError), match=words):
                worker.receive_weights(WAIT_S)
            child.send_signal(signal.SIGCONT)

    def test_what_a_trainer_said_before_it_died_is_forgotten_with_it(self, make):
        """Its buffer was gone before the worker, which it had let in, looked; the worker tells it why it leaves."""
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait(WAIT_S)
        with closing(create(HOST, 2 * SMALL_BYTES)) as segment:
            handle = msgspec.structs.replace(segment.handle, pid=ended.pid)
        worker = make()
        with closing(HostedStore(worker._address, None, "")) as store:
            arriving = in_thread(lambda: worker.receive_weights(WAIT_S), "receives")
            token, _, devices = store.find("join/1", Deadline(WAIT_S))
            assert devices[-1] == HOST
            store.set(f"{token}/welcome", ["the trainer", 1, handle, *(Bell().handle for _ in range(2))])
            with pytest.raises(TransportError, match="the trainer is gone"):
                arriving.result(WAIT_S)
            with pytest.raises(NotConnectedError, match="cannot be mapped here"):
                store.find("anything", Deadline(WAIT_S))
        assert worker.receive_weights(0.0) is None and not worker.check_connection()
        exchange(make(), worker)

    def test_deadline_names_missing_workers(self, make):
        opening = make().open(2, (), Deadline(WAIT_S))
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect("\0" + opening.info["address"])
            stranger.sendall(b"\0\0\0\2[]")
            with pytest.raises(DeadlineError, match="rank 1, rank 2 did not connect"):
                opening.transfer(Deadline(0.5))

    def test_a_trainer_listens_again_right_after_a_failure(self, make):
        trainer = make(timeout_s=0.2)
        for _ in range(5):
            with pytest.raises(DeadlineError, match=r"1 of 1 workers did not connect within 0\.2 s"):
                trainer.send_weights(weights())

    def test_a_worker_that_only_looks_gets_a_version_too(self, make):
        trainer, worker = make(), make()
        sending, received = in_thread(lambda: trainer.send_weights(weights()), "sends"), None
        while received is None and not sending.done():
            received = worker.receive_weights(0.0)
        sending.result(WAIT_S)
        assert received["39"][0] == 1

    def test_a_worker_that_looks_no_further_gets_the_next_version(self, make):
        trainer, within = make(), Deadline(WAIT_S)
        with joined(trainer) as worker:
            for value in (1, 2):
                handoff, arrival = prepared(trainer, weights(value), within)
                sending = in_thread(partial(handoff.transfer, within), "sends")
                pairs = worker.receive(arrival, {}, within)
                assert [float(next(pairs)[1][0]) for _ in arrival.params] == [value] * 40
                pairs.close()
                sending.result(WAIT_S)

    @pytest.mark.parametrize(
        ("who", "how", "error"),
        [
            ("worker", "stop", TransportError),
            ("worker", "close", NotConnectedError),
            ("trainer", "stop", TransportError),
        ],
    )
    def test_the_wait_for_an_idle_end_can_be_ended(self, make, who, how, error):
        trainer, within = make(), Deadline(10 * WAIT_S)
        with joined(trainer) as worker:
            handoff, arrival = prepared(trainer, weights(), within)
            takes, sends = partial(list, worker.receive(arrival, {}, within)), partial(handoff.transfer, within)
            waiting = in_thread(takes if who == "worker" else sends, who)
            within.stop.set() if how == "stop" else worker.close()
            with pytest.raises(error, match="rank 1" if who == "trainer" else None):
                waiting.result(WAIT_S)

    def test_a_trainer_without_memory_for_the_buffer_says_so_at_once(self, make, monkeypatch):
        monkeypatch.setattr(ipc, "create", no_memory)
        trainer, worker = make(timeout_s=10 * WAIT_S), make()
        arriving = in_thread(lambda: worker.receive_weights(WAIT_S), "receives")
        with pytest.raises(TransportError, match="4096 bytes of shared memory cannot be allocated"):
            trainer.send_weights(weights())
        worker.abort()
        assert arriving.result(WAIT_S) is None

    def test_where_memory_is_short_a_default_buffer_is_smaller(self, make, monkeypatch):
        monkeypatch.setattr(ipc, "create", lambda device, n: (create if n <= 5 << 20 else no_memory)(device, n))
        trainer, worker = make(bucket_bytes=None), make()
        exchange(trainer, worker)
        assert trainer.staging_bytes == 4 << 20

    def test_handoff_of_too_many_buckets_is_refused_by_both_ends(self, make, monkeypatch):
        trainer, within = make(), Deadline(10 * WAIT_S)
        huge, source = (ParamMeta("huge", torch.uint8, ((SMALL_BYTES << 19) + 1,)),), MappingSource({})
        monkeypatch.setattr(source, "params", lambda: huge)
        with joined(trainer) as worker:
            with pytest.raises(ConfigError, match=r"1,048,577 buckets.* larger bucket_bytes"):
                trainer.prepare(Update(source=source, version=1), within)
            handoff, arrival = prepared(trainer, weights(), within)
            sending = in_thread(partial(handoff.transfer, within), "sends")
            with pytest.raises(ConfigError, match="1,048,577 buckets"):
                list(worker.receive(replace(arrival, params=huge), {}, within))
            with pytest.raises(TransportError, match=r"rank 1 .* gave up: a handoff takes 1,048,577 buckets"):
                sending.result(WAIT_S)


def no_memory(device, nbytes):
    raise TransportError(f"{nbytes} bytes of shared memory cannot be allocated")


@as_root
class TestOtherUsers:
    def test_one_who_connects_all_the_time_keeps_nobody_waiting(self, make):
        trainer, worker = make(timeout_s=WAIT_S), make()
        exchange(trainer, worker)
        with calling_as_nobody(connects_all_the_time, worker._address) as stranger:
            worker.shutdown()
            exchange(trainer, make())
            trainer.shutdown()
            with pytest.raises(DeadlineError, match="1 of 1 workers did not connect"):
                make(timeout_s=0.2).send_weights(weights())
            assert select.select([stranger.stdout], [], [], 0)[0] == []  # it still goes on

    def test_one_who_has_the_address_first_is_named_by_both_ends(self, make):
        trainer, worker = make(), make()
        with calling_as_nobody(binds, worker._address, True) as stranger:
            with pytest.raises(TransportError, match=rf"process {stranger.pid} of user {NOBODY} listens there"):
                trainer.send_weights(weights())
            with pytest.raises(TransportError, match=rf"pid {stranger.pid}\) belongs to user {NOBODY}"):
                worker.receive_weights(WAIT_S)
        with (
            calling_as_nobody(binds, worker._address, False),
            pytest.raises(TransportError, match="already in use"),
        ):
            trainer.send_weights(weights())


@contextmanager
def calling_as_nobody(function, *args):
    """A process of another user that calls ``function`` beside the block; the block begins when it is at work."""
    with running_python(calling(function, *args)) as stranger:
        assert stranger.stdout.readline() == "at work\n"
        yield stranger


def binds(address, listening):
    os.setuid(NOBODY)
    with socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.bind("\0" + address)
        if listening:
            endpoint.listen()
        print("at work", flush=True)
        sys.stdin.read()


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


# whatever arrives from the other end

PARAMS = (ParamMeta("a", torch.float32, (3,)), ParamMeta("b", torch.uint8, (2, 3)))


def leave(store, draw, key, note, chance=0.5):
    """Set a note that may be damaged, as text that may be no JSON."""
    note = msgspec.to_builtins(note)
    with suppress(WeightSyncError):
        store.set(key, msgspec.Raw(json.dumps(worse_json(note, draw) if draw.random() < chance else note).encode()))
        store.find(key)  # by now it is there


@given(randoms(use_true_random=False))
def test_a_trainer_takes_any_note_of_a_worker(draw):
    within = Deadline(WAIT_S)
    with tx.IPCTransport(bucket_bytes=SMALL_BYTES) as trainer:
        opening = trainer.open(1, (), within)
        worker = RemoteStore(opening.info["address"], None, "", within)
        leave(worker, draw, "join/1", ["t", "rank 1", [HOST]])
        with suppress(WeightSyncError), closing(worker):
            opening.transfer(Deadline(0.0))
            leave(worker, draw, "1/taken/t", [True])
            prepared(trainer, {"a": torch.ones(3), "b": torch.ones(2, 3)}, within)[0].transfer(Deadline(0.0))


@given(randoms(use_true_random=False))
def test_a_worker_takes_any_note_of_a_trainer(draw):
    address = ipc._address(os.urandom(16).hex())
    end = IPCEnd(address, [HOST], WAIT_S)
    with closing(create(HOST, 8192)) as segment, closing(HostedStore(address, None, "")) as store, closing(end):
        while end.store is None:
            with suppress(DeadlineError):
                end.enter(Deadline(0.02))
        bells = Bell(), Bell()
        welcome = ["the trainer", 1, segment.handle, *(bell.handle for bell in bells)]
        leave(store, draw, f"{store.find('join/1')[0]}/welcome", welcome)
        leave(store, draw, "1/version", [1, [meta.to_json() for meta in PARAMS]])
        if draw.random() < 0.5:
            bells[0].ring()
        arrival = Arrival(version=1, params=PARAMS)
        with suppress(WeightSyncError):
            arrival = end.next(Deadline(0.0)) or arrival
        with suppress(WeightSyncError):
            list(end.receive(arrival, {}, Deadline(0.0)))
