"""The key store of a connection: both ends; deaths, strangers, and messages of any kind."""

import hmac
import os
import queue
import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.control.sockets import talking
from tests.data.group.members import SHORT_S, WAIT_S, beside
from tests.hostile import worse_text
from tests.processes import calling, finished, running_python
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import DeadlineError, NotConnectedError, TransportError
from torchrl_ext.control.serving.processes import free_port
from torchrl_ext.data.group import store
from torchrl_ext.data.group.store import LOST, VALUE_BYTES, Channel, HostedStore, RemoteStore


def hosted(port=0):
    return HostedStore("127.0.0.1", port, "s")


def worker_at(port, timeout_s=WAIT_S):
    return RemoteStore("127.0.0.1", port, "s", Deadline(timeout_s))


@contextmanager
def ends():
    """The store of the trainer and of two workers."""
    trainer = hosted()
    workers = [worker_at(trainer.port) for _ in range(2)]
    try:
        yield trainer, *workers
    finally:
        for one in (*workers, trainer):
            one.close()


@pytest.fixture(scope="module")
def kept():
    trainer = hosted()
    yield trainer
    trainer.close()


@pytest.fixture
def stores():
    with ends() as made:
        yield made


def test_every_end_reads_what_any_end_sets(stores):
    for number, one in enumerate(stores):
        one.set(f"k/{number}", {"é": [number, 1.5, True, "\ud7ff"]})
    for one in stores:
        assert one.collect("k/", range(3), Deadline(WAIT_S)) == {n: {"é": [n, 1.5, True, "\ud7ff"]} for n in range(3)}
        one.set("k/0", "kept", keep=True)
        assert one.find("k/0") != "kept"
    for one, key in zip(stores, ("k/0", "k/1", "k/"), strict=True):
        one.drop(key)
        assert one.find(key) is None
    assert stores[0].collect("k/", range(3), Deadline(0.0)) == {}


def test_a_wait_ends_with_value_deadline_or_stop(stores):
    for one in stores:
        stop = threading.Event()
        began = time.monotonic()
        assert one.find("absent", Deadline(0.2)) is None and time.monotonic() - began >= 0.2
        threading.Timer(0.1, stop.set).start()
        assert one.find("absent", Deadline(WAIT_S, stop=stop)) is None
        waits = [lambda one=one, n=n: one.find(f"later {n}", Deadline(WAIT_S)) for n in range(2)]
        first, second, _ = beside(*waits, lambda: [stores[-1].set(f"later {n}", n + 1) for n in (1, 0)])
        assert (first, second) == (1, 2)
        stores[0].drop("later 0"), stores[0].drop("later 1")


@pytest.mark.parametrize("by", [0, 1])
def test_who_closes_gives_the_reason_to_all(stores, by):
    stores[0].set("answer", 7)
    waits = [lambda one=one: one.find("absent", Deadline(WAIT_S)) for one in stores if one is not stores[by]]
    threading.Timer(0.2, stores[by].close, ["it broke"]).start()
    for lost in beside(*waits):
        assert isinstance(lost, NotConnectedError) and "it broke" in str(lost)
    stores[0].set(LOST, "another reason", keep=True)
    for one in stores:
        assert one.lost() == "it broke"
        with pytest.raises(NotConnectedError, match="it broke"):
            one.find("absent")
    assert stores[0].find("answer") == 7


def leaves_a_will(port):
    worker = worker_at(port)
    worker.will("gone", "an earlier will")
    worker.will(LOST, f"rank 1 (pid {os.getpid()}) is gone")
    assert worker.find("absent") is None
    print("there", flush=True)
    time.sleep(WAIT_S)


def test_a_death_executes_the_will(stores):
    trainer, worker, _ = stores
    with running_python(calling(leaves_a_will, trainer.port)) as child:
        assert child.stdout.readline() == "there\n" and not worker.lost()
        child.kill()
        with pytest.raises(NotConnectedError, match=rf"rank 1 \(pid {child.pid}\) is gone"):
            worker.find("absent", Deadline(WAIT_S))
    assert "is gone" in trainer.find(LOST)
    with pytest.raises(NotConnectedError):  # the later will replaced it
        trainer.find("gone")


def hosts():
    trainer = hosted()
    print(trainer.port, flush=True)
    if os.fork() == 0:  # a child that outlives its parent
        time.sleep(WAIT_S)
        os._exit(0)
    time.sleep(WAIT_S)


def test_the_trainers_death_ends_waits_though_a_fork_lives():
    with running_python(calling(hosts)) as child:
        worker = worker_at(int(child.stdout.readline()))
        threading.Timer(0.2, child.kill).start()
        with pytest.raises(NotConnectedError, match=r"it closed the connection, or ended|reset"):
            worker.find("absent", Deadline(WAIT_S))


