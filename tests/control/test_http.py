"""The HTTP session against real servers on real sockets."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.control.sockets import drip, serving, talking
from torchrl_ext.base.errors import ConfigError, DeadlineError, EngineRefusedError, EngineUnreachableError, RouteAbsent
from torchrl_ext.control.http import Answer, HTTPSession, normalise_url, run

LIMIT_S = 10.0  # far above every deadline here
KEYS = ("user", "admin")
FIXED = {
    "/redirect": (307, b"", {"location": "/echo"}),
    "/text": (200, b"<html>hello</html>"),
    "/empty": (200, b""),
    "/large": (200, b'"' + b"x" * 100_000 + b'"'),
    "/drip": (200, drip),
}


def answer(asked):
    if asked.path == "/locked" and asked.headers["authorization"] != f"Bearer {KEYS[1]}":
        return 401, b""
    names = {name: asked.headers[name] for name in ("authorization", "host")}
    echo = {"method": asked.method, "path": asked.path, "query": asked.query, "body": asked.body}
    return FIXED.get(asked.path, (200, echo | names))


@pytest.fixture(scope="module")
def server():
    with serving(answer) as server:
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


def test_http_session_sends_body_query_and_key_without_proxy(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    session = HTTPSession(f"127.0.0.1:{server.port}", api_key=KEYS)
    echo = {"query": {"mode": ["keep"]}, "body": {"a": [1, None]}, "authorization": "Bearer user"}
    echo |= {"method": "POST", "path": "/echo", "host": f"127.0.0.1:{server.port}"}
    assert session.post("/echo", {"a": [1, None]}, query={"mode": "keep"}) == echo
    assert session.get("/locked")["authorization"] == "Bearer admin"  # the next key, where one is refused
    assert session.get("/empty") == {}
    with pytest.raises(ConfigError, match="HTTP header cannot carry"):
        HTTPSession("host:1", api_key=("good", "bad\n"))


def test_what_terminals_would_obey_in_an_engines_words_is_shown():
    words = "it \x1b[2J\x1b]0;fails\x07 \u202eliaf \u00e4\u4e2d\n  here"
    assert Answer(where="", status=500, text=words).message() == (
        "it \\x1b[2J\\x1b]0;fails\\x07 \\u202eliaf \u00e4\u4e2d here"
    )


SHAPES = ("{}", '{{"error": {}}}', '{{"detail": {}}}', '{{"message": {}}}', '{{"error": {{"message": {}}}}}')


@given(st.integers(400, 599), st.sampled_from(SHAPES), st.text("abc", min_size=1))
def test_refusal_quotes_engine_message_and_flags_absent_route(status, shape, words):
    with pytest.raises(EngineRefusedError) as caught:
        Answer(where="GET http://host/x", status=status, text=shape.format(f'"{words}"')).checked_json()
    assert caught.value.what == f"GET http://host/x answered {status}: {words}" and caught.value.status == status
    assert isinstance(caught.value, RouteAbsent) == (status in (404, 405, 501))


def test_what_is_no_answer_of_an_engine_is_refused(session):
    with pytest.raises(EngineRefusedError, match="redirect"):
        session.post("/redirect", {})
    with pytest.raises(EngineRefusedError, match="other than JSON"):
        session.get("/text")
    assert session.call("GET", "/text").text == "<html>hello</html>"
    narrow = HTTPSession(session.url, max_body_bytes=1000)
    with pytest.raises(EngineRefusedError, match="more than 1000 bytes"):
        narrow.get("/large")
    assert narrow.get("/echo")["path"] == "/echo"


def drip_headers(connection, stopped):
    connection.sendall(b"HTTP/1.1 200 OK\r\nx-slow: ")
    while not stopped.wait(0.05):
        connection.sendall(b"x")


@pytest.mark.parametrize(
    ("slow", "route"),
    [
        (lambda: serving(answer), "/drip"),
        (lambda: talking(drip_headers), "/health"),
        (lambda: talking(lambda _, stopped: stopped.wait(LIMIT_S)), "/health"),
    ],
    ids=["body", "headers", "silence"],
)
def test_a_call_ends_at_its_deadline_whatever_the_server_does(slow, route):
    with slow() as server:
        for settings, how in (({}, {"timeout_s": 0.3}), ({"timeout_s": 1.0}, {})):
            with pytest.raises(DeadlineError, match=rf"{route}.*(1|0\.\d+) s"):
                HTTPSession(f"127.0.0.1:{server.port}", **settings).get(route, **how)


def test_an_unknown_host_is_unreachable(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(EngineUnreachableError, match=r"engine\.example.*Name or service not known"):
        HTTPSession("engine.example:8000").get("/health")


def full(stack):
    """A listener whose queue is full: the system drops whoever else wants to connect."""
    listener = stack.enter_context(socket.socket())
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    for _ in range(4):
        waiting = stack.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(listener.getsockname())
    return listener.getsockname()[1]


def test_connect_timeout_is_unreachable_unless_deadline_is_first(monkeypatch):
    with contextlib.ExitStack() as stack:
        monkeypatch.setattr("torchrl_ext.control.http._CONNECT_S", 0.3)
        session = HTTPSession(f"127.0.0.1:{full(stack)}")
        with pytest.raises(EngineUnreachableError, match=r"no connection within 0\.3 s"):
            session.get("/health")
        with pytest.raises(DeadlineError, match=r"no complete answer within 0\.\d+ s"):
            session.get("/health", timeout_s=0.2)


@pytest.mark.parametrize("words", [b"", b"SSH-2.0-OpenSSH_9.6\r\n" * 4])
def test_broken_connection_or_non_http_reply_is_unreachable(words, server):
    def talk(connection, _):
        connection.recv(1 << 16)
        connection.sendall(words)

    with (
        talking(talk) as other,
        pytest.raises(EngineUnreachableError, match=f"{other.port}/health: the connection broke"),
    ):
        HTTPSession(f"127.0.0.1:{other.port}").get("/health")
    with pytest.raises(EngineUnreachableError, match="http://"):
        HTTPSession(f"https://127.0.0.1:{server.port}").get("/x")


def test_a_forked_process_makes_calls_of_its_own(server, session):
    assert session.get("/echo")["path"] == "/echo"
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            answers = [session.get("/echo")["path"] for _ in range(2)]
            os._exit(answers != ["/echo"] * 2)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert session.get("/echo")["path"] == "/echo"


def test_a_call_that_would_block_its_own_event_loop_is_refused(session):
    """A coroutine of another loop may wait for a call; on the loop that makes calls it would wait for ever."""

    async def call():
        return session.get("/echo")["path"]

    assert asyncio.run(call()) == "/echo"
    with pytest.raises(ConfigError, match="would block the event loop"):
        run(call())


@pytest.fixture
def interruptible():
    """A process in the background of a shell ignores ctrl-c, and hands that on."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("moment", ["while it waits", "before it waits"])
def test_ctrl_c_ends_a_call_and_its_connection(recwarn, interruptible, monkeypatch, moment):
    if moment == "before it waits":
        begin = asyncio.run_coroutine_threadsafe

        def begin_and_linger(call, loop):
            begin(call, loop)
            threading.Event().wait(LIMIT_S)

        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", begin_and_linger)
    gc.collect()
    recwarn.clear()  # of what tests before have left
    dripping, left = threading.Event(), threading.Event()

    def talk(connection, _):
        dripping.set()
        with contextlib.suppress(OSError):
            drip_headers(connection, left)
        left.set()

    def interrupt():
        dripping.wait(LIMIT_S)
        os.kill(os.getpid(), signal.SIGINT)

    with talking(talk) as server:
        session = HTTPSession(f"127.0.0.1:{server.port}", timeout_s=2 * LIMIT_S)
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            session.get("/drip")
        thread.join()
        assert left.wait(LIMIT_S)
    gc.collect()
    assert not [warning for warning in recwarn if issubclass(warning.category, ResourceWarning)]
