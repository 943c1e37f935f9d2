"""`CourierTransport`: workers fetch each version from the trainer over HTTP, as one safetensors file."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import ProxyHandler, build_opener

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import IntegrityError, NotConnectedError
from torchrl_ext.base.types import Info, ParamMeta
from torchrl_ext.data.transports.base import Arrival, Handoff, Update, Worker
from torchrl_ext.data.transports.standalone import StandaloneEnd, StandaloneTransport
from torchrl_ext.data.weights.source import checked

_OPENER = build_opener(ProxyHandler({}))  # the trainer is asked itself, whatever proxies the environment names


class CourierTransport(StandaloneTransport):
    """Serves versions from the trainer's memory at ``host:port``, below ``token``, which only workers know."""

    name = "courier"

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, token: str | None = None, timeout_s: float = 60):
        super().__init__(timeout_s=timeout_s)
        self._at, self._token, self._server = (host, port), token or secrets.token_hex(16), None
        self._pages: dict[str, bytes] = {}

    def open(self, workers: int, params: tuple[ParamMeta, ...], within: Deadline) -> Handoff:
        return Handoff(info={"url": self._url(self._serve())})

    def prepare(self, update: Update, within: Deadline) -> Handoff:
        self._serve()
        tensors = {meta.name: tensor.cpu().contiguous().clone() for meta, tensor in checked(update.source)}
        rows = [meta.to_json() for meta in update.params]
        self._pages[f"/{self._token}/{update.version}"] = save(tensors)
        self._pages[f"/{self._token}/newest"] = json.dumps({"version": update.version, "params": rows}).encode()

        def served(oldest: int | None) -> None:
            oldest = update.version - 1 if oldest is None else oldest
            for page in [page for page in self._pages if page[-1].isdigit() and int(page.split("/")[-1]) < oldest]:
                del self._pages[page]

        return Handoff(served=served)

    @classmethod
    def join(cls, info: Info, here: Worker, within: Deadline) -> CourierWorker:
        worker = CourierWorker(info["url"])
        worker.fetch("newest", within)  # a trainer that cannot be reached is found out before any pause
        return worker

    def check_connection(self) -> bool:
        return self._server is not None or super().check_connection()

    def shutdown(self) -> None:
        super().shutdown()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _serve(self) -> int:
        if self._server is None:
            self._pages[f"/{self._token}/newest"] = b""
            self._server = ThreadingHTTPServer(self._at, type("Pages", (_Handler,), {"pages": self._pages}))
            threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self._server.server_port

    def _url(self, port: int) -> str:
        return f"http://{self._at[0]}:{port}/{self._token}"

    def attend(self, within: Deadline) -> CourierWorker:
        return CourierWorker(self._url(self._at[1]))


class CourierWorker(StandaloneEnd):
    """Fetches versions from the pages of a trainer."""

    def __init__(self, url: str) -> None:
        self._url = url

    def receive(self, arrival: Arrival, into: Mapping[str, Tensor], within: Deadline) -> Iterator[tuple[str, Tensor]]:
        try:
            tensors = load(self.fetch(str(arrival.version), within))
            yield from [(meta.name, tensors[meta.name]) for meta in arrival.params]
        except (SafetensorError, KeyError) as error:
            raise IntegrityError(f"version {arrival.version} is damaged: {error!r}") from error

    def next(self, within: Deadline, received: Arrival | None = None) -> Arrival | None:
        for _ in within.pauses():
            try:
                newest = json.loads(self.fetch("newest", within) or "null")
            except NotConnectedError:
                continue  # the trainer has not begun yet, or is gone: nothing new came
            if newest is not None and (received is None or newest["version"] != received.version):
                return Arrival(version=newest["version"], params=tuple(map(ParamMeta.from_json, newest["params"])))
        return None

    def fetch(self, what: str, within: Deadline) -> bytes:
        try:
            with _OPENER.open(f"{self._url}/{what}", timeout=max(1.0, within.left_s)) as answer:
                return answer.read()
        except (OSError, HTTPException) as error:
            words = f"the trainer does not hand out {what!r} within {within.timeout_s:g} s: {error}"
            raise NotConnectedError(words, hint="look whether it runs, and whether this host reaches it") from error

    def close(self) -> None:
        """Leave nothing behind: every request is a connection of its own."""


class _Handler(BaseHTTPRequestHandler):
    pages: Mapping[str, bytes]

    def do_GET(self) -> None:
        body = self.pages.get(self.path)
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *_: object) -> None:
        """Requests are not worth a line each."""
