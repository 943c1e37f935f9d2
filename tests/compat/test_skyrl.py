"""SkyRL's client, held against servers that write down what they are asked."""

import pickle

import pytest

from tests.control.servers import running
from torchrl_ext.base.errors import ConfigError, EngineError, EngineRefusedError
from torchrl_ext.compat.skyrl import PauseMode, RemoteInferenceClient

GENERATE = "POST /inference/v1/generate"


def made(*servers, **settings):
    """A client for these servers, of which the first is the router, too."""
    urls = [server.url for server in servers]
    proxy = urls[0].replace("127.0.0.1", "localhost")
    return RemoteInferenceClient(proxy_url=proxy, server_urls=urls, timeout_s=20, **settings)


def sent(server, route):
    """Queries and bodies of the calls of a route."""
    return [(call.query, call.body) for call in server.calls if call.route == f"POST /{route}"]


@pytest.fixture
def server():
    with running() as found:
        yield found


@pytest.fixture
def client(server):
    return made(server)


def test_each_engine_is_told_the_rank_of_its_first_worker():
    with running() as first, running() as second:
        client = made(first, second)
        client.run(client.init_weight_update_communicator({"master_port": 1}))
        told = [sent(server, "init_weight_transfer_engine")[-1][1]["init_info"] for server in (first, second)]
        assert told == [{"master_port": 1, "rank_offset": rank} for rank in (1, 7)]
        second.answers["POST /start_weight_update"] = (400, {"detail": "an update is open"})
        with pytest.raises(EngineError, match="an update is open") as caught:
            client.run(client.start_weight_update())
        assert [row.engine for row in caught.value.rows] == [second.url] and caught.value.rows[0].error


def test_pauses_and_sleeps_reach_vllm_as_it_reads_them(server, client):
    for route in ("pause", "resume", "sleep", "wake_up"):
        server.answers[f"POST /{route}"] = (200, {"status": "done"})
    asleep = {"results": [{"whole": True, "asleep": ["kv_cache", "weights"]}]}
    for mode in (PauseMode.KEEP, "KEEP"):
        paused = {server.url: {"status": 200, "body": {"status": "paused"}}}
        assert client.run(client.pause(mode, clear_cache=mode == "KEEP")) == paused
    assert sent(server, "pause") == [({"mode": "keep", "clear_cache": "false"}, None)] * 2
    ((cleared, _),) = sent(server, "reset_prefix_cache")
    assert cleared["reset_running_requests"] == "true"
    (told,) = client.run(client.resume()).values()
    assert told["body"]["status"] == "serving"
    client.run(client.sleep(1, ["weights", "kv_cache"]))
    server.answers["state"] = asleep
    client.run(client.wake_up(["weights"]))
    assert sent(server, "sleep") == [({"level": "1", "mode": "keep"}, None)]
    assert sent(server, "wake_up") == [({"tags": "weights"}, None)]


def test_weight_update_steps_reach_the_server_unchanged(server, client):
    there = pickle.loads(pickle.dumps(client))
    assert (there.proxy_url, there.server_urls) == (client.proxy_url, client.server_urls)
    there.run(there.start_weight_update())
    there.run(there.update_named_weights({"names": ["w"]}))
    told = there.run(there.finish_weight_update(3))
    assert told == {server.url: {"status": 200, "body": {"message": "done", "success": True}}}
    posted = [call for call in server.calls if call.route.startswith("POST")]
    assert [(call.route, call.body) for call in posted] == [
        ("POST /start_weight_update", None),
        ("POST /update_weights", {"update_info": {"names": ["w"]}}),
        ("POST /finish_weight_update", {"weight_version": "3"}),
    ]


def answer(asked):
    """Two tokens per choice, without an index, as SkyRL's own route has it."""
    sampling = asked["sampling_params"]
    choices = [
        {"token_ids": [i, i + 1], "finish_reason": "stop", "logprobs": {"content": [{"logprob": -0.1 * (i + 1)}]}}
        for i in range(sampling.get("n", 1))
    ]
    return 200, {"choices": choices}


def test_a_sample_is_one_prompt_continued_several_times(server, client):
    server.answers[GENERATE] = answer
    body = {"prompt": {"chunks": [{"tokens": [1, 2]}, {"tokens": [3]}]}, "num_samples": 2, "model": "policy"}
    body["sampling_params"] = {"max_tokens": 2, "stop_strings": ["x"], "stop_tokens": [5]}
    assert client.run(client.sample({"json": body}))["sequences"] == [
        {"tokens": [0, 1], "logprobs": [-0.1], "stop_reason": "stop"},
        {"tokens": [1, 2], "logprobs": [-0.2], "stop_reason": "stop"},
    ]
    ((_, sent_body),) = sent(server, "inference/v1/generate")
    assert sent_body["token_ids"] == [1, 2, 3] and sent_body["model"] == "policy"
    assert sent_body["sampling_params"]["stop"] == ["x"] and sent_body["sampling_params"]["stop_token_ids"] == [5]


def test_generated_tokens_come_with_their_text(server, client):
    server.answers |= {GENERATE: answer, "POST /detokenize": (200, {"prompt": "a"})}
    found = client.run(client.generate({"prompt_token_ids": [[1], [2]]}))
    assert (found["response_ids"], found["responses"]) == ([[0, 1]] * 2, ["a"] * 2)


def test_chats_and_completions_pass_the_router_unchanged(server):
    client, whole = made(server, model_name="policy"), {"choices": [{"finish_reason": "abort"}]}
    for route, call in (
        ("v1/chat/completions", client.chat_completion),
        ("v1/completions", client.completion),
        ("v1/chat/completions/render", client.render),
    ):
        server.answers[f"POST /{route}"] = (200, whole)
        assert client.run(call({"json": {"max_tokens": 5, "session_id": "a"}})) == whole
        assert sent(server, route) == [({}, {"max_tokens": 5, "model": "policy"})]
        assert server.calls[-1].headers["x-session-id"] == "a"
        server.answers[f"POST /{route}"] = (400, {"detail": "too long"})
        with pytest.raises(EngineRefusedError, match="400: too long"):
            client.run(call({"json": {}}))


def test_invalid_input_or_settings_are_refused_before_a_request(server, client, monkeypatch):
    for bad, words in (
        ({"prompts": ["text"]}, "no prompt_token_ids"),
        ({"prompt_token_ids": [[]]}, "prompt 0 has no token"),
        ({"prompt_token_ids": [[1]], "sampling_params": {"n": 2}}, "one continuation"),
        ({"prompt_token_ids": [[1]], "session_ids": ["a", "b"]}, "2 session_ids for 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            client.run(client.generate(bad))
    for settings, words in (
        ({"concurrency_per_engine": -1}, "'-1'"),
        ({"server_urls": ["a:1", "a:1/"]}, "twice"),
        ({"kind": "pigeon"}, "pigeon"),
        ({"server_urls": ["a:1", "host:1"]}, "the others would get no requests"),
    ):
        with pytest.raises(ConfigError, match=words):
            RemoteInferenceClient(**{"proxy_url": "host:1", "server_urls": ["a:1", "b:1"], **settings})
    monkeypatch.setenv("SKYRL_GENERATE_CONCURRENCY_PER_ENGINE", "many")
    with pytest.raises(ConfigError, match="SKYRL_GENERATE_CONCURRENCY_PER_ENGINE in the environment is 'many'"):
        made(server)
    monkeypatch.setenv("SKYRL_GENERATE_CONCURRENCY_PER_ENGINE", "2")
    assert made(server)._requests._limit == 2
    assert not server.calls
