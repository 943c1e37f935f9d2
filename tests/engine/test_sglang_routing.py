"""The inference client with two real SGLang servers: behind SGLang's router, vLLM's, and one that somebody started."""

from __future__ import annotations

from types import SimpleNamespace

import httpx
import pytest

import torchrl_ext as tx
from tests.engine.routed import Routed, two_servers
from tests.engine.served import ServedSGLang
from tests.models import PROMPT, greedy, tiny_model
from torchrl_ext.cli.environments import settings_for_router
from torchrl_ext.errors import ConfigError
from torchrl_ext.serving.router import RouterProcess
from torchrl_ext.serving.routing import Routing

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    with two_servers(ServedSGLang, tmp_path_factory) as found:
        yield found


@pytest.fixture(scope="module")
def now():
    return SimpleNamespace(model=tiny_model(0), version=0)


OTHER_ROUTERS = [pytest.param(whose, marks=pytest.mark.exhaustive) for whose in ("given", "vLLM's")]


@pytest.fixture(scope="module", params=["SGLang's", *OTHER_ROUTERS])
def routing(request, urls):
    if request.param == "given":
        with RouterProcess(kind="sglang", health_route="/ping", **settings_for_router("sglang")) as process:
            with Routing.over(*urls, router=process.url) as made:
                yield made
            assert process.alive()
        return
    make = "vllm" if request.param == "vLLM's" else "sglang"
    with Routing.over(*urls, make=make, **settings_for_router(make)) as made:
        yield made


class TestRouted(Routed):
    model_name = "policy"  # SGLang's router wants a name of completions; the servers take any

    async def busy(self, url):
        async with httpx.AsyncClient() as http:
            told = (await http.get(f"{url}/v1/loads")).json()
        return any(row["num_running_reqs"] for row in told["loads"])

    def paused(self, url):
        return httpx.get(f"{url}/ready").status_code == 503

    def test_least_lengths_reach_the_engine_through_sglangs_router_alone(self, client, request, now):
        """Seeds take the same way; what they do shows only with deterministic kernels, which a CPU lacks."""
        first = greedy(now.model, PROMPT, 1)
        sampling = {"max_tokens": 6, "temperature": 0, "stop_token_ids": first, "min_tokens": 4}
        (tokens,) = client.run(client.generate({"prompt_token_ids": [PROMPT], "sampling_params": sampling}))[
            "response_ids"
        ]
        dropped = "vLLM's" in request.node.name
        assert (len(tokens) == 1) if dropped else (len(tokens) >= 4)


def test_engines_of_both_makes_are_not_put_behind_one_router(urls):
    others = [tx.EngineInfo(url="http://127.0.0.1:1", kind="vllm")]
    with pytest.raises(ConfigError, match="different dialects"):
        Routing([*tx.discover(*urls), *others])
