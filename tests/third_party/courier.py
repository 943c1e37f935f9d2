"""`CourierTransport`: workers fetch each version from the trainer over HTTP, as one safetensors file."""

from __future__ import annotations

import json
import secrets
import threading
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import ProxyHandler, build_opener

from safetensors import SafetensorError
from safetensors.torch import load, save

from torchrl_ext.base.errors import IntegrityError, NotConnectedError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.transports.base import Arrival, Handoff
from torchrl_ext.data.transports.standalone import StandaloneEnd, StandaloneTransport
from torchrl_ext.data.weights.source import checked

_OPENER = build_opener(ProxyHandler({}))  # the trainer is asked itself, whatever proxies the environment names


class CourierTransport(StandaloneTransport):
    """Serves versions from the trainer's memory at ``host:port``, below ``token``, which only workers know."""

    name = "courier"

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, token: str | None = None, timeout_s: float = 60):
        super().__init__(timeout_s=timeout_s)
        self._host, self._port, self._token, self._server = host, port, token or secrets.token_hex(16), None
        self._pages: dict[str, bytes] = {}

    def open(self, workers, params, within):  # engines join: `info` reaches `join` in each of their workers
        self._serve()
        return Handoff(info={"url": f"http://{self._host}:{self._server.server_port}/{self._token}"})

    def prepare(self, update, within):  # while engines generate
        self._serve()
        tensors = {meta.name: tensor.cpu().contiguous().clone() for meta, tensor in checked(update.source)}
        newest = {"version": update.version, "params": [meta.to_json() for meta in update.params]}
        self._pages[f"/{self._token}/{update.version}"] = save(tensors)
        self._pages[f"/{self._token}/newest"] = json.dumps(newest).encode()

        def served(oldest):
            oldest = update.version - 1 if oldest is None else oldest
            for page in [page for page in self._pages if page[-1].isdigit() and int(page.split("/")[-1]) < oldest]:
                del self._pages[page]

        return Handoff(served=served)

    @classmethod
    def join(cls, info, here, within):  # in an engine's worker, which is number `here.rank` of all engines
        worker = CourierWorker(info["url"])
        worker.fetch("newest", within)  # a trainer that cannot be reached is found out before any pause
        return worker

    def attend(self, within):  # in a worker without an engine, which nobody invites
        return CourierWorker(f"http://{self._host}:{self._port}/{self._token}")

    def check_connection(self):
        return self._server is not None or super().check_connection()

    def shutdown(self):
        super().shutdown()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _serve(self):
        if self._server is None:
            self._pages[f"/{self._token}/newest"] = b"null"
            self._server = ThreadingHTTPServer((self._host, self._port), type("Of", (Pages,), {"pages": self._pages}))
            threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()


class CourierWorker(StandaloneEnd):
    """Fetches versions from the pages of a trainer."""

    def __init__(self, url: str):
        self._url = url

    def receive(self, arrival, into, within):  # in the pause; may also fill and yield tensors of `into`
        try:
            tensors = load(self.fetch(str(arrival.version), within))
            yield from [(meta.name, tensors[meta.name]) for meta in arrival.params]
        except (SafetensorError, KeyError) as error:
            raise IntegrityError(f"version {arrival.version} is damaged: {error!r}") from error

    def next(self, within, received=None):  # in a worker without an engine
        for _ in within.pauses():
            try:
                newest = json.loads(self.fetch("newest", within))
            except NotConnectedError:
                continue  # the trainer has not begun yet, or is gone: nothing new came
            if newest is not None and (received is None or newest["version"] != received.version):
                return Arrival(version=newest["version"], params=tuple(map(ParamMeta.from_json, newest["params"])))
        return None

    def fetch(self, what, within):
        try:
            with _OPENER.open(f"{self._url}/{what}", timeout=max(1.0, within.left_s)) as answer:
                return answer.read()
        except (OSError, HTTPException) as error:
            words = f"the trainer does not hand out {what!r} within {within.timeout_s:g} s: {error}"
            raise NotConnectedError(words, hint="look whether it runs, and whether this host reaches it") from error

    def close(self):
        """Leave nothing behind: every request is a connection of its own."""


class Pages(BaseHTTPRequestHandler):
    def do_GET(self):
        body = self.pages.get(self.path)
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *_):
        """Requests are not worth a line each."""
