"""Engines that want a key, or one for requests and another for control: every way to a client carries it."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

import pytest

import torchrl_ext as tx
from tests.rpc.servers import GOOD, SGLANG, Handler
from tests.rpc.test_router import Gateway, serving
from torchrl_ext.errors import ConfigError, EngineRefusedError
from torchrl_ext.serving.routing import Routing

OPEN = ("/health", "/ready", "/ping", "/workers", "/list_workers")


class Keyed(Handler):
    """As SGLang decides: the key for requests opens what reads and generates, the one for control all the rest."""

    def handle_call(self):
        route = self.path.partition("?")[0]
        asked = self.command == "GET" or route == "/generate"
        wanted = self.server.keys[0] if asked else self.server.keys[-1]
        if route in OPEN or self.headers.get("authorization") == f"Bearer {wanted}":
            super().handle_call()
            return
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(401)
        self.send_header("content-length", "0")
        self.end_headers()


@contextmanager
def guarded(answers, *keys):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Keyed)
    server.daemon_threads, server.answers, server.keys = True, dict(answers), keys
    server.calls, server.headers = [], []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.calls
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_sglang_with_a_key_for_requests_and_another_for_control_is_driven():
    with guarded(SGLANG, "user", "admin") as (url, calls):
        fleet = tx.connect(url, api_key=("user", "admin"))
        (info,) = tx.discover(url, api_key=("user", "admin"))
        assert info.kind == "sglang" and "delta" in info.transports
        fleet.pause()
        fleet.resume()
        fleet.close()
        assert [call for call, _, _ in calls if "generation" in call] == [
            "POST /pause_generation",
            "POST /continue_generation",
        ]
        with pytest.raises(EngineRefusedError, match="401"):
            tx.make_engine("sglang", url=url, api_key="user").pause()


@pytest.mark.parametrize(("answers", "kind"), [(SGLANG, "sglang"), (GOOD, "vllm")])
def test_the_client_of_a_served_model_has_the_key_of_its_routing(answers, kind):
    with guarded({**answers, "GET /health": (200, {})}, "secret") as (url, _), serving(Gateway(delay=0)) as router:
        model = Routing([tx.EngineInfo(url=url, kind=kind)], name="policy", router=router.url, api_key="secret")
        fleet = model.fleet()
        fleet.pause()
        fleet.close()
        with pytest.raises(EngineRefusedError, match="401"):
            model.fleet(api_key="another")
        assert "secret" not in repr(model)
        assert model.client().urls == (router.url,)
        with pytest.raises(ConfigError, match="no engine behind"):
            Routing([], router=router.url).client()
        model.close()
