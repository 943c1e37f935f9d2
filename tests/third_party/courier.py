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

from torchrl_ext.deadline import pauses
from torchrl_ext.errors import IntegrityError, NotConnectedError
from torchrl_ext.transports.standalone import StandaloneTransport
from torchrl_ext.types import Handoff, Info, ParamMeta
from torchrl_ext.weights.source import WeightSource, checked

_OPENER = build_opener(ProxyHandler({}))  # the trainer is asked itself, whatever proxies the environment names


class CourierTransport(StandaloneTransport):
    """Serves every version from the trainer's memory; each worker fetches it when it is told to, or looks by itself.

    Args:
        host, port: of the trainer, as workers reach it; port 0 picks a free one, which engines are told.
        token: what workers show to be let in; by default one that engines alone are told.
        timeout_s: deadline of every wait, in seconds.
    """

    name = "courier"

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, *, token: str | None = None, timeout_s: float = 60.0
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        self._host, self._port, self._token = host, port, token or secrets.token_hex(16)
        self._server: _Server | None = None  # of the trainer's end; what follows is of the worker's
        self._joined, self._aborted = False, threading.Event()

    @classmethod
    def from_info(cls, info: Info) -> CourierTransport:
        return cls(info["host"], info["port"], token=info["token"], timeout_s=info["timeout_s"])

    # trainer end

    def open(self, workers: int, params: tuple[ParamMeta, ...]) -> Handoff:
        address = {"host": self._host, "port": self._serve().server_port, "token": self._token}
        return Handoff(info={"transport": self.name, **address, "timeout_s": self.timeout_s})

    def prepare(self, source: WeightSource, version: int) -> Handoff:
        tensors = {meta.name: tensor.cpu().contiguous().clone() for meta, tensor in checked(source)}
        info = {"transport": self.name, "version": version, "params": [meta.to_json() for meta in source.params()]}
        server = self._serve()
        server.publish(info, save(tensors))
        return Handoff(info=info, acknowledge=lambda oldest: server.forget(version - 1 if oldest is None else oldest))

    def _serve(self) -> _Server:
        if self._server is None:
            self._server = _Server(self._host, self._port, self._token)
        return self._server

    # worker end

    def join(self, info: Info) -> None:
        self._fetch("newest", self.timeout_s)  # a trainer that cannot be reached is found out before any pause
        self._joined = True

    def receive(self, info: Info, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        body = self._fetch(str(info["version"]), self.timeout_s)
        try:
            tensors = load(body)
            pairs = [(name, tensors[name]) for name, *_ in info["params"]]
        except (SafetensorError, KeyError) as error:
            raise IntegrityError(f"version {info['version']} is damaged: {error!r}") from error
        yield from pairs

    def poll(self, timeout_s: float) -> Info | None:
        self._aborted.clear()
        for left_s in pauses(timeout_s, self._aborted):
            try:
                found = self._fetch("newest", max(1.0, left_s))
            except NotConnectedError:
                continue  # the trainer has not begun yet, or is gone: nothing new came
            self._joined, info = True, json.loads(found or "null")
            if info is not None and info["version"] != self.received_version:
                return info
        return None

    def _fetch(self, what: str, timeout_s: float) -> bytes:
        trainer = f"http://{self._host}:{self._port}"
        try:
            with _OPENER.open(f"{trainer}/{self._token}/{what}", timeout=timeout_s) as answer:
                return answer.read()
        except (OSError, HTTPException) as error:
            told = f"the trainer at {trainer} does not hand out {what!r} within {timeout_s:g} s: {error}"
            raise NotConnectedError(told, hint="look whether it runs, and whether this host reaches it") from error

    # both ends

    def abort(self) -> None:
        self._aborted.set()

    def check_connection(self) -> bool:
        return self._joined or self._server is not None

    def shutdown(self) -> None:
        self.abort()
        self._joined = False
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Server(ThreadingHTTPServer):
    """Hands out the bytes of versions to whoever knows the token."""

    def __init__(self, host: str, port: int, token: str) -> None:
        super().__init__((host, port), _Handler)
        self.token, self.pages = token.encode(), {"newest": b""}
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()  # looks for its end so often

    def publish(self, info: Info, body: bytes) -> None:
        self.pages[str(info["version"])] = body
        self.pages["newest"] = json.dumps(info).encode()

    def forget(self, oldest: int) -> None:
        self.pages = {name: body for name, body in self.pages.items() if name == "newest" or int(name) >= oldest}


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        token, _, what = self.path[1:].partition("/")
        body = self.server.pages.get(what)
        if body is None or not secrets.compare_digest(token.encode(), self.server.token):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Requests are not worth a line each."""
