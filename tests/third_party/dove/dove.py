"""Doves, a make of engine: `Dovecote` hosts a module behind routes of its own, and `MAKE` lets trainers drive it.

===============  ====================================================================
``GET /dove``    ``{"flies", "whole", "version", "transports"}``
``POST /perch``  it generates nothing from now on
``POST /fly``    it generates again
``POST /note``   a message of torchrl_ext as JSON; answered by ``{"answer": {...}}``
``POST /coo``    ``{"rows": [[...]]}``: what the module makes of them
===============  ====================================================================
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import nn

from torchrl_ext.base.errors import EngineRefusedError, WeightSyncError
from torchrl_ext.base.messages import Inspect, Load, Message, Start, State, read
from torchrl_ext.base.registry import Make
from torchrl_ext.base.types import EngineInfo, Info
from torchrl_ext.control.engine import Engine
from torchrl_ext.control.http import HTTPSession
from torchrl_ext.control.port import EngineState, Port
from torchrl_ext.sync.inspection import followed, inspect
from torchrl_ext.sync.receiver import WeightReceiver

# the server


class Dovecote(ThreadingHTTPServer):
    """Serves a module on 127.0.0.1, in a thread, until it is closed."""

    daemon_threads = True

    def __init__(self, module: nn.Module, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.module, self.receiver, self.flies = module, WeightReceiver(module), True
        self.url, self.alone = f"http://127.0.0.1:{self.server_port}", threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, route: str, body: Any) -> Info:
        """Do what a request asks for, one after the other.

        Raises:
            KeyError: there is no such route.
            WeightSyncError: it cannot be done now.
        """
        routes = {
            "/dove": self._describe,
            "/perch": self._perch,
            "/fly": self._fly,
            "/note": self._note,
            "/coo": self._coo,
        }
        return routes[route](body)

    def _describe(self, body: Any) -> Info:
        of = self.receiver
        return {"flies": self.flies, "whole": of.whole, "version": of.version, "transports": followed()}

    def _perch(self, body: Any) -> Info:
        self.flies = False
        return {}

    def _fly(self, body: Any) -> Info:
        if not self.receiver.whole:
            raise EngineRefusedError("the dove holds a part of a version", state="perched")
        self.flies = True
        return {}

    def _note(self, body: Any) -> Info:
        message = read(body)
        if isinstance(message, (Start, Load)) and self.flies:
            raise EngineRefusedError("a dove that flies takes no weights", state="unchanged")
        return {"answer": inspect(message) if isinstance(message, Inspect) else self.receiver.handle(message)}

    @torch.no_grad()
    def _coo(self, body: Any) -> Info:
        if not self.flies:
            raise EngineRefusedError("the dove perches", state="paused")
        return {"rows": self.module(torch.tensor(body["rows"])).tolist()}


class _Handler(BaseHTTPRequestHandler):
    server: Dovecote

    def do_GET(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length", 0)))
        try:
            with self.server.alone:
                status, answer = 200, self.server.answer(self.path, json.loads(data) if data else None)
        except KeyError:
            status, answer = 404, {"error": "there is no such route"}
        except WeightSyncError as error:
            status, answer = 409, {"error": str(error)}
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Requests are not worth a line each."""


# the make


class DovePort(Port):
    """A dovecote at an address."""

    kind = "dove"

    def __init__(self, http: HTTPSession, timeout_s: float) -> None:
        self.url, self._http, self.timeout_s = http.url, http, timeout_s

    def describe(self) -> EngineInfo:
        told = self._http.get("/dove")
        known = {"weight_version": str(told["version"]), "transports": tuple(told["transports"])}
        return EngineInfo(url=self.url, kind=self.kind, **known)

    def paused(self) -> bool:
        return not self._http.get("/dove")["flies"]

    def state(self) -> EngineState:
        return EngineState.of(self.call(State()))

    def call(self, message: Message) -> list[Info]:
        answer = self._http.post("/note", message.to_json(), timeout_s=self.timeout_s)["answer"]
        return [answer] if answer or isinstance(message, State) else []

    def pause(self) -> None:
        self._http.post("/perch")

    def resume(self) -> None:
        self._http.post("/fly")


def dove_engine(url: str, *, timeout_s: float = 10.0, api_key: Any = None, load_timeout_s: float = 60.0) -> Engine:
    """Return the client of a dovecote."""
    return Engine.of(DovePort(HTTPSession(url, timeout_s=timeout_s, api_key=api_key), load_timeout_s))


def describe(http: HTTPSession) -> EngineInfo | None:
    """Return what answers at an address as a dovecote does; None where nothing does."""
    answer = http.call("GET", "/dove")
    return DovePort(http, http.timeout_s).describe() if answer.ok else None


MAKE = Make(client=dove_engine, describe=describe)
