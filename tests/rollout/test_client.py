"""The inference client against a real server, and against one that says what a test wants."""

import pickle
import threading

import httpx
import pytest

from tests.embedded import EmbeddedServer
from tests.models import PROMPT, greedy, tiny_checkpoint, tiny_model
from tests.processes import WAIT_S
from tests.rollout.aborts import aborted
from tests.rpc.servers import running
from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, EngineRefusedError, EngineUnreachableError
from torchrl_ext.rollout.client import Generation, InferenceClient, VersionSpan
from torchrl_ext.serving.processes import free_port


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with EmbeddedServer(tiny_checkpoint(tmp_path_factory.mktemp("model")), dtype="float32", threads=1) as running:
        yield running


@pytest.fixture
def client(server):
    made = InferenceClient(server.url)
    yield made
    made.close()


def test_generations_come_in_the_order_of_their_prompts(client):
    prompts = [PROMPT[:length] for length in (8, 2, 5, 1)]
    found = client.generate(prompts, n=2, max_tokens=12, temperature=0.0, ignore_eos=True)
    own = tiny_model(0)
    expected = [tuple(greedy(own, prompt, 12)) for prompt in prompts for _ in range(2)]
    assert [one.token_ids for one in found] == expected


def test_a_generation_has_log_probabilities_a_reason_and_the_weights_behind_it(client):
    (found,) = client.generate([PROMPT], max_tokens=6, ignore_eos=True, seed=1)
    assert isinstance(found, Generation)
    assert len(found.token_ids) == len(found.logprobs) == 6 and max(found.logprobs) <= 0
    assert found.finish_reason == "length"
    assert found.weight_versions == (VersionSpan(version="default", start=0, end=6),)


def test_log_probabilities_can_be_left_out(client):
    (found,) = client.generate([PROMPT], max_tokens=3, logprobs=False, ignore_eos=True)
    assert found.logprobs == () and len(found.token_ids) == 3


def test_the_number_of_log_probabilities_is_that_of_vllm_where_0_means_the_sampled_token(client):
    for asked, count in ((0, 3), (1, 3), (True, 3), (False, 0), (None, 0)):
        (found,) = client.generate([PROMPT], max_tokens=3, logprobs=asked, ignore_eos=True)
        assert len(found.logprobs) == count


def test_what_an_engine_aborts_is_continued_and_never_taken_for_an_answer(server, client):
    settings = {"max_tokens": 100, "ignore_eos": True}
    prompts = [PROMPT, PROMPT[:3]]
    found = aborted(server.url, lambda: client.generate(prompts, temperature=0.0, **settings))
    assert [one.token_ids for one in found] == [tuple(greedy(tiny_model(0), prompt, 100)) for prompt in prompts]
    assert {one.finish_reason for one in found} == {"length"}
    drawn = aborted(server.url, lambda: client.generate(prompts, n=3, seed=4, **settings))
    assert [len(one.token_ids) for one in drawn] == [100] * 6
    assert len({one.token_ids for one in drawn}) == 6


def part(*tokens, reason="abort", version=1):
    spans = [{"version": str(version), "start": 0, "end": len(tokens)}]
    logprobs = {"content": [{"logprob": -0.1 * token} for token in tokens]}
    return {"index": 0, "token_ids": tokens, "logprobs": logprobs, "finish_reason": reason, "weight_versions": spans}


def test_a_continuation_takes_along_tokens_log_probabilities_versions_and_the_budget():
    answers = [{"choices": [part(1, 2)]}, {"choices": [part()]}, {"choices": [part(3, reason="stop", version=2)]}]
    with running({}) as engine:
        engine.answers["POST /inference/v1/generate"] = [(200, answer) for answer in answers]
        client = InferenceClient(engine.url)
        (found,) = client.generate([[7, 8]], max_tokens=5, seed=40)
        client.close()
    assert found.token_ids == (1, 2, 3) and found.logprobs == pytest.approx((-0.1, -0.2, -0.3))
    assert found.finish_reason == "stop" and found.token_versions() == [1, 1, 2]
    asked = [body for _, _, body in engine.calls]
    assert [body["token_ids"] for body in asked] == [[7, 8], [7, 8, 1, 2], [7, 8, 1, 2]]
    assert [body["sampling_params"]["max_tokens"] for body in asked] == [5, 3, 3]
    assert [body["sampling_params"]["seed"] for body in asked] == [40, 42, 42]


