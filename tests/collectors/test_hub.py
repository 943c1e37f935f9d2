"""The connection between a scheme's trainer end and its workers: deadlines, and peers that speak another language."""

from __future__ import annotations

import json
import random
import socket
import threading
from contextlib import suppress

import pytest

from torchrl_ext.collectors.hub import Hub, dial
from torchrl_ext.collectors.worker_end import LinkPort, WorkerTransport
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import DeadlineError, EngineUnreachableError, NotConnectedError, WeightSyncError
from torchrl_ext.messages import Finish, Join, Rehearse
from torchrl_ext.rpc.engine import Engine
from torchrl_ext.sync.receiver import WeightReceiver
from torchrl_ext.transports.links import Link

WAIT_S = 20.0
LARGE = {"params": "x" * (17 << 20)}


@pytest.fixture
def ends():
    with _tcp_pair() as pair:
        yield pair


class _tcp_pair:
    def __enter__(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.theirs = socket.create_connection(server.getsockname(), timeout=WAIT_S)
            self.ours = server.accept()[0]
        return self.ours, self.theirs

    def __exit__(self, *_):
        for end in (self.ours, self.theirs):
            end.close()


def frame(data):
    return len(data).to_bytes(4, "big") + data


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
        engine = Engine(LinkPort(Link(ends[0], "worker 3"), timeout_s=0.3))
        error = within(engine.tell, Join(transport="disk", params=(), offer=LARGE))
        assert isinstance(error, DeadlineError)
        assert "worker 3 did not read" in error.what and "was closed" in error.state
        assert engine.look()[0].state == "unreachable"
        assert isinstance(within(engine.tell, Finish(version=1)), EngineUnreachableError)

    def test_a_message_of_any_size_reaches_one_who_reads(self, ends):
        sender, reader = Link(ends[0], "a"), Link(ends[1], "b")
        thread = threading.Thread(target=sender.send, args=(LARGE, Deadline(WAIT_S)), daemon=True)
        thread.start()
        assert reader.read(Deadline(WAIT_S)) == LARGE
        thread.join(WAIT_S)
        assert not thread.is_alive() and reader.read(Deadline(0.01)) is None

    def test_a_worker_that_dials_and_does_not_read_keeps_nobody_out(self, monkeypatch):
        monkeypatch.setattr("torchrl_ext.collectors.hub._HELLO_S", 0.3)
        hub = Hub("127.0.0.1", "policy", 2, lambda idx: LARGE if idx == 0 else {})
        with socket.create_connection(hub.address[:2]) as silent:
            hello = {"token": hub.address[2], "model_id": "policy", "worker": 0, "pid": 1}
            silent.sendall(frame(json.dumps(hello).encode()))
            link, _ = within(dial, hub.address, "policy", 1, WAIT_S)
            assert link.alive
            with pytest.raises(DeadlineError, match=r"1 of 2 workers .* 0\."):
                hub.wait(0.5)
        hub.close()

    def test_a_trainer_that_does_not_read_ends_a_workers_answer_and_the_worker_lives_on(self, ends):
        class Talkative(WeightReceiver):
            def rehearse(self, question):
                return LARGE

        worker = answering(Link(ends[0], "the trainer"), Talkative())
        ends[1].sendall(frame(json.dumps({"number": 1, "message": Rehearse().to_json()}).encode()))
        within(worker.serve, lambda: None)
        assert worker.receive_weights() is None
        worker.shutdown()


class TestWhatOthersSay:
    def test_whatever_arrives_is_answered_or_ends_in_an_error_of_ours(self):
        draw = random.Random(3)
        hub = Hub("127.0.0.1", "policy", 1, lambda idx: {})
        whole = {"token": hub.address[2], "model_id": "policy", "worker": 0, "pid": 7}
        for _ in range(60):
            hello = {**whole, draw.choice([*whole, "more"]): draw.choice([None, -1, 1e300, [], {}, "x", True])}
            hello["worker"] = draw.choice([hello["worker"], 1 << 80, "0", None])
            if draw.random() < 0.3:
                hello.pop(draw.choice(list(hello)))
            data = json.dumps(draw.choice([hello, [hello], 5, None])).encode()
            if draw.random() < 0.3:
                data = bytes(draw.randrange(256) for _ in range(20))
            with _tcp_pair() as (ours, theirs):
                theirs.sendall(draw.choice([frame(data), frame(data), b"\xff\xff\xff\xff" + data]))
                theirs.shutdown(socket.SHUT_WR)
                hub.meet(ours, ("somebody", 0))
                assert hub.links.pop(0, None) is None or hello | {"worker": 0} == hello
        hub.close()

    @pytest.mark.parametrize("token", ["\u00e9", "\ud800"])
    def test_a_token_of_any_signs_is_another_trainers(self, token):
        hub = Hub("127.0.0.1", "policy", 1, lambda idx: {})
        with pytest.raises(NotConnectedError, match="another trainer's address"):
            dial((*hub.address[:2], token), "policy", 0, WAIT_S)
        hub.close()

    def test_a_stranger_is_not_listened_to_at_length(self):
        hub = Hub("127.0.0.1", "policy", 1, lambda idx: {})
        with socket.create_connection(hub.address[:2], timeout=WAIT_S) as stranger:
            stranger.sendall((1 << 20).to_bytes(4, "big"))
            assert stranger.recv(1) == b""  # at once, and not when its time is over
        link, _ = dial(hub.address, "policy", 0, WAIT_S)
        answer = {"params": "x" * 8192}
        hub.wait(WAIT_S)
        link.send(answer, Deadline(WAIT_S))
        assert hub.links[0].read(Deadline(WAIT_S)) == answer
        hub.close()

    def test_a_trainer_takes_any_answer(self):
        draw = random.Random(4)
        for _ in range(60):
            answer = {"number": 1, draw.choice(["told", "error"]): draw.choice([None, 5, "no", [], {}, {"what": None}])}
            answer = draw.choice([answer, [answer], 7, {"number": "1"}])
            with _tcp_pair() as (ours, theirs):
                engine = Engine(LinkPort(Link(ours, "worker 0"), timeout_s=1.0))
                theirs.sendall(frame(json.dumps(answer).encode()))
                theirs.shutdown(socket.SHUT_WR)
                with suppress(WeightSyncError):
                    engine.tell(Finish(version=1))

    def test_a_worker_takes_any_question(self):
        draw = random.Random(5)
        for _ in range(40):
            message = Join(transport="disk", params=(), offer={}).to_json()
            message[draw.choice([*message])] = draw.choice([None, 5, [], {}, "rehearse", {"params": 3}])
            asked = {"number": 1, "message": draw.choice([message, message, None, 5, [], {}, "join"])}
            asked = draw.choice([asked, asked, {}, [asked], "join"])
            with _tcp_pair() as (ours, theirs):
                worker = answering(Link(ours, "the trainer"), WeightReceiver({}))
                theirs.sendall(frame(json.dumps(asked).encode()))
                theirs.shutdown(socket.SHUT_WR)
                worker.serve(lambda: None)

    def test_a_refusal_without_a_reason_is_an_error_of_ours(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            threading.Thread(target=_answer, args=(server, {}), daemon=True).start()
            with pytest.raises(NotConnectedError, match="it gives no reason"):
                dial((*server.getsockname(), "token"), "policy", 0, WAIT_S)


def _answer(server, message):
    connection = server.accept()[0]
    connection.recv(1 << 16)
    connection.sendall(frame(json.dumps(message).encode()))
