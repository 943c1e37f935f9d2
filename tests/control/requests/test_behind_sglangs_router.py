"""What of a request reaches SGLang through its router, whose types of requests drop what they do not know."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import httpx
import pytest

import torchrl_ext as tx
from tests.control.test_router import Engine, serving
from tests.fakes import FakeEngine
from tests.models import PROMPT, tiny_tokenizer
from torchrl_ext.cli.environments import settings_for_router
from torchrl_ext.compat.skyrl import RemoteInferenceClient
from torchrl_ext.control.requests.dialects import SGLangDialect
from torchrl_ext.control.requests.generation import GenerationRequest
from torchrl_ext.control.serving.routing import Routing

# sglang-router 0.3.2, as far as requests of ours use them; vllm-router 0.1.17 has neither of the last two
SAMPLING = {
    "temperature", "max_new_tokens", "top_p", "top_k", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "stop", "ignore_eos", "skip_special_tokens", "json_schema", "regex", "ebnf", "min_p", "stop_token_ids",
    "no_stop_trim", "n", "min_new_tokens", "sampling_seed",
}  # fmt: skip
FIELDS = {"text", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "lora_path", "stream"}


def test_no_field_of_the_dialect_is_one_that_the_router_drops():
    more = {"min_tokens": 1, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "stop": ["x"], "ignore_eos": True}
    asked = GenerationRequest(token_ids=(1,), n=2, seed=7, stop_token_ids=(9,), logprobs=True, more=more)
    for one in (asked, dataclasses.replace(asked, adapter="policy")):
        body = SGLangDialect.ask(one)
        assert body.keys() <= FIELDS and body["sampling_params"].keys() <= SAMPLING


def test_tokenize_and_detokenize_requests_go_to_an_engine():
    """The client sends text requests to an engine that answers, since the router has no route for them."""
    told = {"finish_reason": {"type": "length"}, "weight_version": "1"}
    with FakeEngine("sglang") as router, FakeEngine("sglang") as engine, FakeEngine("sglang") as gone:
        gone.close()
        router.answers["POST /generate"] = (200, {"output_ids": [3, 4], "meta_info": told})
        engine.answers["POST /detokenize"] = lambda body: (200, {"text": " ".join(map(str, body["tokens"]))})
        engine.answers["POST /tokenize"] = (200, {"tokens": [5, 6]})
        urls = [gone.url, engine.url]
        client = RemoteInferenceClient(proxy_url=router.url, server_urls=urls, kind="sglang", timeout_s=30)
        assert client.run(client.generate({"prompt_token_ids": [[1]]}))["responses"] == ["3 4"]
        assert client.run(client.tokenize(["5 6"])) == [[5, 6]]
        client.close()


# the real router, over scripted engines


@pytest.mark.engine
def test_pools_of_sglang_are_both_asked_and_told_where_they_meet():
    """The router is real, the engines are not: pools of SGLang's hand on what they computed by GPUs alone."""

    class Pooled(Engine):
        def answer(self, method, path, query, body):
            return (200, {"output_ids": [1]}) if path == "/generate" else (200, {})

    with serving(Pooled()) as prefill, serving(Pooled()) as decode:
        infos = [
            tx.EngineInfo(url=prefill.url, kind="sglang", worker_type="prefill", bootstrap_port=9001),
            tx.EngineInfo(url=decode.url, kind="sglang", worker_type="decode"),
        ]
        with Routing(infos, **settings_for_router("sglang")) as routing:
            listed_types = {worker.url: worker.worker_type for worker in routing.router.workers()}
            assert listed_types == {prefill.url: "prefill", decode.url: "decode"}
            body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
            assert httpx.post(f"{routing.url}/generate", json=body).json()["output_ids"] == [1]
        asked = [body for engine in (prefill, decode) for _, path, body in engine.calls if path == "/generate"]
    assert len(asked) == 2 and asked[0]["bootstrap_room"] == asked[1]["bootstrap_room"]
    assert [(body["bootstrap_host"], body["bootstrap_port"]) for body in asked] == [("127.0.0.1", 9001)] * 2


@pytest.mark.engine
@pytest.mark.parametrize("make", ["vllm", "sglang"])
def test_session_stays_on_one_engine_while_sessions_use_both(make):
    """The router is real, the engines are not: each answers with tokens of its own."""

    class Named(Engine):
        def __init__(self, token):
            super().__init__()
            self.token = token

        def answer(self, method, path, query, body):
            told = {"finish_reason": {"type": "length"}, "weight_version": "1"}
            return (200, {"output_ids": [self.token], "meta_info": told}) if path == "/generate" else (200, {})

    with serving(Named(1)) as first, serving(Named(2)) as second:
        infos = [tx.EngineInfo(url=engine.url, kind="sglang") for engine in (first, second)]
        with Routing(infos, make=make, **settings_for_router(make)) as routing:
            client = RemoteInferenceClient.of(routing, timeout_s=60, tokenizer=tiny_tokenizer())
            sessions = [f"s{i}" for i in range(20)] * 3
            batch = {"prompt_token_ids": [PROMPT] * len(sessions), "session_ids": sessions}
            found = client.run(client.generate({**batch, "sampling_params": {"max_tokens": 1}}))
            client.close()
    places = defaultdict(set)
    for session, (token,) in zip(sessions, found["response_ids"], strict=True):
        places[session].add(token)
    assert all(len(engines) == 1 for engines in places.values())
    assert set.union(*places.values()) == {1, 2}
