"""The inference client against a real server, and against one that says what a test wants."""

import pickle
import threading
import time
from contextlib import closing

import httpx
import pytest

from tests.control.requests.aborts import aborted
from tests.control.servers import in_turn
from tests.fakes import FakeEngine
from tests.models import PROMPT, greedy, tiny_model
from tests.processes import WAIT_S
from torchrl_ext.base.errors import ConfigError, DeadlineError, EngineError, EngineRefusedError, RouteAbsent
from torchrl_ext.control.requests.client import Generation, InferenceClient, VersionSpan

ROUTE = "POST /inference/v1/generate"


@pytest.fixture
def client(server):
    made = InferenceClient(server.url)
    yield made
    made.close()


def test_generation_has_logprobs_finish_reason_and_versions(client):
    for asked, count in ((0, 6), (1, 6), (True, 6), (False, 0), (None, 0)):  # as vLLM's: 0 means the sampled token
        (found,) = client.generate([PROMPT], max_tokens=6, logprobs=asked, ignore_eos=True, seed=1)
        assert isinstance(found, Generation) and len(found.token_ids) == 6
        assert len(found.logprobs) == count and max(found.logprobs, default=0) <= 0
    assert found.finish_reason == "length"
    assert found.weight_versions == (VersionSpan(version="default", start=0, end=6),)
    stop = greedy(tiny_model(0), PROMPT, 3)[-1]
    (found,) = client.generate([PROMPT], max_tokens=12, temperature=0.0, stop_token_ids=[stop])
    assert found.finish_reason == "stop" and found.token_ids[-1] == stop


def test_generation_continues_after_an_engine_aborts_requests(server, client):
    """A request that an engine aborts is continued; its partial tokens are never returned as the result."""
    settings = {"max_tokens": 100, "ignore_eos": True}
    prompts = [PROMPT, PROMPT[:3]]
    found = aborted(server.url, lambda: client.generate(prompts, temperature=0.0, **settings))
    assert [one.token_ids for one in found] == [tuple(greedy(tiny_model(0), prompt, 100)) for prompt in prompts]
    assert {one.finish_reason for one in found} == {"length"}
    drawn = aborted(server.url, lambda: client.generate(prompts, n=3, seed=4, **settings))
    assert [len(one.token_ids) for one in drawn] == [100] * 6
    assert len({one.token_ids for one in drawn}) == 6


def test_missing_generate_route_error_hints_at_connect():
    """A 404 from an engine of another kind raises RouteAbsent, whose hint names InferenceClient.connect."""
    with FakeEngine("sglang") as engine, closing(InferenceClient(engine.url)) as client:
        with pytest.raises(RouteAbsent, match="answered 404") as refused:
            client.generate([PROMPT], max_tokens=2)
        assert refused.value.status == 404 and "InferenceClient.connect" in refused.value.hint
        assert refused.value.expected == "an engine with the route /inference/v1/generate"


def part(*tokens, reason="abort", version=1):
    spans = [{"version": str(version), "start": 0, "end": len(tokens)}]
    logprobs = {"content": [{"logprob": -0.1 * token} for token in tokens]}
    return {"index": 0, "token_ids": tokens, "logprobs": logprobs, "finish_reason": reason, "weight_versions": spans}


def test_continuation_requests_remaining_tokens_until_deadline():
    answers = [{"choices": [part(1, 2)]}, {"choices": [part()]}, {"choices": [part(3, reason="stop", version=2)]}]
    with FakeEngine("vllm") as engine:
        engine.answers[ROUTE] = in_turn(*((200, answer) for answer in answers))
        with closing(InferenceClient(engine.url)) as client:
            (found,) = client.generate([[7, 8]], max_tokens=5, seed=40)
        bodies = [call.body for call in engine.calls]
        engine.answers[ROUTE] = (200, {"choices": [part()]})
        late = pytest.raises(DeadlineError, match=engine.url)
        with closing(InferenceClient(engine.url, timeout_s=0.5)) as client, late:
            client.generate([[7, 8]])
    assert found.token_ids == (1, 2, 3) and found.logprobs == pytest.approx((-0.1, -0.2, -0.3))
    assert found.finish_reason == "stop" and found.token_versions() == [1, 1, 2]
    settings = [(body["sampling_params"]["max_tokens"], body["sampling_params"]["seed"]) for body in bodies]
    assert [body["token_ids"] for body in bodies] == [[7, 8], [7, 8, 1, 2], [7, 8, 1, 2]]
    assert settings == [(5, 40), (3, 42), (3, 42)]


def test_aborted_request_with_stop_strings_restarts():
    """A stop string may begin before the abort and end after it, and this client cannot read tokens."""
    with FakeEngine("vllm") as engine:
        answers = [{"choices": [part(1, 2)]}, {"choices": [part(1, 2, 3, reason="stop")]}]
        engine.answers[ROUTE] = in_turn(*((200, answer) for answer in answers))
        client = InferenceClient(engine.url)
        (found,) = client.generate([[7, 8]], max_tokens=5, stop=["END"])
        client.close()
    assert found.token_ids == (1, 2, 3)
    assert [call.body["token_ids"] for call in engine.calls] == [[7, 8], [7, 8]]


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_engine_answering_unavailable_is_retired_temporarily(status):
    """An engine that cannot answer now gets no requests for retire_s seconds; other engines serve them."""
    with FakeEngine("vllm") as busy, FakeEngine("vllm") as free:
        busy.answers[ROUTE] = in_turn((status, {"detail": "later"}), (200, {"choices": [part(2, reason="stop")]}))
        free.answers[ROUTE] = (200, {"choices": [part(1, reason="stop")]})
        with closing(InferenceClient([busy.url, free.url], retire_s=0.5)) as client:
            for _ in range(2):
                assert client.generate([[7]])[0].token_ids == (1,)
            assert len(busy.calls) == 1
            time.sleep(0.6)
            assert client.generate([[7]])[0].token_ids == (2,)


