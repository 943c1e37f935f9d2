"""Requests for tokens by SkyRL's names, held against servers that write down what they are asked."""

import asyncio
import base64
import io
import re
import threading
from types import SimpleNamespace

import numpy
import pytest

from tests.compat.skyrl_client import made, sent
from tests.models import tiny_tokenizer
from tests.processes import WAIT_S
from tests.rpc.servers import in_turn, running
from torchrl_ext.compat.skyrl import RemoteInferenceClient
from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, EngineRefusedError
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


def test_the_end_of_a_session_never_fails(server, client, caplog):
    for empty in ("", None):
        client.run(client.finish_session(empty))
    client.run(client.finish_session(7))  # no such route
    assert not caplog.records
    server.answers["POST /finish_session"] = (500, {"error": "boom"})
    client.run(client.finish_session("a"))
    assert sent(server, "finish_session") == [({"session_id": "7"}, None), ({"session_id": "a"}, None)]
    gone = RemoteInferenceClient(proxy_url="http://127.0.0.1:1", server_urls=[server.url])
    gone.run(gone.finish_session("a"))
    assert len(caplog.records) == 2
    gone.close()


def test_where_adapters_are_trained_a_request_has_to_name_its_model(server):
    server.answers["POST /v1/completions"] = (200, {"choices": [{"text": "a"}]})  # without a finish reason
    client, chat = made(server, model_name="base", uses_lora_weight_sync=True), {"json": {"messages": []}}
    calls = [client.generate({"prompt_token_ids": [[1]]}), client.sample({"json": {}})]
    calls += [client.completion({"json": {"prompt": "a"}}), client.chat_completion(chat), client.render(chat)]
    for call in calls:
        with pytest.raises(ValueError, match="LoRA is enabled"):
            client.run(call)
    client.run(client.completion({"json": {"prompt": "a", "model": "policy"}}))
    assert [body["model"] for _, body in sent(server, "v1/completions")] == ["policy"]
    adapted = made(server, uses_lora_weight_sync=True, adapter="mine")
    adapted.run(adapted.completion({"json": {"prompt": "a"}}))
    assert sent(server, "v1/completions")[-1][1]["model"] == "mine"
    client.close(), adapted.close()


def answer(asked):
    """Two tokens per choice, without an index, as SkyRL's own route has it."""
    sampling, ids = asked["sampling_params"], asked["token_ids"]
    choices = [
        {"token_ids": [i, i + 1], "finish_reason": "stop", "logprobs": {"content": [{"logprob": -0.1 * (i + 1)}]}}
        for i in range(sampling.get("n", 1))
    ]
    told = {"choices": choices}
    if sampling.get("prompt_logprobs") is not None:
        row = lambda token: {"900": {"logprob": -2.0}, str(token): {"logprob": -0.5}, "901": {"logprob": -1.0}}  # noqa: E731
        told["prompt_logprobs"] = [None, *map(row, ids[1:])]
    return 200, told


def test_samples_have_log_probabilities_of_the_prompt_where_they_are_asked_for(server, client):
    server.answers["POST /inference/v1/generate"] = answer
    body = {"prompt": {"chunks": [{"tokens": [1, 2]}, {"tokens": [3]}]}, "num_samples": 2, "topk_prompt_logprobs": 2}
    body["sampling_params"] = {"max_tokens": 2, "stop_strings": ["x"], "stop_tokens": [5]}
    plain = client.run(client.sample({"json": body}))
    assert plain["sequences"] == [
        {"tokens": [0, 1], "logprobs": [-0.1], "stop_reason": "stop"},
        {"tokens": [1, 2], "logprobs": [-0.2], "stop_reason": "stop"},
    ]
    assert plain["prompt_logprobs"] is None and plain["topk_prompt_logprobs"] is None
    told = client.run(client.sample({"json": {**body, "include_prompt_logprobs": True}}))
    assert told["prompt_logprobs"] == [None, -0.5, -0.5]
    assert told["topk_prompt_logprobs"] == [None, [(2, -0.5), (901, -1.0)], [(3, -0.5), (901, -1.0)]]
    ((_, first), (_, second)) = sent(server, "inference/v1/generate")
    assert first["token_ids"] == [1, 2, 3] and first["sampling_params"]["stop"] == ["x"]
    assert first["sampling_params"]["stop_token_ids"] == [5] and "prompt_logprobs" not in first["sampling_params"]
    assert second["sampling_params"]["prompt_logprobs"] == 2
    server.answers["POST /inference/v1/generate"] = lambda asked: (200, {"choices": answer(asked)[1]["choices"]})
    with pytest.raises(EngineRefusedError, match="log-probabilities of the prompt"):
        client.run(client.sample({"json": {**body, "include_prompt_logprobs": True}}))