def test_an_aborted_request_with_stop_strings_is_asked_again_from_the_start():
    """A stop string may begin before the abort and end after it, and this client cannot read tokens."""
    with running({}) as engine:
        answers = [{"choices": [part(1, 2)]}, {"choices": [part(1, 2, 3, reason="stop")]}]
        engine.answers["POST /inference/v1/generate"] = [(200, answer) for answer in answers]
        client = InferenceClient(engine.url)
        (found,) = client.generate([[7, 8]], max_tokens=5, stop=["END"])
        client.close()
    assert found.token_ids == (1, 2, 3)
    assert [body["token_ids"] for _, _, body in engine.calls] == [[7, 8], [7, 8]]


def test_an_engine_that_aborts_for_ever_is_a_deadline_that_says_so():
    with running({}) as engine:
        engine.answers["POST /inference/v1/generate"] = (200, {"choices": [part()]})
        client = InferenceClient(engine.url, timeout_s=0.5)
        with pytest.raises(DeadlineError, match=f"{engine.url}.*"):
            client.generate([[7, 8]])
        client.close()


def test_an_engine_that_has_too_much_to_do_is_left_to_others():
    with running({}) as busy, running({}) as free:
        busy.answers["POST /inference/v1/generate"] = (429, {"detail": "later"})
        free.answers["POST /inference/v1/generate"] = (200, {"choices": [part(1, reason="stop")]})
        client = InferenceClient([busy.url, free.url])
        assert client.generate([[7]])[0].token_ids == (1,)
        client.close()


def test_a_seed_repeats_a_batch_and_differs_within_it(client):
    first, again = (client.generate([PROMPT, PROMPT], n=3, max_tokens=12, seed=7) for _ in range(2))
    assert [one.token_ids for one in first] == [one.token_ids for one in again]
    assert len({one.token_ids for one in first}) == 6
    other = client.generate([PROMPT, PROMPT], n=3, max_tokens=12, seed=8_000)
    assert {one.token_ids for one in other}.isdisjoint(one.token_ids for one in first)


def test_a_stop_token_ends_a_generation(client):
    stop = greedy(tiny_model(0), PROMPT, 3)[-1]
    (found,) = client.generate([PROMPT], max_tokens=12, temperature=0.0, stop_token_ids=[stop])
    assert found.finish_reason == "stop" and found.token_ids[-1] == stop


def test_more_prompts_than_connections_are_all_answered(server):
    client = InferenceClient(server.url, max_concurrency=3)
    assert len(client.generate([PROMPT] * 20, max_tokens=4)) == 20


def test_no_prompt_gives_no_generation(client):
    assert client.generate([]) == []


def test_an_empty_prompt_is_refused_before_anything_is_sent(client):
    with pytest.raises(ConfigError, match="prompt 1"):
        client.generate([PROMPT, []])


def test_a_paused_engine_is_a_deadline_that_names_it(server, client):
    httpx.post(f"{server.url}/pause", params={"mode": "keep"})
    try:
        with pytest.raises(DeadlineError, match=server.url):
            client.generate([PROMPT], max_tokens=4, timeout_s=0.5)
    finally:
        httpx.post(f"{server.url}/resume")
    assert len(client.generate([PROMPT], max_tokens=4)) == 1


def test_what_an_engine_refuses_comes_back_in_its_words(client):
    with pytest.raises(EngineRefusedError, match="no token 99999"):
        client.generate([PROMPT, [99_999]], max_tokens=4)


def test_nobody_at_the_address_is_said_so():
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineUnreachableError, match=url):
        InferenceClient(url).generate([PROMPT])


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
        assert len(set(threading.enumerate()) - before) <= 1  # the client's own
    finally:
        httpx.post(f"{server.url}/resume")
    assert len(client.generate([PROMPT] * 2, max_tokens=4)) == 2
    client.close()
    assert set(threading.enumerate()) <= before


def test_closing_ends_what_is_in_work_and_a_later_call_opens_anew():
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

    with running({}) as engine:
        engine.answers["POST /inference/v1/generate"] = slow
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
