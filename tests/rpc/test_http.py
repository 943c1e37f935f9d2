"""The HTTP sessions against real servers on real sockets."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_ext.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    EngineRefusedError,
    EngineUnreachableError,
    RouteAbsent,
)
from torchrl_ext.rollout.requests import Requests, targets
from torchrl_ext.rpc.connections import authorities
from torchrl_ext.rpc.http import Answer, AsyncSession, HTTPSession, normalise_url
from torchrl_ext.rpc.router import refuse_router

LIMIT_S = 10.0  # far above every deadline here: what it bounds is one that does not hold
KEYS = ("user", "admin")


class Routes(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_call(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        path, _, query = self.path.partition("?")
        fixed = {
            "/redirect": (307, b""),
            "/text": (200, b"<html>hello</html>"),
            "/empty": (200, b""),
            "/large": (200, b'"' + b"x" * 100_000 + b'"'),
        }
        if path == "/drip":
            self.send_response(200)
            self.send_header("connection", "close")
            self.end_headers()
            self.drip()
        elif path == "/locked" and self.headers.get("authorization") != f"Bearer {KEYS[1]}":
            self.send(401, b"")
        elif path in fixed:
            self.send(*fixed[path])
        else:
            names = ("authorization", "host")
            echo = {"method": self.command, "path": path, "query": query, "body": json.loads(body) if body else None}
            self.send(200, json.dumps(echo | {name: self.headers.get(name) for name in names}).encode())

    do_GET = do_POST = handle_call

    def drip(self):
        self.server.dripping.set()
        with contextlib.suppress(OSError):
            while not self.server.stopped.wait(0.05):
                self.wfile.write(b" ")
                self.wfile.flush()
        self.close_connection = True

    def send(self, status, body):
        self.send_response(status)
        self.send_header("location", "/echo")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


class DripHeaders(socketserver.BaseRequestHandler):
    """Answers one byte of a header at a time, for ever."""

    def handle(self):
        with contextlib.suppress(OSError):
            self.request.sendall(b"HTTP/1.1 200 OK\r\nx-slow: ")
            while not self.server.stopped.wait(0.05):
                self.request.sendall(b"x")


class HangUp(socketserver.BaseRequestHandler):
    """Takes the request and closes the connection."""

    def handle(self):
        self.request.recv(1 << 16)


class Noise(socketserver.BaseRequestHandler):
    """Speaks another protocol."""

    def handle(self):
        self.request.recv(1 << 16)
        self.request.sendall(b"SSH-2.0-OpenSSH_9.6\r\n" * 4)


class Silence(socketserver.BaseRequestHandler):
    """Never answers."""

    def handle(self):
        self.server.stopped.wait(LIMIT_S)


class Listening(ThreadingHTTPServer):
    request_queue_size = 128  # a full queue costs whoever comes then seconds


@contextmanager
def serving(handler=Routes, cls=Listening, address="127.0.0.1", tls=None):
    server = cls((address, 0), handler)
    server.daemon_threads = True
    server.stopped, server.dripping = threading.Event(), threading.Event()
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    server.port = server.server_address[1]
    try:
        yield server
    finally:
        server.stopped.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


@pytest.fixture
def session(server):
    return HTTPSession(f"127.0.0.1:{server.port}", timeout_s=10)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("host:8000", "http://host:8000"),
        (" http://host:8000/ ", "http://host:8000"),
        ("https://host/prefix/", "https://host/prefix"),
        ("[::1]:8000", "http://[::1]:8000"),
        *(
            (address, None)
            for address in ("", "ftp://host", "host:port", "host:99999", "http://host/?a=1", "u:p@h:1", "::1:8000")
        ),
    ],
)
def test_addresses_become_base_urls_or_are_refused(address, url):
    with contextlib.nullcontext() if url else pytest.raises(ConfigError):
        assert normalise_url(address) == url == normalise_url(url)


def test_bodies_queries_and_keys_arrive_and_no_proxy_of_the_environment_is_used(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    session = HTTPSession(f"127.0.0.1:{server.port}", api_key=KEYS)
    echo = {"query": "mode=keep", "body": {"a": [1, None]}, "authorization": "Bearer user"}
    echo |= {"method": "POST", "path": "/echo", "host": f"127.0.0.1:{server.port}"}
    assert session.post("/echo", {"a": [1, None]}, query={"mode": "keep"}) == echo
    assert session.get("/locked")["authorization"] == "Bearer admin"  # the next key, where one is refused
    assert session.get("/empty") == {}
    with pytest.raises(ConfigError, match="no header can carry"):
        HTTPSession("host:1", api_key=("good", "bad\n"))


SHAPES = ("{}", '{{"error": {}}}', '{{"detail": {}}}', '{{"message": {}}}', '{{"error": {{"message": {}}}}}')


@given(st.integers(400, 599), st.sampled_from(SHAPES), st.text("abc", min_size=1))
def test_an_error_has_the_engines_own_words_and_says_whether_the_route_is_absent(status, shape, words):
    with pytest.raises(EngineRefusedError) as caught:
        Answer(status=status, text=shape.format(f'"{words}"')).wanted("GET http://host/x")
    assert caught.value.what == f"GET http://host/x answered {status}: {words}" and caught.value.status == status
    assert isinstance(caught.value, RouteAbsent) == (status in (404, 405, 501))


def test_what_is_no_answer_of_an_engine_is_refused(server, session):
    with pytest.raises(EngineRefusedError, match="redirect"):
        session.post("/redirect", {})
    with pytest.raises(EngineRefusedError, match="other than JSON"):
        session.get("/text")
    assert session.call("GET", "/text").text == "<html>hello</html>"
    narrow = HTTPSession(session.url, max_body_bytes=1000)
    with pytest.raises(EngineRefusedError, match="more than 1000 bytes"):
        narrow.get("/large")
    assert narrow.get("/echo")["path"] == "/echo"


@pytest.mark.parametrize(("handler", "route"), [(Routes, "/drip"), (DripHeaders, "/health"), (Silence, "/health")])
def test_a_call_ends_at_its_deadline_whatever_the_server_does(handler, route):
    cls = Listening if handler is Routes else socketserver.ThreadingTCPServer
    with serving(handler, cls) as server:
        for settings, how in (({}, {"timeout_s": 0.3}), ({"until": time.monotonic() + 1.0}, {})):
            began = time.monotonic()
            with pytest.raises(DeadlineError, match=rf"{route}.*(1|0\.\d+) s"):
                HTTPSession(f"127.0.0.1:{server.port}", **settings).get(route, **how)
            assert time.monotonic() - began < LIMIT_S


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


def full(stack, address="127.0.0.1", port=0):
    """A listener whose queue is full: the system drops whoever else wants to connect."""
    listener = stack.enter_context(socket.socket())
    listener.bind((address, port))
    listener.listen(0)
    for _ in range(4):
        waiting = stack.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(listener.getsockname())
    return listener


def test_a_name_with_several_addresses_has_one_deadline_for_all(monkeypatch):
    dead = [f"127.0.0.{last}" for last in range(2, 22)]
    with contextlib.ExitStack() as stack:
        port = full(stack, dead[0]).getsockname()[1]
        for address in dead[1:]:
            full(stack, address, port)
        addresses(monkeypatch, port, *dead)
        began = time.monotonic()
        with pytest.raises((DeadlineError, EngineUnreachableError), match=r"engine\.example.*(1|0\.\d+) s"):
            HTTPSession(f"engine.example:{port}").get("/health", timeout_s=1)
        assert time.monotonic() - began < LIMIT_S


def test_the_first_address_that_takes_a_connection_answers_under_the_name_that_was_given(server, monkeypatch):
    addresses(monkeypatch, server.port, "127.0.0.2", "127.0.0.1")
    session = HTTPSession(f"engine.example:{server.port}", timeout_s=10)
    assert session.get("/echo")["host"] == f"engine.example:{server.port}"


def test_nobody_there_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(EngineUnreachableError, match=f"127.0.0.1:{port}/health"):
        HTTPSession(f"127.0.0.1:{port}").get("/health")


@pytest.mark.parametrize("handler", [HangUp, Noise])
def test_a_connection_that_breaks_or_speaks_no_http_is_unreachable(handler):
    with (
        serving(handler, socketserver.ThreadingTCPServer) as server,
        pytest.raises(EngineUnreachableError, match=f"{server.port}/health: the connection broke"),
    ):
        HTTPSession(f"127.0.0.1:{server.port}").get("/health")


def test_ipv6_addresses_work():
    class Server6(ThreadingHTTPServer):
        address_family = socket.AF_INET6

    try:
        with serving(cls=Server6, address="::1") as server:
            assert HTTPSession(f"[::1]:{server.port}").get("/echo")["path"] == "/echo"
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")


@pytest.fixture
def eager_threads():
    """Threads take turns a thousand times as often, so that races between them show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def test_one_session_serves_many_threads(server, eager_threads):
    session, calls = HTTPSession(f"127.0.0.1:{server.port}", timeout_s=60, check=refuse_router), range(500)
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


