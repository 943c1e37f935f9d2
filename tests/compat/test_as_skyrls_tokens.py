"""Requests for tokens by SkyRL's names, held against servers that write down what they are asked."""

import asyncio
import threading
from types import SimpleNamespace

import numpy
import pytest

from tests.compat.skyrl_client import made, sent
from tests.models import tiny_tokenizer
from tests.processes import WAIT_S
from tests.rpc.servers import in_turn, running
from torchrl_ext.compat.skyrl import RemoteInferenceClient
from torchrl_ext.errors import ConfigError, EngineError, EngineRefusedError
from torchrl_ext.types import EngineInfo

TOKENIZED = (200, {"tokens": [1]})
ROUTED = numpy.arange(12).reshape(3, 2, 2)


@pytest.fixture
def server():
    with running() as found:
        yield found


@pytest.fixture
def client(server):
    client = made(server)
    yield client
    client.close()


def answer(asked):
    """Two tokens per choice, without an index, as SkyRL's own route has it."""
    sampling = asked["sampling_params"]
    choices = [
        {"token_ids": [i, i + 1], "finish_reason": "stop", "logprobs": {"content": [{"logprob": -0.1 * (i + 1)}]}}
        for i in range(sampling.get("n", 1))
    ]
    return 200, {"choices": choices}


def test_a_sample_is_one_prompt_continued_several_times(server, client):
    server.answers["POST /inference/v1/generate"] = answer
    body = {"prompt": {"chunks": [{"tokens": [1, 2]}, {"tokens": [3]}]}, "num_samples": 2, "model": "policy"}
    body["sampling_params"] = {"max_tokens": 2, "stop_strings": ["x"], "stop_tokens": [5]}
    assert client.run(client.sample({"json": body}))["sequences"] == [
        {"tokens": [0, 1], "logprobs": [-0.1], "stop_reason": "stop"},
        {"tokens": [1, 2], "logprobs": [-0.2], "stop_reason": "stop"},
    ]
    ((_, sent_body),) = sent(server, "inference/v1/generate")
    assert sent_body["token_ids"] == [1, 2, 3] and sent_body["model"] == "policy"
    assert sent_body["sampling_params"]["stop"] == ["x"] and sent_body["sampling_params"]["stop_token_ids"] == [5]


@pytest.mark.parametrize("status", [400, 404, 422, 501, 505])
def test_a_refusal_that_will_not_pass_is_not_asked_again(server, client, status):
    server.answers["POST /tokenize"] = in_turn((status, {"detail": "never"}), TOKENIZED)
    with pytest.raises(EngineRefusedError, match=f"{status}: never"):
        client.run(client._post("/tokenize", {}))


def test_a_request_that_is_in_work_at_a_teardown_ends_with_an_error_of_ours(server, client):
    arrived, leave = threading.Event(), threading.Event()

    def slow(body):
        arrived.set()
        leave.wait(WAIT_S)
        return TOKENIZED

    async def torn_down():
        asked = asyncio.ensure_future(client.tokenize(["a"]))
        assert await asyncio.to_thread(arrived.wait, WAIT_S)
        await client.teardown()
        with pytest.raises(EngineError, match=f"{client.proxy_url}.* the client was closed"):
            await asked

    server.answers["POST /tokenize"] = slow
    asyncio.run(torn_down())
    leave.set()


def test_a_call_of_its_own_loop_is_told_to_wait_by_itself(client):
    async def inside():
        return client.run(client.tokenize(["a"]))

    with pytest.raises(ConfigError, match="would block the event loop"):
        client.run(inside())


