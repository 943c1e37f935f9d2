"""How each kind of server is asked for log-probabilities of given tokens, and what becomes of strange answers."""

import math
from threading import Event

import pytest

from tests.rpc.servers import running
from torchrl_ext.errors import ConfigError, DeadlineError, EngineRefusedError
from torchrl_ext.rpc.client import NullEngine
from torchrl_ext.rpc.makes.sglang import sglang_engine
from torchrl_ext.rpc.makes.vllm import embedded_engine, vllm_engine
from torchrl_ext.rpc.pool import Pool

PROMPTS = ((17, 3, 42), (5, 17))
VALUES = {17: -1.5, 3: -7.25, 42: -0.125, 5: -3.0}
NONE = dict.fromkeys(VALUES)
SAMPLING = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "skip_reading_prefix_cache": True}


def vllm(prompt, values):
    return {"prompt_logprobs": [None, *({str(one): {"logprob": values[one], "rank": 9}} for one in prompt[1:])]}


def sglang(prompt, values):
    rows = [[None, prompt[0], None], *([values[one], one, None] for one in prompt[1:])]
    return {"output_ids": [1], "meta_info": {"input_token_logprobs": rows}}


def embedded(prompt, values):
    return {"logprobs": [[values[one] for one in prompt[1:]]]}


KINDS = {  # the route, the body for tokens, the tokens in a body, and an answer
    vllm_engine: (
        "POST /inference/v1/generate",
        lambda prompt: {"token_ids": prompt, "sampling_params": SAMPLING},
        lambda body: body["token_ids"],
        vllm,
    ),
    sglang_engine: (
        "POST /generate",
        lambda prompt: {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        },
        lambda body: body["input_ids"],
        sglang,
    ),
    embedded_engine: (
        "POST /prompt_logprobs",
        lambda prompt: {"prompts": [prompt]},
        lambda body: body["prompts"][0],
        embedded,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_after_the_first_has_its_own_or_none(kind):
    route, asked, tokens, answer = KINDS[kind]
    with running({route: lambda body: (200, answer(tokens(body), VALUES))}) as server:
        engine = kind(server.url)
        assert engine.logprobs(()) == [] and not server.calls
        assert engine.logprobs(PROMPTS) == [[-7.25, -0.125], [-1.5]]
        assert server.calls == [(route, {}, asked(list(prompt))) for prompt in PROMPTS]
        server.answers[route] = lambda body: (200, answer(tokens(body), NONE))  # what JSON has no number for
        assert all(math.isnan(one) for row in engine.logprobs(PROMPTS) for one in row)


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        (vllm_engine, {"choices": []}),
        (vllm_engine, {"prompt_logprobs": None}),
        (vllm_engine, {"prompt_logprobs": [None, {"3": {"logprob": -1.0}}]}),
        (vllm_engine, {"prompt_logprobs": [None, {"3": {"logprob": -1.0}}, {"7": {"logprob": -1.0}}]}),
        (vllm_engine, {"prompt_logprobs": [None, None, {"42": {"logprob": -1.0}}]}),
        (sglang_engine, {"meta_info": {}}),
        (sglang_engine, {"meta_info": {"input_token_logprobs": [[None, 17, None], [-1.0, 3, None]]}}),
        (sglang_engine, {"meta_info": {"input_token_logprobs": [[None, 17, None], [-1.0, 3, None], [-1.0, 7, None]]}}),
        (embedded_engine, {}),
        (embedded_engine, {"logprobs": [["much"]]}),
        *((kind, [1]) for kind in KINDS),
    ],
)
def test_an_answer_without_one_for_each_token_is_refused(kind, answer):
    refused = pytest.raises(EngineRefusedError, match=r"127\.0.*without the log-probabilities of the prompt")
    with running({KINDS[kind][0]: (200, answer)}) as server, refused:
        kind(server.url).logprobs(PROMPTS[:1])


def test_a_server_that_refuses_says_so_in_its_row():
    with running({"POST /generate": (400, {"error": {"message": "the prompt is too long"}})}) as server:
        engine = sglang_engine(server.url)
        with pytest.raises(EngineRefusedError, match=r"the prompt is too long; .* did not compute log-probabilities"):
            engine.logprobs(PROMPTS)
        assert "the prompt is too long" in engine.rows()[0].error


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_is_paused_or_full_has_as_long_as_a_load(kind):
    late = pytest.raises(DeadlineError, match=r"within 0\.\d+ s")
    with running({KINDS[kind][0]: lambda sent: Event().wait(2.0) or (200, {})}) as server, late:
        kind(server.url, load_timeout_s=0.3).logprobs(PROMPTS)


def test_a_fleet_is_asked_one_by_one_and_no_engine_not_at_all():
    engines = [vllm_engine("http://127.0.0.1:1"), sglang_engine("http://127.0.0.1:2")]
    fleet = Pool(engines)
    assert fleet.each() == tuple(engines)
    assert engines[0].each() == (engines[0],)
    assert NullEngine().each() == ()
    with pytest.raises(ConfigError, match=r"fleet.*computes no log-probabilities.*each\(\)"):
        fleet.logprobs(PROMPTS)