def test_images_of_a_sample_take_their_place_between_the_text(server, client):
    places = [{"offset": 1, "length": 2}, {"offset": 3, "length": 1}]
    features = {
        "mm_hashes": {"image": ["a", "b"]},
        "mm_placeholders": {"image": places},
        "kwargs_data": {"image": ["x", "y"]},
    }
    server.answers["POST /v1/chat/completions/render"] = (200, {"token_ids": [0, 71, 72, 81, 0], "features": features})
    server.answers["POST /inference/v1/generate"] = answer
    image, pointer = (
        {"type": "image", "data": b"AA==", "format": "png"},
        {"type": "image_asset_pointer", "location": "l"},
    )
    chunks = [{"tokens": [1, 2, 3]}, image, {"tokens": [4]}, pointer]
    client.run(client.sample({"json": {"prompt": {"chunks": chunks}}}))
    ((_, rendered),) = sent(server, "v1/chat/completions/render")
    assert [part["image_url"]["url"] for part in rendered["messages"][0]["content"]] == [
        "data:image/png;base64,AA==",
        "l",
    ]
    ((_, body),) = sent(server, "inference/v1/generate")
    assert body["token_ids"] == [1, 2, 3, 71, 72, 4, 81]
    moved = {"image": [{"offset": 3, "length": 2}, {"offset": 6, "length": 1}]}
    assert body["features"] == {**features, "mm_placeholders": moved}
    with pytest.raises(EngineRefusedError, match="rendered 2 images"):
        client.run(client.sample({"json": {"prompt": {"chunks": [image]}}}))


def test_generations_carry_features_and_salts_that_vllm_accepts(server, client):
    server.answers["POST /inference/v1/generate"] = answer
    server.answers["POST /detokenize"] = (200, {"prompt": "a"})
    for salt in ("org/policy@3", "org:policy:3", "", "x" * 500, "x" * 501):
        batch = {"prompt_token_ids": [[1]], "mm_features": [{"mm_hashes": {}}], "cache_salt": salt}
        client.run(client.generate(batch))
    bodies = [body for _, body in sent(server, "inference/v1/generate")]
    assert all(body["features"] == {"mm_hashes": {}} for body in bodies)
    salts = [body.get("cache_salt") for body in bodies]
    assert salts[:3] == ["org%2Fpolicy%403", "org:policy:3", None]
    assert len(set(salts)) == 5 and not any(re.search(r"[@/\\\0]|.{129}", salt or "") for salt in salts)


def packed(experts, dtype="int16"):
    """SkyRL's form of an array."""
    raw = numpy.asarray(experts, dtype)
    return {"data": base64.b64encode(raw.tobytes()).decode(), "shape": list(raw.shape), "dtype": dtype}


def routed(experts, token=5, reason="stop"):
    return 200, {"choices": [{"token_ids": [token], "finish_reason": reason, "routed_experts": experts}]}


