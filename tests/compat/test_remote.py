"""The client of a router, without one: what it asks again, and how it ends."""

import asyncio
import gc
import threading
import weakref

import pytest

from tests.processes import WAIT_S
from tests.rpc.servers import running
from torchrl_ext.compat.skyrl import RemoteInferenceClient
from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, EngineRefusedError
from torchrl_ext.rpc.connections import PerLoop

GOOD = (200, {"tokens": [1]})


@pytest.fixture
def server():
    with running({}, post_tokenize=GOOD) as found:
        yield found


@pytest.fixture
def client(server):
    made = RemoteInferenceClient(proxy_url=server.url, server_urls=[server.url], timeout_s=20)
    yield made
    made.close()


def test_what_was_made_for_a_loop_is_let_go_when_the_loop_is_closed():
    class Made:
        def __init__(self):
            self.loop = asyncio.get_running_loop()

    async def here():
        return weakref.ref(made.here())

    made = PerLoop(Made)
    first, second = asyncio.run(here()), asyncio.run(here())
    gc.collect()
    assert first() is None and second() is not None


def test_what_may_pass_is_asked_again_and_what_may_not_is_not(server, client):
    for status in (429, 500, 502, 503, 504):
        server.answers["POST /tokenize"] = [(status, {"detail": "later"}), GOOD]
        assert client.run(client.tokenize(["a"])) == [[1]]
    for status in (400, 404, 422, 501, 505):
        server.answers["POST /tokenize"] = [(status, {"detail": "never"}), GOOD]
        with pytest.raises(EngineRefusedError, match=f"{status}: never"):
            client.run(client.tokenize(["a"]))


@pytest.mark.parametrize(("silence_s", "warnings"), [(60, 1), (0, 3)])
def test_requests_that_are_sent_again_are_heard_of(server, client, caplog, monkeypatch, silence_s, warnings):
    monkeypatch.setattr("torchrl_ext.rollout.requests._SILENCE_S", silence_s)
    server.answers["POST /tokenize"] = [*[(503, {"detail": "nobody is behind this router"})] * 3, GOOD]
    assert client.run(client.tokenize(["a"])) == [[1]]
    found = [record.getMessage() for record in caplog.records if "get no answer" in record.getMessage()]
    assert len(found) == warnings and server.url in found[0] and "nobody is behind" in found[0]


def test_a_request_that_is_in_work_at_a_teardown_ends_with_an_error_of_ours(server, client):
    arrived, leave = threading.Event(), threading.Event()

    def slow(body):
        arrived.set()
        leave.wait(WAIT_S)
        return GOOD

    async def torn_down():
        asked = asyncio.ensure_future(client.tokenize(["a"]))
        assert await asyncio.to_thread(arrived.wait, WAIT_S)
        await client.teardown()
        with pytest.raises(EngineError, match=f"{server.url}.* the client was closed"):
            await asked

    server.answers["POST /tokenize"] = slow
    asyncio.run(torn_down())
    leave.set()


def test_closing_ends_a_call_of_another_thread(server, client):
    arrived, leave, said = threading.Event(), threading.Event(), []

    def slow(body):
        arrived.set()
        leave.wait(WAIT_S)
        return GOOD

    def ask():
        try:
            client.run(client.tokenize(["a"]))
        except EngineError as error:
            said.append(str(error))

    server.answers["POST /tokenize"] = slow
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    assert arrived.wait(WAIT_S)
    client.close()
    thread.join(5)
    leave.set()
    assert len(said) == 1 and "the client was closed" in said[0]
    server.answers["POST /tokenize"] = GOOD
    assert client.run(client.tokenize(["a"])) == [[1]]


def test_many_threads_that_run_at_once_share_one_loop(server, client):
    before, together, found = set(threading.enumerate()), threading.Barrier(8), []

    def ask():
        together.wait(WAIT_S)
        found.append(client.run(client.tokenize(["a"])))

    for _ in range(4):  # who comes first is luck
        client.close()
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(WAIT_S)
        loops = [one for one in set(threading.enumerate()) - before if one.name == "inference-loop"]
        assert len(loops) == 1
    assert found == [[[1]]] * 32


def test_a_call_of_its_own_loop_is_told_to_wait_by_itself(client):
    async def inside():
        return client.run(client.tokenize(["a"]))

    with pytest.raises(ConfigError, match="would wait for itself"):
        client.run(inside())


def test_a_call_without_an_answer_in_time_is_cancelled(server, client):
    leave = threading.Event()
    server.answers["POST /tokenize"] = lambda body: (leave.wait(WAIT_S), GOOD)[1]
    with pytest.raises(DeadlineError, match="took longer than"):
        client.run(client.tokenize(["a"]), timeout_s=0.2)
    leave.set()


def test_an_answer_that_is_no_completion_is_said_so(server, client):
    server.answers["POST /v1/chat/completions"] = [
        (200, {"choices": [{"message": None, "finish_reason": "abort"}]}),
        (200, {"object": "error"}),
    ]
    for _ in range(2):
        with pytest.raises(EngineRefusedError, match="no completion"):
            client.run(client.chat_completion({"json": {"messages": []}}))
