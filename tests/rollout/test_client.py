"""The inference client against a real server."""

import threading

import httpx
import pytest

from tests.embedded import EmbeddedServer
from tests.models import PROMPT, greedy, tiny_checkpoint, tiny_model
from torchrl_ext.errors import ConfigError, DeadlineError, EngineRefusedError, EngineUnreachableError
from torchrl_ext.launch.processes import free_port
from torchrl_ext.rollout.client import Generation, InferenceClient, VersionSpan


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
        if httpx.get(f"{server.url}/load").json()["server_load"] == 0:
            break
        freed.wait(0.05)
    else:
        pytest.fail("the abandoned request still runs")
