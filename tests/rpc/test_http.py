"""The HTTP session against real servers on real sockets."""

import contextlib
import json
import os
import socket
import socketserver
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from torchrl_ext.errors import ConfigError, DeadlineError, EngineRefusedError, EngineUnreachableError
from torchrl_ext.rpc.http import HTTPSession, normalise_url

LIMIT_S = 10.0  # far above every deadline here: what it bounds is one that does not hold


class Routes(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer()

    def do_POST(self):
        self.answer()

    def answer(self):
        length = int(self.headers.get("content-length", 0))
        body = self.rfile.read(length)
        path, _, query = self.path.partition("?")
        if path == "/redirect":
            self.send(307, b"", {"location": "/echo"})
        elif path == "/nested":
            self.send(500, json.dumps({"error": {"message": "the worker said no"}}).encode())
        elif path == "/flat":
            self.send(400, json.dumps({"error": "flat reason"}).encode())
        elif path == "/text":
            self.send(200, b"<html>hello</html>")
        elif path == "/empty":
            self.send(200, b"")
        elif path == "/large":
            self.send(200, b'"' + b"x" * 100_000 + b'"')
        elif path == "/drip":
            self.send_response(200)
            self.send_header("connection", "close")
            self.end_headers()
            self.drip()
        else:
            told = {
                "method": self.command,
                "path": path,
                "query": query,
                "body": json.loads(body) if body else None,
                "authorization": self.headers.get("authorization"),
                "host": self.headers.get("host"),
            }
            self.send(200, json.dumps(told).encode())

    def drip(self):
        try:
            while not self.server.stopped.wait(0.05):
                self.wfile.write(b" ")
                self.wfile.flush()
        except OSError:
            pass
        self.close_connection = True

    def send(self, status, body, headers=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


class DripHeaders(socketserver.BaseRequestHandler):
    """Answers one byte of a header at a time, for ever."""

    def handle(self):
        try:
            self.request.sendall(b"HTTP/1.1 200 OK\r\nx-slow: ")
            while not self.server.stopped.wait(0.05):
                self.request.sendall(b"x")
        except OSError:
            pass


class HangUp(socketserver.BaseRequestHandler):
    """Takes the request and closes the connection."""

    def handle(self):
        self.request.recv(1 << 16)


@contextmanager
def serving(server):
    server.daemon_threads = True
    server.stopped = threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.stopped.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def port():
    class Listening(ThreadingHTTPServer):
        request_queue_size = 128  # a full queue costs whoever comes then seconds

    with serving(Listening(("127.0.0.1", 0), Routes)) as port:
        yield port


@pytest.fixture
def session(port):
    return HTTPSession(f"127.0.0.1:{port}", timeout_s=10)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("host:8000", "http://host:8000"),
        (" http://host:8000/ ", "http://host:8000"),
        ("https://host/prefix/", "https://host/prefix"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses_become_base_urls(address, url):
    assert normalise_url(address) == url


@pytest.mark.parametrize("address", ["", "ftp://host", "host:port", "host:99999", "http://host/?a=1", "u:p@host:1"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ConfigError):
        normalise_url(address)


def test_bodies_queries_and_keys_arrive(port):
    session = HTTPSession(f"127.0.0.1:{port}", api_key="secret")
    told = session.post("/echo", {"a": [1, None]}, query={"mode": "keep"})
    assert told == {
        "method": "POST",
        "path": "/echo",
        "query": "mode=keep",
        "body": {"a": [1, None]},
        "authorization": "Bearer secret",
        "host": f"127.0.0.1:{port}",
    }
    assert session.get("/echo")["method"] == "GET"
    assert session.get("/empty") == {}


@pytest.mark.parametrize(("route", "reason"), [("/nested", "the worker said no"), ("/flat", "flat reason")])
def test_the_engines_own_words_are_in_the_error(session, route, reason):
    with pytest.raises(EngineRefusedError, match=reason) as error:
        session.post(route)
    assert session.url in str(error.value) and route in str(error.value)
    assert error.value.status in (400, 500)


def test_a_redirect_is_refused(session):
    with pytest.raises(EngineRefusedError, match="redirect"):
        session.post("/redirect", {})


def test_something_other_than_json_is_refused(session):
    with pytest.raises(EngineRefusedError, match="other than JSON"):
        session.get("/text")
    assert session.call("GET", "/text").text == "<html>hello</html>"


def test_an_answer_above_the_limit_is_refused(port):
    session = HTTPSession(f"127.0.0.1:{port}", max_body_bytes=1000)
    with pytest.raises(EngineRefusedError, match="more than 1000 bytes"):
        session.get("/large")
    assert session.get("/echo")["path"] == "/echo"


def test_a_dripping_body_ends_at_the_deadline(session):
    with pytest.raises(DeadlineError, match=r"/drip.*0\.\d+ s"):
        session.get("/drip", timeout_s=0.3)


def test_dripping_headers_end_at_the_deadline():
    with serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), DripHeaders)) as port:
        session = HTTPSession(f"127.0.0.1:{port}")
        with pytest.raises(DeadlineError, match=r"0\.\d+ s"):
            session.get("/health", timeout_s=0.3)


def test_a_listener_that_never_answers_ends_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        session = HTTPSession(f"127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(DeadlineError, match=r"0\.\d+ s"):
            session.get("/health", timeout_s=0.3)


def test_a_name_that_is_not_looked_up_in_time_ends_at_the_deadline(monkeypatch):
    answered, began = threading.Event(), time.monotonic()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(LIMIT_S))
    with pytest.raises(DeadlineError, match=r"engine\.example:8000/health.*0\.\d+ s"):
        HTTPSession("engine.example:8000").get("/health", timeout_s=0.3)
    assert time.monotonic() - began < LIMIT_S
    answered.set()


def test_a_name_that_nobody_knows_is_unreachable(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(EngineUnreachableError, match=r"engine\.example.*Name or service not known"):
        HTTPSession("engine.example:8000").get("/health")


def addresses(monkeypatch, port, *found):
    rows = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: rows)


def test_a_name_with_several_addresses_has_one_deadline_for_all(monkeypatch):
    dead = [f"127.0.0.{last}" for last in range(2, 22)]
    with contextlib.ExitStack() as stack:
        port = full(stack, dead[0], 0)
        for address in dead[1:]:
            full(stack, address, port)
        addresses(monkeypatch, port, *dead)
        began = time.monotonic()
        with pytest.raises((DeadlineError, EngineUnreachableError), match=r"engine\.example.*(1|0\.\d+) s"):
            HTTPSession(f"engine.example:{port}").get("/health", timeout_s=1)
        assert time.monotonic() - began < LIMIT_S


def full(stack, address, port):
    """A listener whose queue is full: the system drops whoever else wants to connect."""
    listener = stack.enter_context(socket.socket())
    listener.bind((address, port))
    listener.listen(0)
    for _ in range(4):
        waiting = stack.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(listener.getsockname())
    return listener.getsockname()[1]


def test_the_first_address_that_takes_a_connection_answers_under_the_name_that_was_given(port, monkeypatch):
    addresses(monkeypatch, port, "127.0.0.2", "127.0.0.1")
    session = HTTPSession(f"engine.example:{port}", timeout_s=10)
    assert session.get("/echo")["host"] == f"engine.example:{port}"


def test_nobody_there_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(EngineUnreachableError, match=f"127.0.0.1:{port}/health"):
        HTTPSession(f"127.0.0.1:{port}").get("/health")


def test_a_connection_that_breaks_is_unreachable():
    with (
        serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), HangUp)) as port,
        pytest.raises(EngineUnreachableError, match="broke"),
    ):
        HTTPSession(f"127.0.0.1:{port}").get("/health")


def test_ipv6_addresses_work():
    class Server6(ThreadingHTTPServer):
        address_family = socket.AF_INET6

    try:
        server = Server6(("::1", 0), Routes)
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with serving(server) as port:
        assert HTTPSession(f"[::1]:{port}").get("/echo")["path"] == "/echo"


@pytest.fixture
def eager_threads():
    """Threads take turns a thousand times as often, so that races between them show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def test_one_session_serves_many_threads(port, eager_threads):
    session, calls = HTTPSession(f"127.0.0.1:{port}", timeout_s=60), range(1500)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: session.post("/echo", i)["body"], calls))
    assert answers == list(calls)


def test_a_forked_process_makes_calls_of_its_own(session):
    assert session.get("/echo")["path"] == "/echo"
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os._exit(session.get("/echo")["path"] != "/echo")
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert session.get("/echo")["path"] == "/echo"
