"""Versions that requests demand, of stock engines with our plugin and behind the routers of both makes."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

import torchrl_ext as tx
from tests.engine.served import sending, until_met
from tests.models import PROMPT, greedy, tiny_model
from tests.processes import WAIT_S
from tests.rpc import sockets
from torchrl_ext.cli.environments import settings_for_router
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import DeadlineError, EngineRefusedError
from torchrl_ext.rollout.client import InferenceClient
from torchrl_ext.rollout.demands import Demand
from torchrl_ext.serving.routing import Routing

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]

MIN, EXACT = "x-torchrl-ext-min-version", "x-torchrl-ext-exact-version"
COMPLETION = {"prompt": PROMPT, "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "weights"}], "max_tokens": 2}
OWN = {
    "vllm": ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}),
    "sglang": ("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}),
}


def versions_of(answers):
    return {version for one in answers for version in one.token_versions()}


def test_an_engine_refuses_what_its_weights_do_not_meet_until_they_do(served, tmp_path):
    models = [tiny_model(seed) for seed in (91, 92)]
    with sending("disk", tmp_path, served) as sender, ExitStack() as ends:
        first = sender.update_weights(models[0]).version
        http = ends.enter_context(httpx.Client(base_url=served.url, timeout=WAIT_S))
        model = http.get("/v1/models").json()["data"][0]["id"]

        def posted(route, body, **headers):
            named = {"model": model} if route.startswith("/v1/") else {}
            return http.post(route, json=body | named, headers=headers)

        routes = [OWN[served.kind], ("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
        for route, body in routes:
            assert posted(route, body, **{EXACT: str(first)}).status_code == 200
            for headers in ({MIN: str(first + 1)}, {EXACT: str(first - 1)}):
                refused = posted(route, body, **headers)
                told = refused.json()
                assert refused.status_code == 409 and told["weight_version"] == str(first)
                row = told["error"] if served.kind == "vllm" else told
                assert (row["type"], row["code"]) == ("ConflictError", 409) and str(first) in row["message"]
            assert posted(route, body, **{MIN: "newest"}).status_code == 400
        client = ends.enter_context(InferenceClient(served.url, kind=served.kind, timeout_s=WAIT_S))
        settings = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        with pytest.raises(DeadlineError, match=f"{served.url} is at weight version {first}"):
            client.generate([PROMPT], min_version=first + 1, timeout_s=1, **settings)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.generate, [PROMPT], min_version=first + 1, **settings)
            second = sender.update_weights(models[1]).version
            (answer,) = waiting.result(WAIT_S)
        assert versions_of([answer]) == {second} == {first + 1}
        assert list(answer.token_ids) == greedy(models[1], PROMPT, 8)
        for route, body in routes:
            assert posted(route, body, **{MIN: str(second)}).status_code == 200
            assert posted(route, body, **{EXACT: str(first)}).json()["weight_version"] == str(second)
        with pytest.raises(EngineRefusedError, match=f"weight version {second}"):
            client.generate([PROMPT], exact_version=first)
        update_in_the_middle(served, sender, client, models)


def update_in_the_middle(served, sender, client, models):
    """An exact demand is refused once an update has reached the generation; any token of it may be the first."""
    settings = {"max_tokens": 240, "temperature": 0.0, "ignore_eos": True}

    def met():
        version = sender.version
        with ThreadPoolExecutor(2) as pool:
            exact = pool.submit(client.generate, [PROMPT], exact_version=version, **settings)
            least = pool.submit(client.generate, [PROMPT], min_version=version, **settings)
            Deadline(WAIT_S).poll(lambda: served.running() == 2 or exact.done())
            sender.update_weights(models[version % 2])
            error, (answer,) = exact.exception(WAIT_S), least.result(WAIT_S)
        if error is None:
            assert versions_of(exact.result()) == {version}
            return False
        assert isinstance(error, EngineRefusedError) and error.status == 409, error
        return versions_of([answer]) == {version, version + 1}

    until_met(met)


@pytest.mark.parametrize("make", ["vllm", "sglang"])
def test_routers_hand_on_demands_and_refusals_and_keep_the_engines_that_refuse(make):
    """The routers are real, the engines are not: each answers, or refuses, with a version of its own."""
    heard = Counter()

    def engine(version):
        def answer(asked):
            if asked.path != "/generate":
                return 200, {}
            demand = Demand.of_headers([(name.encode(), value.encode()) for name, value in asked.headers.items()])
            heard[version, demand is not None] += 1
            if demand is not None and not demand.met_by(version):
                return 409, {"object": "error", "message": "conflict", "code": 409, "weight_version": str(version)}
            told = {"finish_reason": {"type": "length"}, "weight_version": str(version)}
            return 200, {"output_ids": [1], "meta_info": told}

        return sockets.serving(answer)

    with ExitStack() as ends:
        infos = [tx.EngineInfo(url=ends.enter_context(engine(version)).url, kind="sglang") for version in (1, 2)]
        routing = ends.enter_context(Routing(infos, make=make, **settings_for_router(make)))
        client = ends.enter_context(routing.client(timeout_s=WAIT_S))
        many = {"prompts": [PROMPT] * 200, "session_ids": [f"s{i}" for i in range(200)]}  # a ring may be uneven
        assert versions_of(client.generate(**many)) == {1, 2}
        heard.clear()
        assert versions_of(client.generate([PROMPT] * 20, min_version=2)) == {2}
        assert {demanded for _, demanded in heard} == {make == "vllm"}  # SGLang's drops headers: tokens decide
        assert versions_of(client.generate(**many)) == {1, 2}  # neither is taken for dead
        heard.clear()
        answer = httpx.post(f"{routing.url}/generate", json=OWN["sglang"][1], headers={MIN: "3"}, timeout=WAIT_S)
        told = answer.json()
        assert (answer.status_code, "weight_version" in told) == ((409, True) if make == "vllm" else (200, False))
        assert sum(heard.values()) == 1  # the router does not send it again
        with pytest.raises(DeadlineError, match=r"weight version \d.*version 3 or newer"):
            client.generate([PROMPT], min_version=3, timeout_s=1)
