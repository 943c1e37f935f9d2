"""The inference client against engines that say what a test wants."""

import itertools
import pickle
import threading
from contextlib import ExitStack

import pytest

from tests.control.servers import in_turn
from tests.fakes import FakeEngine
from tests.models import PROMPT
from tests.processes import WAIT_S
from torchrl_ext.base.errors import (
    ConfigError,
    DeadlineError,
    EngineRefusedError,
    EngineUnreachableError,
    RouteAbsent,
)
from torchrl_ext.compat.skyrl import RemoteInferenceClient
from torchrl_ext.control.requests.client import InferenceClient
from torchrl_ext.control.serving.processes import free_port

ROUTE = "POST /inference/v1/generate"


def part(*tokens, reason="abort", version=1):
    spans = [{"version": str(version), "start": 0, "end": len(tokens)}]
    logprobs = {"content": [{"logprob": -0.1 * token} for token in tokens]}
    return {"index": 0, "token_ids": tokens, "logprobs": logprobs, "finish_reason": reason, "weight_versions": spans}


def whole(*tokens):
    return 200, {"choices": [part(*tokens, reason="stop")]}


@pytest.fixture
def engines():
    """Makes engines that answer requests for tokens as ``answer`` says."""
    with ExitStack() as ends:

        def make(*answers):
            made = [ends.enter_context(FakeEngine("vllm")) for _ in answers]
            for engine, answer in zip(made, answers, strict=True):
                engine.answers[ROUTE] = answer
            return made

        yield make


# aborts


def test_continuation_requests_remaining_tokens_until_deadline(engines):
    answers = [{"choices": [part(1, 2)]}, {"choices": [part()]}, {"choices": [part(3, reason="stop", version=2)]}]
    (engine,) = engines(in_turn(*((200, answer) for answer in answers)))
    client = InferenceClient(engine.url, kind="vllm")
    (found,) = client.generate([[7, 8]], max_tokens=5, seed=40)
    bodies = [call.body for call in engine.calls]
    assert found.token_ids == (1, 2, 3) and found.logprobs == pytest.approx((-0.1, -0.2, -0.3))
    assert found.finish_reason == "stop" and found.token_versions() == [1, 1, 2]
    settings = [(body["sampling_params"]["max_tokens"], body["sampling_params"]["seed"]) for body in bodies]
    assert [body["token_ids"] for body in bodies] == [[7, 8], [7, 8, 1, 2], [7, 8, 1, 2]]
    assert settings == [(5, 40), (3, 42), (3, 42)]
    engine.answers[ROUTE] = (200, {"choices": [part()]})
    client = InferenceClient(engine.url, timeout_s=0.3)
    with pytest.raises(DeadlineError, match=engine.url):
        client.generate([[7, 8]])


def test_only_aborted_continuations_of_a_prompt_are_continued(engines):
    (engine,) = engines(in_turn((200, {"choices": [part(1, reason="stop"), part(2) | {"index": 1}]}), whole(3)))
    client = InferenceClient(engine.url, kind="vllm")
    first, second = client.generate([[7]], n=2, seed=40)
    assert (first.token_ids, second.token_ids) == ((1,), (2, 3))
    asked = engine.calls[-1].body
    assert (asked["token_ids"], asked["sampling_params"]["n"], asked["sampling_params"]["seed"]) == ([7, 2], 1, 42)


def test_aborted_request_with_stop_strings_restarts(engines):
    """A stop string may begin before the abort and end after it, and this client cannot read tokens."""
    (engine,) = engines(in_turn((200, {"choices": [part(1, 2)]}), whole(1, 2, 3)))
    client = InferenceClient(engine.url, kind="vllm")
    (found,) = client.generate([[7, 8]], max_tokens=5, stop=["END"])
    assert found.token_ids == (1, 2, 3)
    assert [call.body["token_ids"] for call in engine.calls] == [[7, 8], [7, 8]]


# several engines, and failures


def test_engines_share_prompts_within_cap_and_order_is_kept(engines):
    running, most, lock, all_at_once = [0, 0], [0, 0], threading.Lock(), threading.Barrier(8)

    def answering(i):
        def answer(body):
            with lock:
                running[i] += 1
                most[i] = max(most[i], running[i])
            all_at_once.wait(WAIT_S)
            with lock:
                running[i] -= 1
            return whole(body["token_ids"][0])

        return answer

    urls = [engine.url for engine in engines(answering(0), answering(1))]
    client = InferenceClient(urls, max_concurrency=4)
    found = client.generate([[i] for i in range(16)])
    assert [one.token_ids for one in found] == [(i,) for i in range(16)]
    assert most == [4, 4]


