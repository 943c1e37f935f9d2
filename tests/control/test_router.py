"""What the client of routers says to them, and how it reads their answers."""

from __future__ import annotations

from functools import partial
from itertools import count
from urllib.parse import unquote

import pytest

from tests.control import sockets
from torchrl_ext.base.errors import ConfigError, DeadlineError, EngineRefusedError
from torchrl_ext.control.http import HTTPSession
from torchrl_ext.control.serving.router import RouterClient, listed_workers, refuse_router


class Gateway:
    """Workers have keys, as SGLang's router gives them, or none, as vLLM's.

    They are listed some looks after they were accepted, as ``rename`` says.
    """

    def __init__(self, delay=0, rename=str, keys=True):
        self.workers, self.pending, self.delay, self.rename, self.numbers = {}, [], delay, rename, count(1)
        self.keys = keys

    def answer(self, method, path, query, body):
        if (method, path) == ("POST", "/workers"):
            worker = {"is_healthy": True, "worker_type": "regular", **body, "url": self.rename(body["url"])}
            worker |= {"id": f"w{next(self.numbers)}"} if self.keys else {}
            self.pending.append([self.delay, worker])
            return 202, {"status": "accepted"}
        if path == "/workers":
            for row in list(self.pending):
                row[0] -= 1
                if row[0] < 0:
                    self.pending.remove(row)
                    self.workers[row[1].get("id", row[1]["url"])] = row[1]
            return 200, {"workers": list(self.workers.values()), "total": len(self.workers)}
        found = method == "DELETE" and self.workers.pop(unquote(path).removeprefix("/workers/"), None)
        return (202, {"status": "accepted"}) if found else (404, {"error": "not found"})


class Engine:
    """It is well, and no router."""

    def answer(self, method, path, query, body):
        return (200, "") if path == "/health" else (404, {"detail": "Not Found"})


def serving(script):
    """A server that answers as ``script`` does; ``calls`` has method, path and body of each call."""
    return sockets.serving(lambda asked: script.answer(asked.method, asked.path, asked.query, asked.body))


@pytest.mark.parametrize("script", [partial(Gateway, keys=False), partial(Gateway, delay=2)])
def test_workers_come_and_go_at_either_make_of_router(script):
    with serving(script()) as router:
        client, url = RouterClient(router.url), "http://engine:8000"
        assert client.workers() == {}
        client.add(url)
        assert [*client.workers()] == [url]
        client.add(url)  # once more changes nothing
        client.remove(url)
        client.remove(url)
        assert client.workers() == {}
        assert [call[0] for call in router.calls if call[0] != "GET"] == ["POST", "DELETE"]


def test_worker_never_listed_by_router_raises_deadline_error():
    with serving(Gateway(delay=10**9)) as router:
        late = pytest.raises(DeadlineError, match=f"{router.url} did not list http://engine:8000")
        with late:
            RouterClient(router.url, timeout_s=0.3).add("http://engine:8000")


def test_what_a_router_refuses_comes_back_in_its_words():
    def refusing(asked):
        return (200, {"workers": []}) if asked.method == "GET" else (400, {"error": "no room"})

    with sockets.serving(refusing) as router, pytest.raises(EngineRefusedError, match="400: no room"):
        RouterClient(router.url).add("http://engine:8000")


def test_control_session_refuses_router_and_checks_engine_once():
    with serving(Gateway()) as router:
        session = HTTPSession(router.url, check=refuse_router)
        for call in (session.get, session.post, lambda route: session.call("POST", route)):
            with pytest.raises(ConfigError, match=r"is a router.*one engine of many"):
                call("/pause")
        assert "/pause" not in [path for _, path, _ in router.calls]
    with serving(Engine()) as engine:
        session = HTTPSession(engine.url, check=refuse_router)
        for _ in range(3):
            session.get("/health")
        assert [path for _, path, _ in engine.calls] == ["/workers", *["/health"] * 3]


@pytest.mark.parametrize(
    "answer",
    ["<html>", [], {"workers": 3}, {"workers": [{"port": 1}]}, {"workers": [None]}, {"workers": [{"url": "ftp://h"}]}],
)
def test_answers_that_list_nobody_are_no_routers(answer):
    with sockets.serving(lambda asked: (200, answer)) as other:
        assert listed_workers(HTTPSession(other.url)) is None
        with pytest.raises(EngineRefusedError, match="lists no workers"):
            RouterClient(other.url).workers()
        assert HTTPSession(other.url, check=refuse_router).call("GET", "/health").ok
