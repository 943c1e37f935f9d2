"""What strangers and waits leave of the server for others, and what the command serves, or why it cannot."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import httpx
import pytest
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from tests.engines.embedded import served_here
from tests.processes import WAIT_S
from torchrl_ext.base.errors import EngineError
from torchrl_ext.base.types import API_KEY_VARIABLE
from torchrl_ext.control.serving.embedded import EmbeddedServer
from torchrl_ext.engines.embedded import server as server_module
from torchrl_ext.engines.embedded.__main__ import main

KEY = "K"
BODILESS = b"POST /pause HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\nContent-Length: 9\r\n"


class Held:
    """An engine whose pauses last until they are let go."""

    model = "/m"

    def __init__(self):
        self.scheduler = SimpleNamespace(alive=True, version="7", paused=False, running=0)
        self.begun, self.let_go = threading.Semaphore(0), threading.Event()

    def pause(self, mode, timeout_s):
        self.begun.release()
        assert self.let_go.wait(WAIT_S)

    def resume(self):
        """Continue with nothing."""

    def close(self):
        self.let_go.set()


@contextmanager
def served(api_key=KEY):
    engine = Held()
    with served_here(engine, api_key=api_key) as server, ExitStack() as stack:
        server.connect = lambda: stack.enter_context(
            socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=WAIT_S)
        )
        stack.callback(engine.let_go.set)
        yield server


def begins(server, data):
    connection = server.connect()
    connection.sendall(data)
    return connection


def label(server):
    answer = httpx.get(f"{server.url}/weight_info", headers={"authorization": f"Bearer {KEY}"}, timeout=WAIT_S)
    return answer.json()["weight_version"]


def test_without_the_key_a_request_is_refused_before_its_body():
    with served() as server:
        assert begins(server, BODILESS + b"\r\n").recv(1 << 16).startswith(b"HTTP/1.1 401")


def test_no_route_but_that_of_probes_is_open():
    app = server_module.make_app(Held(), api_key=KEY)
    rows = [(method, route.path) for route in app.routes for method in route.methods]
    with TestClient(app) as stranger:
        for headers in ({}, {"authorization": "Bearer open"}, {"authorization": f"Basic {KEY}"}):
            answers = {path: stranger.request(method, path, headers=headers) for method, path in rows}
            assert answers.pop("/health").status_code == 200 and len(answers) > 10
            assert {answer.status_code for answer in answers.values()} == {401}
            assert "API key" in answers["/pause"].json()["error"]["message"]


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(server_module, "BODY_TIMEOUT_S", 0.1)
    with served(api_key=None) as server:
        connection = begins(server, BODILESS + b"\r\n{")
        answer = b""
        while b"only 1 bytes of the body" not in answer:  # it may come in parts
            part = connection.recv(1 << 16)
            assert part, answer
            answer += part
        assert answer.startswith(b"HTTP/1.1 504")
        assert not server.engine.begun.acquire(blocking=False)


def test_pauses_that_wait_take_no_thread_of_other_calls():
    client = httpx.Client(headers={"authorization": f"Bearer {KEY}"}, timeout=WAIT_S)
    with served() as server, ThreadPoolExecutor(45) as pool, client:
        waiting = [pool.submit(client.post, f"{server.url}/pause?mode=wait") for _ in range(45)]
        begun = [server.engine.begun.acquire(timeout=WAIT_S / 10) for _ in range(45)]
        version = label(server) if all(begun) else None
        server.engine.let_go.set()
        assert version == "7" and {one.result(WAIT_S).status_code for one in waiting} == {200}


# the command


def test_a_directory_without_a_model_is_named_by_the_error(tmp_path):
    with pytest.raises(EngineError, match=f"{tmp_path} holds no model"):
        EmbeddedServer(tmp_path)


@pytest.fixture
def run(monkeypatch):
    """Runs the command with an engine's options and others; returns its exit status and what it would serve."""
    served = []
    monkeypatch.setattr("uvicorn.run", lambda app, **settings: served.append((app, settings)))
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)

    def run(model, *options):
        served.clear()
        return main(["--model", str(model), "--port", "7", *options]), served

    return run


def routes(engine):
    return [Route("/more", lambda request: Response())]


def test_more_routes_are_served_where_the_command_names_them(run, checkpoint, caplog):
    for options, there in (((), False), (("--routes", "tests.engines.embedded.test_listening:routes"), True)):
        status, ((app, settings),) = run(checkpoint, *options, "--host", "0.0.0.0")
        assert (status, settings["host"], settings["port"]) == (0, "0.0.0.0", 7)
        with TestClient(app) as client:
            assert client.get("/health").status_code == 200
            assert (client.get("/more").status_code == 200) == there
    assert f"set {API_KEY_VARIABLE}" in caplog.text  # strangers reach such an address


@pytest.mark.parametrize("routes", ["nowhere.at.all:routes", "torchrl_ext:nothing", "no module"])
def test_missing_routes_are_named_and_no_server_starts(run, checkpoint, capsys, routes):
    status, served = run(checkpoint, "--routes", routes)
    assert (status, served) == (1, []) and capsys.readouterr().err.strip()