def test_an_engine_that_stands_still_is_named_by_the_deadline(engines):
    over = threading.Event()
    quick, still = engines(whole(1), lambda body: (over.wait(WAIT_S), whole(1))[1])
    client = InferenceClient([quick.url, still.url])
    with pytest.raises(DeadlineError, match=f"^{still.url} answered too late") as late:
        client.generate([[7]] * 4, timeout_s=3.0)  # the other one has answered by then
    over.set()
    assert quick.url not in late.value.what


def test_prompts_of_a_lost_engine_go_to_the_other_engine(engines):
    lost, left = engines(whole(1), whole(2))
    for _ in range(20):
        lost.inject("lose", ROUTE)
    client = InferenceClient([lost.url, left.url])
    assert [one.token_ids for one in client.generate([[7]] * 8)] == [(2,)] * 8
    for _ in range(2):  # the second time over a new connection
        left.inject("lose", ROUTE)
    with pytest.raises(EngineUnreachableError, match=f"none of 2 engines.*{lost.url}.*{left.url}"):
        client.generate([[7]])


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_engine_answering_unavailable_is_retired_temporarily(engines, status):
    busy, free = engines(in_turn((status, {"detail": "later"}), whole(2)), whole(1))
    for retire_s, then in ((60.0, (1,)), (0.0, (2,))):
        busy.calls.clear()
        busy.answers[ROUTE] = in_turn((status, {"detail": "later"}), whole(2))
        client = InferenceClient([busy.url, free.url], retire_s=retire_s)
        assert client.generate([[7]])[0].token_ids == (1,)
        assert client.generate([[7]])[0].token_ids == then


def test_persistent_client_alone_retries_until_the_deadline(engines, caplog):
    later = (503, {"detail": "nobody is behind this router"})
    (router,) = engines(in_turn(later, later, later, whole(1)))
    client = InferenceClient(router.url, persistent=True)
    assert client.generate([[7]])[0].token_ids == (1,)
    warnings = [record.getMessage() for record in caplog.records if "got no answer" in record.getMessage()]
    assert len(warnings) == 1 and router.url in warnings[0] and "nobody is behind" in warnings[0]
    router.answers[ROUTE] = later
    for settings, error in (({"persistent": True, "timeout_s": 0.3}, DeadlineError), ({}, EngineRefusedError)):
        client = InferenceClient(router.url, **settings)
        with pytest.raises(error, match="nobody"):
            client.generate([[7]])


def test_an_address_without_the_route_is_answered_with_what_to_give():
    for settings in ({"kind": "vllm"}, {}):
        with FakeEngine("sglang") as server:
            silent = () if settings else ("GET /server_info", "GET /get_server_info")
            server.answers |= dict.fromkeys(silent, (404, ""))
            client = InferenceClient(server.url, **settings)
            with pytest.raises(RouteAbsent, match="answered 404") as refused:
                client.generate([PROMPT], max_tokens=2)
            assert refused.value.status == 404 and "kind=" in refused.value.hint
            assert refused.value.expected == "an engine with the route /inference/v1/generate"


# kinds


def asked_for_kinds(engine):
    return [call.route for call in engine.calls if "info" in call.route]


def test_the_kinds_of_engines_are_asked_once_before_their_first_requests(engines):
    """By all the prompts that wait for them together, and anew by a copy; not where they were named."""
    (vllm,), said = engines(whole(1)), {"output_ids": [2], "meta_info": {"finish_reason": {"type": "stop"}}}
    with FakeEngine("sglang") as sglang:
        sglang.answers["POST /generate"] = (200, said)
        client = InferenceClient([vllm.url, sglang.url], max_concurrency=8)
        assert vllm.calls == sglang.calls == []
        for one in (client, pickle.loads(pickle.dumps(client))):
            for _ in range(2):
                assert {found.token_ids for found in one.generate([[7]] * 16)} == {(1,), (2,)}
            for engine in (vllm, sglang):
                assert asked_for_kinds(engine) == ["GET /server_info"]
                engine.calls.clear()
        named = InferenceClient([vllm.url, sglang.url], kind=["vllm", "sglang"])
        assert len(named.generate([[7]] * 8)) == 8
        assert not asked_for_kinds(vllm) and not asked_for_kinds(sglang)


def test_each_seed_has_its_request_until_a_kind_is_known(engines):
    (engine,) = engines(whole(1))
    client = InferenceClient(engine.url)
    client.generate([[7]], n=2, seed=40)
    assert sorted(call.body["sampling_params"]["seed"] for call in engine.calls if call.body) == [40, 41]
    assert {call.body["sampling_params"]["n"] for call in engine.calls if call.body} == {1}