def test_a_completion_that_an_engine_aborts_is_asked_again_and_is_charged_to_nobody(server, client):
    whole = {"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}
    aborted = {"choices": [{"text": "b", "finish_reason": "stop"}, {"text": "", "finish_reason": "abort"}]}
    for route, call in (("v1/chat/completions", client.chat_completion), ("v1/completions", client.completion)):
        server.answers[f"POST /{route}"] = in_turn((200, aborted), (200, aborted), (200, whole))
        assert client.run(call({"json": {"seed": 1, "max_tokens": 5}})) == whole
        assert sent(server, route) == [({}, {"seed": 1, "max_tokens": 5})] * 3
        server.answers[f"POST /{route}"] = (200, {"object": "error"})
        with pytest.raises(EngineRefusedError, match="no completion"):
            client.run(call({"json": {}}))


def test_a_stop_string_over_an_abort_ends_a_generation_where_the_text_shows_it(server, client):
    def choice(ids, reason):
        return 200, {"choices": [{"token_ids": ids, "finish_reason": reason}]}

    server.answers["POST /inference/v1/generate"] = in_turn(choice([0, 1, 2], "abort"), choice([3, 4, 5], "length"))
    server.answers["POST /detokenize"] = lambda body: (200, {"prompt": "".join("abcdef"[i] for i in body["tokens"])})
    found = client.run(client.generate({"prompt_token_ids": [[9]], "sampling_params": {"stop": "cde"}}))
    assert found["response_ids"] == [[0, 1, 2, 3, 4]] and found["stop_reasons"] == ["stop"]
    assert found["responses"] == ["abcde"] and found["response_logprobs"] is None
    assert [body["token_ids"] for _, body in sent(server, "inference/v1/generate")] == [[9], [9, 0, 1, 2]]


def test_input_that_cannot_work_is_refused_before_anything_is_sent(server, client):
    for bad, words in (
        ({"prompts": ["text"]}, "no prompt_token_ids"),
        ({"prompt_token_ids": [[]]}, "prompt 0 has no token"),
        ({"prompt_token_ids": [[1]], "sampling_params": {"n": 2}}, "one continuation"),
        ({"prompt_token_ids": [[1]], "session_ids": ["a", "b"]}, "2 session_ids for 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            client.run(client.generate(bad))
    sglang = made(server, kind="sglang")
    with pytest.raises(ConfigError, match="does not render"):
        sglang.run(sglang.render({"json": {"messages": []}}))
    sglang.close()
    assert not server.calls


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"proxy_url": "a:1"}, "one of 2 servers"),
        ({"concurrency_per_engine": -1}, "at least 0"),
        ({"server_urls": ["a:1", "a:1/"]}, "twice"),
    ],
)
def test_a_client_that_cannot_work_is_not_made(settings, words):
    with pytest.raises(ConfigError, match=words):
        RemoteInferenceClient(**{"proxy_url": "host:1", "server_urls": ["a:1", "b:1"], **settings})


def test_a_client_of_a_routing_asks_its_router_and_controls_its_engines():
    engines = [EngineInfo(url=f"http://{name}:1", kind="sglang") for name in "ab"]
    found = RemoteInferenceClient.of(SimpleNamespace(url="http://r:1", engines=engines, api_key="key"), timeout_s=5)
    assert (found.proxy_url, found.server_urls, found.kind) == ("http://r:1", ("http://a:1", "http://b:1"), "sglang")
    assert (found.api_key, found.timeout_s) == ("key", 5)
    with pytest.raises(ConfigError, match="no engine is registered"):
        RemoteInferenceClient.of(SimpleNamespace(url="http://r:1", engines=[], api_key=None))


def test_a_tokenizer_takes_the_place_of_the_engines_routes_for_text(server):
    tokenizer = tiny_tokenizer()
    client = made(server, tokenizer=tokenizer)
    ids = tokenizer("the trainer", add_special_tokens=False)["input_ids"]
    assert client.run(client.tokenize(["the trainer"], add_special_tokens=False)) == [ids]
    assert client.run(client.detokenize([ids])) == ["the trainer"] and not server.calls
    client.close()


def test_the_limit_of_the_environment_counts_where_none_is_given(server, monkeypatch):
    arrived, leave = threading.Semaphore(0), threading.Event()

    def slow(asked):
        arrived.release()
        leave.wait(WAIT_S)
        return answer(asked)

    server.answers["POST /inference/v1/generate"] = slow
    server.answers["POST /detokenize"] = (200, {"prompt": "a"})
    monkeypatch.setenv("SKYRL_GENERATE_CONCURRENCY_PER_ENGINE", "2")
    client = made(server)
    thread = threading.Thread(target=lambda: client.run(client.generate({"prompt_token_ids": [[1]] * 5})), daemon=True)
    thread.start()
    assert arrived.acquire(timeout=WAIT_S) and arrived.acquire(timeout=WAIT_S)
    assert not arrived.acquire(timeout=0.3)  # the others wait for these two
    leave.set()
    thread.join(WAIT_S)
    assert len(sent(server, "inference/v1/generate")) == 5
    client.close()


def test_a_limit_of_the_environment_that_is_no_number_is_said_so(server, monkeypatch):
    monkeypatch.setenv("SKYRL_GENERATE_CONCURRENCY_PER_ENGINE", "many")
    with pytest.raises(ConfigError, match="SKYRL_GENERATE_CONCURRENCY_PER_ENGINE='many'"):
        made(server)
    made(server, concurrency_per_engine=1).close()
