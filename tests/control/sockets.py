"""Real servers on real sockets that say what a test wants."""

import contextlib
import json
import socketserver
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import parse_qs


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or a kept connection waits 40 ms for each answer

    def handle_call(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        path, _, query = self.path.partition("?")
        asked = SimpleNamespace(method=self.command, path=path, query=parse_qs(query), headers=self.headers)
        asked.url, asked.content, asked.body = self.path, body, json.loads(body) if body else None
        self.server.calls.append((asked.method, asked.path, asked.body))
        self.server.keys.append(asked.headers["authorization"])
        try:
            status, answer, headers = (*self.server.answer(asked), {})[:3]
        except ConnectionAbortedError:  # the answer is lost
            self.close_connection = True
            return
        with contextlib.suppress(OSError):  # the client may have left
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if callable(answer):
                self.send_header("connection", "close")
                self.end_headers()
                self.close_connection = True
                for piece in answer(self.server.stopped):
                    self.wfile.write(piece)
                    self.wfile.flush()
                return
            data = answer.encode() if isinstance(answer, str) else answer
            data = data if isinstance(data, bytes) else json.dumps(data).encode()
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    do_GET = do_POST = do_DELETE = do_OPTIONS = handle_call

    def log_message(self, *args):
        pass


class Listening(ThreadingHTTPServer):
    request_queue_size = 128  # a full queue costs whoever comes then seconds


@contextmanager
def _running(server):
    server.daemon_threads, server.stopped = True, threading.Event()
    server.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stopped.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serving(answer):
    """A server whose ``answer`` takes a call and returns status, body (JSON, text, bytes, or a function that
    yields pieces) and perhaps headers. It has ``calls`` (method, path, body) and their ``keys``."""
    server = Listening(("127.0.0.1", 0), Handler)
    server.answer, server.calls, server.keys = answer, [], []
    with _running(server):
        server.url = f"http://127.0.0.1:{server.port}"
        yield server


def talking(talk):
    """A server that speaks no HTTP: ``talk`` takes a connection, and an event that is set in the end."""

    class Talk(socketserver.BaseRequestHandler):
        def handle(self):
            with contextlib.suppress(OSError):
                talk(self.request, self.server.stopped)

    return _running(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Talk))


def drip(stopped):
    while not stopped.wait(0.05):
        yield b" "
