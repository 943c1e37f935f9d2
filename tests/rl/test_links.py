"""The connection between a scheme's trainer end and its workers: deadlines, and peers that speak another language."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import (
    DeadlineError,
    EngineUnreachableError,
    NotConnectedError,
    TransportError,
    WeightSyncError,
)
from torchrl_ext.base.messages import Finish, Join, Rehearse
from torchrl_ext.control.engine import Engine
from torchrl_ext.data.group.store import Channel
from torchrl_ext.rl.links import Hub, LinkPort, dial
from torchrl_ext.rl.worker_end import WorkerTransport
from torchrl_ext.sync.receiver import WeightReceiver

WAIT_S = 20.0
LARGE = {"params": "x" * (17 << 20)}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@contextmanager
def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname(), timeout=WAIT_S)
        ours = server.accept()[0]
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def ends():
    with tcp_pair() as pair:
        yield pair


def frame(message):
    data = json.dumps(message).encode()
    return len(data).to_bytes(4, "big") + data


def spoken(whole):
    """What may come in place of the message ``whole``: it with a field changed, added or left out, or no message."""
    changed = st.tuples(st.sampled_from([*whole, "more"]), JSON).map(lambda field: {**whole, field[0]: field[1]})
    fewer = st.sampled_from([*whole]).map(lambda name: {key: value for key, value in whole.items() if key != name})
    return (changed | fewer | JSON).map(frame) | st.binary(max_size=40)


def heard(sent, listen):
    """What ``listen`` makes of these bytes, and of the end of the connection."""
    with tcp_pair() as (ours, theirs):
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        return listen(ours)


def within(call, *arguments):
    """What ``call`` raises or returns; fails where it is still running after `WAIT_S` seconds."""
    told = []

    def run():
        try:
            told.append(call(*arguments))
        except WeightSyncError as error:
            told.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert told, "the call waits without a deadline"
    return told[0]


def answering(link, receiver):
    """A worker that is connected already."""
    worker = WorkerTransport(None, "policy", dict, 0.3)
    worker._link, worker._receiver = link, receiver
    return worker


class TestDeadlines:
    def test_a_worker_that_does_not_read_ends_the_trainers_ask(self, ends):
        engine = Engine.of(LinkPort(Channel(ends[0], "worker 3"), timeout_s=0.3))
        error = within(engine.port.call, Join(transport="disk", params=(), offer=LARGE))
        assert isinstance(error, DeadlineError)
        assert "worker 3 did not read" in error.what and "was closed" in error.state
        assert engine.look()[0].state == "unreachable"
        assert isinstance(within(engine.port.call, Finish(version=1)), EngineUnreachableError)

    def test_a_message_beyond_the_bound_of_its_reader_is_not_read(self, ends):
        sender, reader = Channel(ends[0], "a"), Channel(ends[1], "b", longest_bytes=64)
        sender.send({"text": "x" * 64}, Deadline(WAIT_S))
        with pytest.raises(TransportError, match="a message of more than 64 bytes"):
            reader.read(Deadline(WAIT_S))

    def test_a_worker_that_dials_and_does_not_read_keeps_nobody_out(self):
        hub = Hub("127.0.0.1", "policy", 2, LARGE, hello_s=0.3)
        with socket.create_connection(hub.address[:2]) as silent:
            hello = {"token": hub.address[2], "model_id": "policy", "worker": 0, "pid": 1}
            silent.sendall(frame(hello))
            link, _ = within(dial, hub.address, "policy", 1, WAIT_S)
            assert link.alive
            with pytest.raises(DeadlineError, match=r"1 of 2 workers .* 0\."):
                hub.wait(0.5)
        hub.close()

    def test_worker_survives_trainer_that_does_not_read_answer(self, ends):
        class Talkative(WeightReceiver):
            def rehearse(self, question):
                return LARGE

        worker = answering(Channel(ends[0], "the trainer"), Talkative())
        ends[1].sendall(frame({"number": 1, "message": Rehearse().to_json()}))
        within(worker.serve, lambda: None)
        assert worker.receive_weights() is None
        worker.shutdown()


class TestWhatOthersSay:
    @given(data=st.data())
    def test_a_hub_accepts_no_one_who_says_something_else(self, data):
        hub = Hub("127.0.0.1", "policy", 1, {})
        whole = {"token": hub.address[2], "model_id": "policy", "worker": 0}
        sent = data.draw(spoken({**whole, "pid": 7}))
        heard(sent, lambda ours: hub.meet(ours, ("somebody", 0)))
        hub.close()
        assert not hub.links or {**json.loads(sent[4:]), **whole} == json.loads(sent[4:])

    @given(sent=spoken({"number": 1, "answer": {}}) | spoken({"number": 1, "error": "no"}))
    def test_a_trainer_takes_any_answer(self, sent):
        def ask(ours):
            with suppress(WeightSyncError):
                Engine.of(LinkPort(Channel(ours, "worker 0"), timeout_s=1.0)).port.call(Finish(version=1))

        heard(sent, ask)

    @given(data=st.data())
    def test_a_worker_takes_any_question(self, data):
        join = Join(transport="disk", params=(), offer={}).to_json()
        message = {**join, data.draw(st.sampled_from([*join])): data.draw(JSON)}
        sent = data.draw(spoken({"number": 1, "message": message}))
        heard(sent, lambda ours: answering(Channel(ours, "the trainer"), WeightReceiver({})).serve(lambda: None))

    def test_a_stranger_is_not_listened_to_at_length(self):
        hub = Hub("127.0.0.1", "policy", 1, {})
        with pytest.raises(NotConnectedError, match="another trainer's address"):
            dial((*hub.address[:2], "\u00e9"), "policy", 0, WAIT_S)
        with socket.create_connection(hub.address[:2], timeout=WAIT_S) as stranger:
            stranger.sendall((1 << 20).to_bytes(4, "big"))
            assert stranger.recv(1) == b""  # at once, and not when its time is over
        link, _ = dial(hub.address, "policy", 0, WAIT_S)
        answer = {"params": "x" * 8192}
        hub.wait(WAIT_S)
        link.send(answer, Deadline(WAIT_S))
        assert hub.links[0].read(Deadline(WAIT_S)) == answer
        hub.close()
