"""Engines that want a key, or one for requests and another for control: every way to a client carries it."""

from __future__ import annotations

from contextlib import contextmanager

import httpx
import pytest

import torchrl_ext as tx
from tests.control import sockets
from tests.control.test_router import Gateway, serving
from tests.fakes import FakeEngine
from torchrl_ext.base.errors import ConfigError, EngineRefusedError
from torchrl_ext.control.serving.routing import Routing

OPEN = ("/health", "/ready", "/ping", "/workers")


@contextmanager
def guarded(make, *keys):
    """As SGLang decides: the key for requests opens what reads and generates, the one for control all the rest."""
    with FakeEngine(make) as fake:

        def keyed(asked):
            wanted = keys[0] if asked.method == "GET" or asked.path == "/generate" else keys[-1]
            if asked.path not in OPEN and asked.headers["authorization"] != f"Bearer {wanted}":
                return 401, b""
            answer = httpx.request(asked.method, fake.url + asked.url, content=asked.content)
            return answer.status_code, answer.content

        with sockets.serving(keyed) as server:
            yield server.url, fake


def test_sglang_with_separate_user_and_admin_keys_is_driven():
    with guarded("sglang", "user", "admin") as (url, fake):
        fleet = tx.connect(url, api_key=("user", "admin"))
        (info,) = tx.discover(url, api_key=("user", "admin"))
        assert info.kind == "sglang" and "delta" in info.transports
        fleet.pause()
        fleet.resume()
        fleet.close()
        found = [route for route in fake.counts if "generation" in route]
        assert found == ["POST /pause_generation", "POST /continue_generation"]
        with pytest.raises(EngineRefusedError, match="401"):
            tx.make_engine("sglang", url=url, api_key="user").pause()


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_the_client_of_a_served_model_has_the_key_of_its_routing(kind):
    with guarded(kind, "secret") as (url, _), serving(Gateway(delay=0)) as router:
        model = Routing([tx.EngineInfo(url=url, kind=kind)], name="policy", router=router.url, api_key="secret")
        fleet = model.fleet()
        fleet.pause()
        fleet.close()
        with pytest.raises(EngineRefusedError, match="401"):
            model.fleet(api_key="another")
        assert "secret" not in repr(model)
        assert model.client().urls == (router.url,)
        with pytest.raises(ConfigError, match="no engine is registered"):
            Routing([], router=router.url).client()
        model.close()
