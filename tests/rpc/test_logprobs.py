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


def vllm_answers(sent):
    prompt = sent["token_ids"]
    rows = [{str(token): {"logprob": VALUES[token], "rank": 9, "decoded_token": None}} for token in prompt[1:]]
    return 200, {"choices": [{"token_ids": [1]}], "prompt_logprobs": [None, *rows]}


def sglang_answers(sent):
    prompt = sent["input_ids"]
    rows = [[None, prompt[0], None], *([VALUES[token], token, None] for token in prompt[1:])]
    return 200, {"output_ids": [1], "meta_info": {"input_token_logprobs": rows}}


KINDS = {
    vllm_engine: ("POST /inference/v1/generate", vllm_answers),
    sglang_engine: ("POST /generate", sglang_answers),
    embedded_engine: (
        "POST /prompt_logprobs",
        lambda sent: (200, {"logprobs": [[VALUES[token] for token in prompt[1:]] for prompt in sent["prompts"]]}),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_after_the_first_has_its_own(kind):
    call, answers = KINDS[kind]
    with running({call: answers}) as server:
        assert kind(server.url).logprobs(PROMPTS) == [[-7.25, -0.125], [-1.5]]
        assert set(server.routes()) == {call}


@pytest.mark.parametrize("kind", KINDS)
def test_without_prompts_nobody_is_asked(kind):
    with running({}) as server:
        assert kind(server.url).logprobs(()) == []
        assert not server.calls


def test_vllm_is_asked_by_tokens_for_the_prompts_own_and_past_its_cache():
    with running({"POST /inference/v1/generate": vllm_answers}) as server:
        vllm_engine(server.url).logprobs(PROMPTS[:1])
        ((_, _, sent),) = server.calls
    sampling = {"prompt_logprobs": 0, "skip_reading_prefix_cache": True, "max_tokens": 1, "temperature": 1.0}
    assert sent == {"token_ids": [17, 3, 42], "sampling_params": sampling}


def test_sglang_is_asked_by_tokens_from_the_first_one_on():
    with running({"POST /generate": sglang_answers}) as server:
        sglang_engine(server.url).logprobs(PROMPTS[:1])
        ((_, _, sent),) = server.calls
    assert sent == {
        "input_ids": [17, 3, 42],
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        (vllm_engine, {"choices": []}),
        (vllm_engine, {"prompt_logprobs": None}),
        (vllm_engine, {"prompt_logprobs": [None, {"3": {"logprob": -1.0}}]}),
        (vllm_engine, {"prompt_logprobs": [None, {"3": {"logprob": -1.0}}, {"7": {"logprob": -1.0}}]}),
        (vllm_engine, {"prompt_logprobs": [None, None, {"42": {"logprob": -1.0}}]}),
        (vllm_engine, [1]),
        (sglang_engine, {"meta_info": {}}),
        (sglang_engine, {"meta_info": {"input_token_logprobs": [[None, 17, None], [-1.0, 3, None]]}}),
        (sglang_engine, {"meta_info": {"input_token_logprobs": [[None, 17, None], [-1.0, 3, None], [-1.0, 7, None]]}}),
        (sglang_engine, [1]),
        (embedded_engine, {}),
        (embedded_engine, {"logprobs": [["much"]]}),
        (embedded_engine, [1]),
    ],
)
def test_an_answer_without_one_for_each_token_is_refused(kind, answer):
    with running({KINDS[kind][0]: (200, answer)}) as server:
        engine = kind(server.url)
        with pytest.raises(EngineRefusedError, match=r"without the log-probabilities of the prompt") as told:
            engine.logprobs(PROMPTS[:1])
        assert server.url in str(told.value)


@pytest.mark.parametrize("kind", KINDS)
def test_what_json_has_no_number_for_is_none(kind):
    def silent(sent):
        status, answer = answers(sent)
        rows = answer.get("prompt_logprobs", [None, {}])
        for row in rows[1].values():
            row["logprob"] = None
        for row in answer.get("meta_info", {}).get("input_token_logprobs", ()):
            row[0] = None
        return status, {**answer, "logprobs": [[None]]}

    call, answers = KINDS[kind]
    with running({call: silent}) as server:
        ((found,),) = kind(server.url).logprobs([(3, 17)])
        assert math.isnan(found)


@pytest.mark.parametrize("kind", [vllm_engine, sglang_engine])
def test_a_server_that_refuses_says_so_in_its_row(kind):
    with running({KINDS[kind][0]: (400, {"error": {"message": "the prompt is too long"}})}) as server:
        engine = kind(server.url)
        with pytest.raises(EngineRefusedError, match=r"the prompt is too long; .* did not compute log-probabilities"):
            engine.logprobs(PROMPTS)
        assert "the prompt is too long" in engine.rows()[0].error


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_is_paused_or_full_has_as_long_as_a_load(kind):
    with running({KINDS[kind][0]: lambda sent: Event().wait(2.0) or (200, {})}) as server:
        engine = kind(server.url, load_timeout_s=0.3)
        with pytest.raises(DeadlineError, match=r"within 0\.\d+ s"):
            engine.logprobs(PROMPTS)


def test_a_fleet_is_asked_one_by_one_and_no_engine_not_at_all():
    engines = [vllm_engine("http://127.0.0.1:1"), sglang_engine("http://127.0.0.1:2")]
    fleet = Pool(engines)
    assert fleet.each() == tuple(engines)
    assert engines[0].each() == (engines[0],)
    assert NullEngine().each() == ()
    with pytest.raises(ConfigError, match=r"fleet.*computes no log-probabilities.*each\(\)"):
        fleet.logprobs(PROMPTS)
