"""How each kind of server is asked for log-probabilities of given tokens, and what becomes of strange answers."""

import math

import pytest

import torchrl_ext as tx
from tests.control.engines import client
from tests.fakes import FakeEngine
from torchrl_ext.base.errors import ConfigError, DeadlineError, EngineRefusedError
from torchrl_ext.control.client import NullEngine
from torchrl_ext.control.fleet import Fleet

PROMPTS = ((17, 3, 42), (5, 17))
ROUTES = {
    "vllm": "POST /inference/v1/generate",
    "sglang": "POST /generate",
    "embedded": "POST /prompt_logprobs",
}
UNKNOWN = {  # what JSON has no number for
    "vllm": {"prompt_logprobs": [None, {"3": {"logprob": None, "rank": 9}}, {"42": {"logprob": None}}]},
    "sglang": {"meta_info": {"input_token_logprobs": [[None, 17, None], [None, 3, None], [None, 42, None]]}},
    "embedded": {"logprobs": [[None, None]]},
}


@pytest.mark.parametrize("make", ROUTES)
def test_each_token_after_the_first_has_its_own_or_none(make):
    with FakeEngine(make) as fake:
        engine = client(fake)
        assert engine.logprobs(()) == [] and not fake.counts[ROUTES[make]]
        assert engine.logprobs(PROMPTS) == [[-4.0, -1.0], [-4.0]]  # a fake one says minus one less the token modulo 7
        fake.answers[ROUTES[make]] = UNKNOWN[make]
        assert all(math.isnan(one) for row in engine.logprobs(PROMPTS[:1]) for one in row)


@pytest.mark.parametrize(
    ("make", "answer"),
    [
        ("vllm", {"choices": []}),
        ("vllm", {"prompt_logprobs": None}),
        ("vllm", {"prompt_logprobs": [None, {"3": {"logprob": -1.0}}]}),
        ("vllm", {"prompt_logprobs": [None, {"3": {"logprob": -1.0}}, {"7": {"logprob": -1.0}}]}),
        ("vllm", {"prompt_logprobs": [None, None, {"42": {"logprob": -1.0}}]}),
        ("sglang", {"meta_info": {}}),
        ("sglang", {"meta_info": {"input_token_logprobs": [[None, 17, None], [-1.0, 3, None]]}}),
        ("sglang", {"meta_info": {"input_token_logprobs": [[None, 17, None], [-1.0, 3, None], [-1.0, 7, None]]}}),
        ("embedded", {}),
        ("embedded", {"logprobs": [["much"]]}),
        *((make, [1]) for make in ROUTES),
    ],
)
def test_an_answer_without_one_for_each_token_is_refused(make, answer):
    with FakeEngine(make) as fake:
        fake.answers[ROUTES[make]] = answer
        engine, words = client(fake), "without the log-probabilities of the prompt"
        with pytest.raises(EngineRefusedError, match=f"{fake.url}.*{words}") as caught:
            engine.logprobs(PROMPTS[:1])
        assert words in caught.value.rows[0].error


@pytest.mark.parametrize("make", ROUTES)
def test_a_server_that_is_paused_or_full_has_as_long_as_a_load(make):
    with FakeEngine(make) as fake:
        fake.inject("hang", ROUTES[make])
        with pytest.raises(DeadlineError, match=r"within 0\.\d+ s"):
            client(fake, load_timeout_s=0.3).logprobs(PROMPTS)


def test_a_fleet_is_asked_one_by_one_and_no_engine_not_at_all():
    engines = [tx.make_engine(make, url=f"127.0.0.1:{port}") for port, make in enumerate(ROUTES, 1)]
    fleet = Fleet(engines)
    assert fleet.each() == tuple(engines)
    assert engines[0].each() == (engines[0],)
    assert NullEngine().each() == ()
    with pytest.raises(ConfigError, match=r"fleet.*computes no log-probabilities.*each\(\)"):
        fleet.logprobs(PROMPTS)
    with FakeEngine("embedded") as fake:  # a fleet of one engine answers as it does
        assert tx.connect(fake.url).logprobs(PROMPTS) == [[-4.0, -1.0], [-4.0]]