def test_routed_experts_are_read_in_skyrls_form_and_in_vllms_and_joined_over_an_abort(server):
    client = made(server, enable_return_routed_experts=True)
    server.answers["POST /detokenize"] = (200, {"prompt": "a"})

    def generate():
        batch = {"prompt_token_ids": [[1, 2]], "sampling_params": {"max_tokens": 4}}
        (found,) = client.run(client.generate(batch))["rollout_expert_indices"]
        return found

    file = io.BytesIO()
    numpy.save(file, ROUTED.astype("uint8"))
    server.answers["POST /inference/v1/generate"] = routed(base64.b64encode(file.getvalue()).decode())
    found = generate()  # there is no route of SkyRL's
    assert found.dtype == "uint8" and (found == ROUTED).all()
    server.answers["POST /skyrl/v1/generate"] = routed(packed(ROUTED))
    found = generate()
    assert found.dtype == "int16" and (found == ROUTED).all()
    first, second = packed([[[1]], [[2]]]), packed([[[7]], [[8]], [[9]]])
    server.answers["POST /skyrl/v1/generate"] = in_turn(routed(first, reason="abort"), routed(second))
    assert generate().tolist() == [[[1]], [[2]], [[9]]]
    good = packed(ROUTED)
    for wrong in (ROUTED.tolist(), {**good, "shape": [3, 2, 3]}, {**good, "dtype": "object"}, "AA==", None):
        server.answers["POST /skyrl/v1/generate"] = routed(wrong)
        with pytest.raises(EngineRefusedError, match="must return packed"):
            generate()
    client.close()


@pytest.mark.parametrize("status", [400, 404, 422, 501, 505])
def test_a_refusal_that_will_not_pass_is_not_asked_again(server, client, status):
    server.answers["POST /tokenize"] = in_turn((status, {"detail": "never"}), TOKENIZED)
    with pytest.raises(EngineRefusedError, match=f"{status}: never"):
        client.run(client.post("/tokenize", {}))


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


def test_a_call_without_an_answer_in_time_is_cancelled(server, client):
    leave = threading.Event()
    server.answers["POST /tokenize"] = lambda body: (leave.wait(WAIT_S), TOKENIZED)[1]
    with pytest.raises(DeadlineError, match="took longer than"):
        client.run(client.tokenize(["a"]), timeout_s=0.2)
    leave.set()


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
        ({"prompt_token_ids": [[1]], "cache_salt": 7}, "a string"),
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
        ({"data_parallel_size": 3}, "groups of data_parallel_size"),
        ({"concurrency_per_engine": -1}, "a limit of at least 0"),
        ({"enable_return_routed_experts": True, "kind": "sglang"}, "routed experts"),
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
    assert (found.api_key, found.timeout_s, found.get_endpoint_url()) == ("key", 5, "http://r:1")
    with pytest.raises(ConfigError, match="no engine is registered"):
        RemoteInferenceClient.of(SimpleNamespace(url="http://r:1", engines=[], api_key=None))


def test_a_tokenizer_takes_the_place_of_the_engines_routes_for_text(server):
    tokenizer = tiny_tokenizer()
    client = made(server, tokenizer=tokenizer)
    ids = tokenizer("the trainer", add_special_tokens=False)["input_ids"]
    assert client.run(client.tokenize(["the trainer"], add_special_tokens=False)) == [ids]
    assert client.run(client.detokenize([ids])) == ["the trainer"] and not server.calls
    client.close()


@pytest.mark.parametrize("variable", ["SKYRL_GENERATE_CONCURRENCY_PER_ENGINE", "SKYRL_HTTP_CONNECTION_LIMIT"])
def test_limits_of_the_environment_count_where_none_is_given(server, monkeypatch, variable):
    arrived, leave = threading.Semaphore(0), threading.Event()

    def slow(asked):
        arrived.release()
        leave.wait(WAIT_S)
        return answer(asked)

    server.answers["POST /inference/v1/generate"] = slow
    server.answers["POST /detokenize"] = (200, {"prompt": "a"})
    monkeypatch.setenv(variable, "2")
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
