"""What the client of routers says to each generation of them, and how it reads their answers."""

from __future__ import annotations

import threading
from urllib.parse import unquote

import pytest

from tests.rpc import sockets
from torchrl_ext.errors import ConfigError, DeadlineError, EngineRefusedError, EngineUnreachableError
from torchrl_ext.rpc.http import HTTPSession
from torchrl_ext.rpc.router import RouterClient, RouterWorker, listed_workers, refuse_router
from torchrl_ext.serving.processes import free_port


class Earlier:
    """sglang-router's first routes, which vllm-router still has: addresses in queries, answers in words."""

    def __init__(self):
        self.urls = []

    def answer(self, method, path, query, body):
        if (method, path) == ("GET", "/list_workers"):
            return 200, {"urls": self.urls}
        if (method, path) == ("POST", "/add_worker"):
            self.urls.append(query["url"][0])
            return 200, "Successfully added worker"
        if (method, path) == ("POST", "/remove_worker"):
            self.urls.remove(query["url"][0])
            return 200, "Successfully removed worker"
        return 404, {"error": "not found"}


class Gateway:
    """sgl-model-gateway: workers have keys, and are listed some time after they were accepted."""

    def __init__(self, delay=2):
        self.workers, self.pending, self.delay = {}, [], delay

    def answer(self, method, path, query, body):
        if path == "/workers" and method == "POST":
            self.pending.append([self.delay, body])
            return 202, {"status": "accepted", "worker_id": "w1"}
        if path == "/workers":
            for row in list(self.pending):
                row[0] -= 1
                if row[0] < 0:
                    self.pending.remove(row)
                    self.workers["w1"] = {"id": "w1", "is_healthy": True, "worker_type": "regular", **row[1]}
            return 200, {"workers": list(self.workers.values()), "total": len(self.workers)}
        if method == "DELETE" and unquote(path) == "/workers/w1":
            del self.workers["w1"]
            return 202, {"status": "accepted"}
        return 404, {"error": "not found"}


class Refusing(Gateway):
    """Lists nobody and says no."""

    def __init__(self, words):
        super().__init__()
        self.words = words

    def answer(self, method, path, query, body):
        return (200, {"workers": []}) if method == "GET" else (400, {"error": self.words})


class Engine:
    """Well, or not."""

    def __init__(self, health=200):
        self.health = health

    def answer(self, method, path, query, body):
        return (self.health, "") if path == "/health" else (404, {"detail": "Not Found"})


def serving(script):
    """A server that answers as ``script`` does; ``calls`` has method, path and body of each call."""
    return sockets.serving(lambda asked: script.answer(asked.method, asked.path, asked.query, asked.body))


@pytest.mark.parametrize("script", [Earlier, Gateway])
def test_workers_come_and_go_with_either_generation_of_routes(script):
    with serving(script()) as router, serving(Engine()) as engine:
        client = RouterClient(router.url)
        assert client.workers() == ()
        client.add(engine.url)
        assert [worker.url for worker in client.workers()] == [engine.url]
        client.add(engine.url)  # once more changes nothing
        client.remove(engine.url)
        client.remove(engine.url)
        assert client.workers() == ()
        changes = [call for call in router.calls if call[0] != "GET" and call[1] != "/workers"]
        assert len(changes) <= 3  # adding once, removing once, and one route that the earlier one has not


def test_a_worker_is_described_with_its_type_and_its_port():
    with serving(Gateway()) as router, serving(Engine()) as engine:
        client = RouterClient(router.url)
        client.add(engine.url, "prefill", bootstrap_port=8998)
        body = {"url": engine.url, "worker_type": "prefill", "bootstrap_port": 8998}
        assert ("POST", "/workers", body) in router.calls
        assert client.workers() == (RouterWorker(url=engine.url, worker_type="prefill", key="w1"),)


def test_a_worker_that_is_never_listed_is_a_deadline_that_names_both():
    with (
        serving(Gateway(delay=10**9)) as router,
        serving(Engine()) as engine,
        pytest.raises(DeadlineError, match=f"{router.url} did not list {engine.url}"),
    ):
        RouterClient(router.url, timeout_s=2.0).add(engine.url)  # the look at whether the engine is one is within it


def test_what_a_router_refuses_comes_back_in_its_words():
    with serving(Engine()) as engine:
        with serving(Refusing("no room")) as router, pytest.raises(EngineRefusedError, match="400: no room"):
            RouterClient(router.url).add(engine.url)
        words = "PD router requires specific add_prefill_server or add_decode_server"
        with serving(Refusing(words)) as router, pytest.raises(ConfigError, match="gets its workers when it starts"):
            RouterClient(router.url).add(engine.url)


def test_an_engine_that_is_not_well_is_not_offered_to_a_router():
    with serving(Gateway()) as router:
        with serving(Engine(health=503)) as engine, pytest.raises(EngineRefusedError, match="answered 503"):
            RouterClient(router.url).add(engine.url)
        with pytest.raises(EngineUnreachableError):
            RouterClient(router.url).add(f"127.0.0.1:{free_port()}")
        with serving(Gateway()) as other, pytest.raises(ConfigError, match="is a router"):
            RouterClient(router.url).add(other.url)
        assert not [call for call in router.calls if call[0] == "POST"]


def test_types_that_no_router_has_are_refused_before_anything_is_asked():
    with serving(Gateway()) as router:
        with pytest.raises(ConfigError, match=r"type 'encoder'.*regular or prefill or decode"):
            RouterClient(router.url).add("host:1", "encoder")
        assert router.calls == []


@pytest.mark.parametrize("script", [Earlier, Gateway])
def test_a_session_for_control_calls_refuses_a_router_and_asks_an_engine_only_once(script):
    with serving(script()) as router:
        session = HTTPSession(router.url, check=refuse_router)
        for call in (session.get, session.post, lambda route: session.call("POST", route)):
            with pytest.raises(ConfigError, match=r"is a router.*one engine of many"):
                call("/pause")
        assert "/pause" not in [path for _, path, _ in router.calls]
    with serving(Engine()) as engine:
        session = HTTPSession(engine.url, check=refuse_router)
        for _ in range(3):
            session.get("/health")
        assert [path for _, path, _ in engine.calls] == ["/list_workers", *["/health"] * 3]


def test_the_look_at_whether_it_is_a_router_is_within_the_deadline_of_the_call():
    leave = threading.Event()

    class Slow(Engine):
        def answer(self, *call):
            leave.wait(20)
            return super().answer(*call)

    with serving(Slow()) as engine:
        session = HTTPSession(engine.url, timeout_s=20, check=refuse_router)
        with pytest.raises(DeadlineError, match=r"0\.\d+ s"):
            session.get("/health", timeout_s=0.3)
        leave.set()
        session.get("/health")


@pytest.mark.parametrize(
    "answer", ["<html>", [], {"workers": 3}, {"workers": [{"port": 1}]}, {"urls": [None]}, {"urls": ["ftp://host"]}]
)
def test_answers_that_list_nobody_are_no_routers(answer):
    class Odd:
        def answer(self, method, path, query, body):
            return 200, answer

    with serving(Odd()) as other:
        assert listed_workers(HTTPSession(other.url)) is None
        with pytest.raises(EngineRefusedError, match="lists no workers"):
            RouterClient(other.url).workers()
        assert HTTPSession(other.url, check=refuse_router).call("GET", "/health").ok