@pytest.mark.parametrize("forks", ["who listens", "who dials"])
def test_a_fork_between_a_connection_and_its_first_word_keeps_it_open_nowhere(forks):
    """A fork at any moment: a socket is listed before anybody can use it."""
    met = queue.SimpleQueue()
    listener = store.listen("127.0.0.1", 0)
    stop = store.serve(listener, lambda connected, _: met.put(connected), "a test")
    dialled = store.dial("127.0.0.1", listener.getsockname()[1], Deadline(WAIT_S))
    ends = [met.get(timeout=WAIT_S), dialled]
    ours, theirs = ends if forks == "who listens" else ends[::-1]
    theirs.settimeout(WAIT_S / 2)
    if (child := os.fork()) == 0:
        time.sleep(WAIT_S)
        os._exit(0)
    try:
        ours.close()
        assert theirs.recv(1) == b""
    finally:
        stop()
        theirs.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_fork_keeps_no_port_taken():
    port = (listener := store.listen("127.0.0.1", 0)).getsockname()[1]
    if (child := os.fork()) == 0:
        time.sleep(WAIT_S)
        os._exit(0)
    try:
        listener.close()
        Deadline(WAIT_S).poll(lambda: usable(port), "the port is taken")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def usable(port):
    with suppress(OSError):
        store.listen("127.0.0.1", port).close()
        return True


def test_a_frozen_trainer_is_noticed_by_every_question():
    with running_python(calling(hosts)) as child:
        worker = worker_at(port := int(child.stdout.readline()))
        worker.patience_s = SHORT_S
        os.kill(child.pid, signal.SIGSTOP)
        Deadline(WAIT_S).poll(lambda: psutil.Process(child.pid).status() == "stopped", "it runs")
        for within in (Deadline(0.0), Deadline(WAIT_S)):
            with pytest.raises(NotConnectedError, match="hangs: it said nothing in 1 s"):
                worker.find("absent", within)
        late = []
        ends_it = threading.Timer(10 * SHORT_S, lambda: (late.append("it waited for ever"), child.kill()))
        ends_it.start()
        with pytest.raises(DeadlineError, match=f"127.0.0.1:{port} did not answer within 1 s"):
            worker_at(port, SHORT_S)
        ends_it.cancel()
        assert not late


def forks(port):
    worker = worker_at(port)
    worker.will("gone", True)
    if (child := os.fork()) == 0:
        worker.close("a child")  # which leaves the parent's connection alone
        os._exit(0)
    os.waitpid(child, 0)
    worker.set("parent", os.getpid())
    assert worker.find("parent") == os.getpid()


def test_a_forked_child_ends_nothing(stores):
    done = finished(calling(forks, stores[0].port))
    assert done.returncode == 0, done.stderr
    assert stores[0].find("gone", Deadline(WAIT_S)) and not stores[0].lost()


def test_why_the_last_attempt_failed_is_in_the_error():
    port = free_port()
    with pytest.raises(DeadlineError, match=rf"no trainer \(rank 0\) listened at 127.0.0.1:{port} \(.*refused"):
        worker_at(port, 0.2)
    with talking(lambda connection, _: None) as port:
        said = [""]
        while "it closed the connection" not in said[-1] and len(said) < 9:  # an attempt may be open at the deadline
            with pytest.raises(DeadlineError) as error:
                worker_at(port.port, 0.3)
            said.append(str(error.value))
        assert "it closed the connection" in said[-1], said


# strangers


def test_a_worker_refuses_a_host_without_the_secret():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def play():
            channel = Channel(listener.accept()[0], "a worker")
            channel.send({"nonce": "0" * 32}, Deadline(WAIT_S))
            said = channel.read(Deadline(WAIT_S))
            channel.send({"proof": said["proof"]}, Deadline(WAIT_S))  # a proof of the other role is none

        threading.Thread(target=play).start()
        with pytest.raises(TransportError, match="refused this worker"):
            worker_at(listener.getsockname()[1])


def test_an_address_in_use_is_named(stores):
    with pytest.raises(TransportError, match=r"(?s)cannot listen at .*pick another master_port"):
        hosted(stores[0].port)


def test_a_trainer_listens_again_where_it_just_did():
    port = free_port()
    for _ in range(20):
        hosted(port).close()


def test_silent_strangers_keep_nobody_out(stores, monkeypatch):
    monkeypatch.setattr(store, "_GREET_S", 0.3)
    trainer = stores[0]
    strangers = [store.dial("127.0.0.1", trainer.port, Deadline(WAIT_S)) for _ in range(40)]
    worker_at(trainer.port).close()
    for stranger in strangers:
        stranger.settimeout(WAIT_S)
        while stranger.recv(4096):  # its greeting, and then it is disconnected
            pass
        stranger.close()