def test_persistent_client_alone_retries_until_the_deadline(caplog):
    """Only a persistent client repeats a request after a temporary refusal, until its deadline."""
    later = (503, {"detail": "nobody is behind this router"})
    good = (200, {"choices": [part(1, reason="stop")]})
    with FakeEngine("vllm") as router:
        router.answers[ROUTE] = in_turn(later, later, later, good)
        with closing(InferenceClient(router.url, persistent=True)) as client:
            assert client.generate([[7]])[0].token_ids == (1,)
        warnings = [record.getMessage() for record in caplog.records if "got no answer" in record.getMessage()]
        assert len(warnings) == 1 and router.url in warnings[0] and "nobody is behind" in warnings[0]
        router.answers[ROUTE] = later
        for settings, error in (({"persistent": True, "timeout_s": 1.0}, DeadlineError), ({}, EngineRefusedError)):
            with closing(InferenceClient(router.url, **settings)) as client, pytest.raises(error, match="nobody"):
                client.generate([[7]])


def test_session_id_travels_in_both_router_headers():
    """Each request carries its session id in the headers of the vLLM router and of the SGLang router."""
    with FakeEngine("vllm") as router, closing(InferenceClient(router.url)) as client:
        router.answers[ROUTE] = lambda body: (200, {"choices": [part(1, reason="stop")]})
        client.generate([[1], [2]], session_ids=["a", None])
        found = {
            call.body["token_ids"][0]: {call.headers.get("x-session-id"), call.headers.get("x-smg-routing-key")}
            for call in router.calls
        }
        assert found == {1: {"a"}, 2: {None}}
        with pytest.raises(ConfigError, match="1 session_ids for 2 prompts"):
            client.generate([[1], [2]], session_ids=["a"])


def test_a_seed_repeats_a_batch_and_differs_within_it(client):
    first, again = (client.generate([PROMPT, PROMPT], n=3, max_tokens=12, seed=7) for _ in range(2))
    assert [one.token_ids for one in first] == [one.token_ids for one in again]
    assert len({one.token_ids for one in first}) == 6
    other = client.generate([PROMPT, PROMPT], n=3, max_tokens=12, seed=8_000)
    assert {one.token_ids for one in other}.isdisjoint(one.token_ids for one in first)


def test_bad_prompt_is_refused_and_no_prompts_give_no_results(client):
    """A bad prompt is refused before any request is sent; an empty list of prompts gives an empty list."""
    for bad in ([], [0.5]):
        with pytest.raises(ConfigError, match="prompt 1"):
            client.generate([PROMPT, bad])
    assert client.generate([]) == []


def test_a_requester_that_leaves_frees_the_engine(server):
    """The engine drops a request whose connection is gone, so it cannot be blocked by the dead."""
    with pytest.raises(DeadlineError):
        InferenceClient(server.url).generate([PROMPT], n=64, max_tokens=500, timeout_s=0.2, ignore_eos=True)
    freed = threading.Event()
    for _ in range(600):
        if httpx.get(f"{server.url}/load", verify=False).json()["server_load"] == 0:
            break
        freed.wait(0.05)
    else:
        pytest.fail("the abandoned request still runs")


def test_the_first_error_ends_every_other_request_at_once(server):
    client = InferenceClient(server.url, timeout_s=10)
    before = set(threading.enumerate())
    httpx.post(f"{server.url}/pause", params={"mode": "keep"})
    try:
        with pytest.raises(EngineRefusedError, match="no token 99999"):
            client.generate([PROMPT] * 8 + [[99_999]], max_tokens=4)
        assert len(set(threading.enumerate()) - before) <= 1  # the one that all clients share
    finally:
        httpx.post(f"{server.url}/resume")
    assert len(client.generate([PROMPT] * 2, max_tokens=4)) == 2
    client.close()


def test_close_ends_running_requests_and_next_call_reconnects():
    """Closing a client ends its running requests; a later call opens a new connection."""
    arrived, leave, said = threading.Event(), threading.Event(), []

    def slow(body):
        arrived.set()
        leave.wait(WAIT_S)
        return 200, {"choices": [part(1, reason="stop")]}

    def ask():
        try:
            client.generate([PROMPT])
        except EngineError as error:
            said.append(str(error))

    with FakeEngine("vllm") as engine:
        engine.answers[ROUTE] = slow
        client = InferenceClient(engine.url, timeout_s=20)
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        assert arrived.wait(WAIT_S)
        client.close()
        client.close()
        thread.join(5)
        leave.set()
        assert len(said) == 1 and "the client was closed" in said[0]
        for one in (client, pickle.loads(pickle.dumps(client))):
            assert len(one.generate([PROMPT], max_tokens=2)) == 1
            one.close()