def test_an_engine_that_another_make_has_replaced_is_asked_again(engines):
    (engine,) = engines(whole(1))
    client = InferenceClient(engine.url)
    client.generate([[7]])
    engine.answers[ROUTE] = (404, {"detail": "Not Found"})
    with pytest.raises(RouteAbsent):
        client.generate([[7]])
    engine.answers[ROUTE] = whole(2)
    assert client.generate([[7]])[0].token_ids == (2,) and len(asked_for_kinds(engine)) == 2


@pytest.mark.parametrize("lists", [True, False])
def test_what_does_not_describe_itself_gets_requests_of_vllm(engines, lists):
    """A router without the route, or vLLM outside its development mode; a router without an engine is asked again."""
    (server,) = engines(whole(1))
    rows = [{"url": "http://127.0.0.1:1"}]
    server.answers |= {"GET /workers": (200, {"workers": rows})} if lists else {}
    server.answers |= dict.fromkeys(("GET /server_info", "GET /get_server_info"), (404, {}))
    client = InferenceClient(server.url)
    assert client.generate([[7]])[0].token_ids == (1,)
    asked = len(asked_for_kinds(server))
    assert client.generate([[7]])[0].token_ids == (1,) and len(asked_for_kinds(server)) == asked


def test_a_router_without_an_engine_is_asked_for_its_kind_again(engines):
    (router,) = engines(whole(1))
    router.answers |= {"GET /workers": (200, {"workers": []}), "GET /get_server_info": (503, "no worker")}
    known, router.answers["GET /server_info"] = router.answers.get("GET /server_info"), (503, "no worker")
    client = InferenceClient(router.url)
    with pytest.raises(EngineRefusedError, match="503: no worker"):
        client.generate([[7]])
    router.answers.pop("GET /server_info") if known is None else router.answers.update({"GET /server_info": known})
    assert client.generate([[7]])[0].token_ids == (1,)


def test_the_first_error_ends_every_other_request_at_once(engines):
    over, asked = threading.Event(), itertools.count()

    def answer(body):
        if body["token_ids"] == [9]:
            return 400, {"detail": "no token 9"}
        next(asked)
        over.wait(WAIT_S)
        return whole(1)

    (engine,) = engines(answer)
    client = InferenceClient(engine.url)
    with pytest.raises(EngineRefusedError, match="no token 9"):
        client.generate([[7]] * 8 + [[9]])
    over.set()
    assert len(client.generate([[7]] * 2)) == 2


def test_addresses_that_cannot_work_are_refused():
    url = f"127.0.0.1:{free_port()}"
    for urls, words in (([], "no engine"), ([url, url], "twice")):
        with pytest.raises(ConfigError, match=words):
            InferenceClient(urls)
    with pytest.raises(ConfigError, match=r"no engine called .steam.*sglang"):
        InferenceClient(url, kind="steam")
    with pytest.raises(ConfigError, match="2 kinds for 1"):
        InferenceClient([url], kind=["vllm", "vllm"])
    with pytest.raises(EngineUnreachableError, match=url):
        InferenceClient.connect(url)


# sessions, and copies of a client


def test_each_prompt_has_its_session_and_its_cache_version(engines):
    """The session id travels in the headers of the vLLM router and of the SGLang router."""
    (router,) = engines(whole(1))
    client = InferenceClient(router.url, kind="vllm")
    client.generate([[1], [2]], session_ids=["a", None], cache_versions=[3, 4])
    client.generate([[3]])
    for name in ("session_ids", "cache_versions"):
        with pytest.raises(ConfigError, match=f"1 {name} for 2 prompts"):
            client.generate([[1], [2]], **{name: [3]})
    names = ("x-session-id", "x-smg-routing-key")
    found = {call.body["token_ids"][0]: {call.headers.get(name) for name in names} for call in router.calls}
    salts = {call.body["token_ids"][0]: call.body.get("cache_salt") for call in router.calls}
    assert found == {1: {"a"}, 2: {None}, 3: {None}} and salts == {1: "weights-3", 2: "weights-4", 3: None}


def test_a_copy_of_a_client_asks_the_same_engines(engines):
    (engine,) = engines(whole(1))
    assert len(pickle.loads(pickle.dumps(InferenceClient(engine.url))).generate([PROMPT], max_tokens=2)) == 1


def test_tokenize_and_detokenize_requests_go_to_an_engine():
    """SkyRL's client sends them to an engine that answers, since the router has no route for them."""
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