def test_a_coroutine_may_make_a_call_and_keeps_its_loop(session):
    async def call():
        loop = asyncio.get_running_loop()
        assert session.get("/echo")["path"] == "/echo"
        return asyncio.get_running_loop() is loop

    assert asyncio.run(call())


@pytest.fixture
def interruptible():
    """A process in the background of a shell ignores ctrl-c, and hands that on."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_a_call_and_its_connection(recwarn, interruptible):
    with serving() as server:
        session = HTTPSession(f"127.0.0.1:{server.port}", timeout_s=LIMIT_S)

        def interrupt():
            server.dripping.wait(LIMIT_S)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            session.get("/drip")
        assert time.monotonic() - began < LIMIT_S
        thread.join()
        assert session.get("/echo")["path"] == "/echo"
    gc.collect()
    assert not [warning for warning in recwarn if issubclass(warning.category, ResourceWarning)]


async def ask(url, seconds=LIMIT_S, **settings):
    session = AsyncSession(**settings)
    try:
        return await session.json("POST", f"{url}/x", {}, until=time.monotonic() + seconds)
    finally:
        await session.close()


def test_a_connection_that_is_not_accepted_is_no_missed_deadline_and_a_deadline_before_that_is_one():
    with contextlib.ExitStack() as stack:
        url = f"http://127.0.0.1:{full(stack).getsockname()[1]}"
        with pytest.raises(EngineUnreachableError, match=r"no connection within 0\.3 s"):
            asyncio.run(ask(url, 60.0, connect_timeout_s=0.3))
        with pytest.raises(DeadlineError, match=r"no complete answer within 0\.\d+ s"):
            asyncio.run(ask(url, 0.3))


def test_a_session_that_nobody_closes_leaves_without_a_word_and_a_closed_one_says_so(server, caplog):
    async def called():
        session = AsyncSession()
        return await session.json("GET", f"http://127.0.0.1:{server.port}/x", until=time.monotonic() + 10)

    assert asyncio.run(called())["path"] == "/x"
    gc.collect()
    assert not caplog.records

    async def closed():
        session = AsyncSession()
        call = {"method": "GET", "url": f"http://127.0.0.1:{server.port}/x", "until": time.monotonic() + 10}
        await session.json(**call)
        await session.close()
        with pytest.raises(EngineError, match="the client was closed"):
            await session.json(**call)

    asyncio.run(closed())


def test_a_request_by_way_of_a_router_is_tried_again_until_it_is_accepted():
    async def accept(listener):
        async def answer(reader, writer):
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 8\r\n\r\n" + b'{"a": 1}'
                )
                await writer.drain()
                writer.close()

        async with await asyncio.start_server(answer, sock=listener.dup()) as server:
            await server.serve_forever()

    async def through_a_router(listener):
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        requests = Requests(targets([url], ["vllm"]), limit=0, api_key=None, persistent=True)
        requests.session = AsyncSession(connect_timeout_s=0.3)
        asked = asyncio.ensure_future(requests.post("/x", {}, None, time.monotonic() + 60.0))
        await asyncio.sleep(1.0)
        assert not asked.done()
        serving = asyncio.ensure_future(accept(listener))
        try:
            return await asked
        finally:
            serving.cancel()
            await requests.close()

    with contextlib.ExitStack() as stack:
        assert asyncio.run(through_a_router(full(stack))) == {"a": 1}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A key and a self-signed certificate for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    names = {"keyout": folder / "key.pem", "out": folder / "cert.pem"}
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", names["keyout"], "-out", names["out"]]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine has no openssl to make a certificate with")
    return names["out"], names["keyout"]


def test_tls_trusts_the_authorities_that_the_environment_names_and_no_others(certificate, monkeypatch):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    with serving(tls=tls) as server:
        url = f"https://127.0.0.1:{server.port}"
        calls = (lambda: HTTPSession(url).post("/x"), lambda: asyncio.run(ask(url)))
        for known in (False, True, False):
            monkeypatch.delenv("SSL_CERT_FILE", raising=False)
            if known:
                monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
                assert len(authorities().get_ca_certs()) == 1
            for call in calls:
                with (
                    contextlib.nullcontext()
                    if known
                    else pytest.raises(EngineUnreachableError, match=r"CERTIFICATE_VERIFY_FAILED.*SSL_CERT_FILE")
                ):
                    assert call()["path"] == "/x"
        monkeypatch.setenv("SSL_CERT_FILE", "/nowhere.pem")
        with pytest.raises(ConfigError, match=r"SSL_CERT_FILE=/nowhere\.pem .*cannot be read"):
            HTTPSession(url).get("/x")


def test_https_at_a_plain_server_says_what_to_try(server):
    with pytest.raises(EngineUnreachableError, match="http://"):
        HTTPSession(f"https://127.0.0.1:{server.port}").get("/x")