def test_connections_have_a_bound(monkeypatch):
    with ends() as (trainer, worker, _):
        monkeypatch.setattr(store, "_MOST_CONNECTIONS", 2)
        with pytest.raises(DeadlineError, match=r"closed the connection|reset|did not answer"):
            worker_at(trainer.port, SHORT_S)
        assert worker.find("absent") is None


# messages

REQUESTS = [
    {"do": "set", "key": "a", "value": [1]},
    {"do": "drop", "key": "a"},
    {"do": "find", "key": "a", "number": 1, "wait": True},
    {"do": "leave", "key": "a", "number": 1},
    {"do": "will", "key": "a", "value": [1]},
]


def proved(port, secret):
    """A channel to the trainer, that has proved to know the secret."""
    within = Deadline(WAIT_S)
    channel = Channel(store.dial("127.0.0.1", port, within), "the trainer")
    proof = f"worker{channel.read(within)['nonce']}0".encode()
    channel.send({"nonce": "0", "proof": hmac.digest(secret.encode(), proof, "sha256").hex()}, within)
    assert "proof" in channel.read(within)
    return channel


def say(port, data, secret=None):
    """Send bytes to the trainer, first having proved to know the secret, if one is given; read what it answers."""
    within = Deadline(WAIT_S)
    with suppress(TransportError, OSError):
        channel = proved(port, secret) if secret else Channel(store.dial("127.0.0.1", port, within), "the trainer")
        os.write(channel._connection.fileno(), data)
        with channel._socket() as raw:
            raw.shutdown(socket.SHUT_WR)
        while channel.read(within) is not None:
            continue


def framed(data):
    return len(data).to_bytes(4, "big") + data


def test_who_only_guesses_the_secret_writes_nothing(kept):
    with pytest.raises(TransportError, match="give every rank the same secret"):
        RemoteStore("127.0.0.1", kept.port, "a guess", Deadline(WAIT_S))
    data = framed(msgspec.json.encode({**REQUESTS[0], "key": "guessed"}))
    for secret in ("a guess", "s"):
        say(kept.port, data, secret)
        assert (kept.find("guessed", Deadline(SHORT_S if secret == "s" else 0)) is not None) == (secret == "s")


@given(st.randoms(use_true_random=False), st.booleans())
def test_malformed_requests_do_not_stop_the_store(kept, draw, known):
    data = worse_text(draw.choice(REQUESTS), draw) if known else draw.randbytes(draw.choice([48, 200]))
    if draw.random() < 0.2:
        data = draw.choice([b"", b"{", b"\xff\xfe", b"[" * 100_000, b"NaNN"])
    say(kept.port, framed(data) if known else data, "s" if known else None)
    worker = worker_at(kept.port)
    worker.set("b", [2])
    assert worker.find("b") == [2] and kept.find("b") == [2]
    worker.close()


def test_values_have_a_bound_each_and_together(monkeypatch):
    with ends() as made:
        for one in made:
            with pytest.raises(TransportError, match=f"at most {VALUE_BYTES}"):
                one.set("large", "x" * VALUE_BYTES)
        monkeypatch.setattr(store, "_STORE_BYTES", 1000)
        with pytest.raises(TransportError, match="bytes that are left for values"):
            made[0].set("large", "x" * 999)
        made[1].set("large", "x" * 999)
        with pytest.raises(NotConnectedError, match="bytes that are left for values"):
            made[2].find("absent", Deadline(WAIT_S))


def test_a_worker_that_reads_nothing_is_disconnected(monkeypatch):
    monkeypatch.setattr(store, "_PATIENCE_S", 0.3)
    with ends() as (trainer, worker, other):
        trainer.set("large", "x" * (32 << 20))
        channel = proved(trainer.port, "s")
        channel.send({"do": "will", "key": "gone", "value": True}, Deadline(WAIT_S))
        channel.send({"do": "find", "key": "large", "number": 1}, Deadline(WAIT_S))
        assert other.find("gone", Deadline(WAIT_S)) is True and worker.find("absent") is None


def test_a_channel_that_stops_in_a_message_ends():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stranger = socket.create_connection(listener.getsockname())
        channel = Channel(listener.accept()[0], "the worker")
        stranger.sendall((1000).to_bytes(4, "big") + b"{")
        with pytest.raises(TransportError, match="the worker stopped in the middle of a message"):
            channel.read(Deadline(0.2))
        assert not channel.alive
        stranger.close()
