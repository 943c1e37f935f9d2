"""Requests and answers, word by word, as each engine's own documentation has them, and what follows an abort."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import FakeEngine
from torchrl_ext.base.errors import ConfigError
from torchrl_ext.control.requests.client import InferenceClient
from torchrl_ext.control.requests.dialects import SGLangDialect, VLLMDialect
from torchrl_ext.control.requests.generation import (
    Generation,
    GenerationRequest,
    VersionSpan,
    checked_prompt,
    version_number,
)

REQUEST = GenerationRequest(
    token_ids=(1, 2),
    n=2,
    max_tokens=3,
    temperature=0.5,
    seed=7,
    stop_token_ids=(9,),
    more={"min_tokens": 1},
    adapter="policy",
    cache_key="weights-3",
)


def test_vllm_makes_all_continuations_of_a_prompt_in_one_request():
    assert VLLMDialect.ask(REQUEST) == {
        "token_ids": [1, 2],
        "sampling_params": {
            "n": 2,
            "max_tokens": 3,
            "temperature": 0.5,
            "min_tokens": 1,
            "logprobs": 0,
            "stop_token_ids": [9],
            "seed": 7,
        },
        "model": "policy",
        "cache_salt": "weights-3",
    }


def test_sglang_gets_one_prompt_and_one_map_of_settings():
    sampling = {"max_new_tokens": 3, "temperature": 0.5, "min_new_tokens": 1, "stop_token_ids": [9]}
    assert SGLangDialect.ask(REQUEST) == {
        "input_ids": [1, 2],
        "sampling_params": sampling | {"sampling_seed": 7, "n": 2},
        "return_logprob": True,
        "lora_path": "policy",
        "extra_key": "weights-3",
    }
    assert SGLangDialect.one_seed_per_request and not VLLMDialect.one_seed_per_request
    assert [SGLangDialect.ask(one)["sampling_params"] for one in REQUEST.split()] == [
        sampling | {"sampling_seed": 7},
        sampling | {"sampling_seed": 8},
    ]


def test_sglang_gets_a_request_for_each_seed():
    def answer(body):
        seed, count = body["sampling_params"].get("sampling_seed", -1), body["sampling_params"].get("n", 1)
        told = {"finish_reason": {"type": "length"}, "weight_version": "1"}
        rows = [{"output_ids": [seed, j], "meta_info": told} for j in range(count)]
        return 200, rows[0] if count == 1 else rows

    with FakeEngine("sglang") as engine:
        client = InferenceClient(engine.url, kind="sglang")
        engine.answers["POST /generate"] = answer
        seeded = client.generate([[1], [2]], n=2, seed=5, max_tokens=2)
        drawn = client.generate([[1], [2]], n=2, max_tokens=2)
    assert [one.token_ids for one in seeded] == [(5, 0), (6, 0), (7, 0), (8, 0)]
    assert [one.token_ids for one in drawn] == [(-1, 0), (-1, 1)] * 2


def test_versions_are_read_from_spans_or_one_label():
    told = {"finish_reason": {"type": "stop", "matched": 9}, "output_token_logprobs": [[-0.5, 4, None], [-1, 9, None]]}
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 2}]
    with_spans = {"output_ids": [4, 9], "meta_info": {**told, "weight_version": "3", "weight_versions": spans}}
    without = {"output_ids": [4, 9], "meta_info": {**told, "weight_version": "3"}}
    first, second = SGLangDialect.read([with_spans, without])
    assert first.token_ids == (4, 9) and first.logprobs == (-0.5, -1) and first.finish_reason == "stop"
    assert first.token_versions() == [0, 3]
    assert second.weight_versions == (VersionSpan(version="3", start=0, end=2),)
    assert SGLangDialect.read(without) == [second]


# prompts, and generations that were aborted

TOKENS = st.lists(st.integers(0, 7), max_size=4)


def part(tokens, reason="abort", version=1):
    spans = (VersionSpan(version=str(version), start=0, end=len(tokens)),)
    logprobs = tuple(-0.1 * token for token in tokens)
    return Generation(token_ids=tuple(tokens), logprobs=logprobs, finish_reason=reason, weight_versions=spans)


def joined(*parts, budget):
    so_far = Generation(token_ids=(), finish_reason="abort")
    for one in parts:
        so_far = so_far.extended(one, budget)
    return so_far


@given(parts=st.lists(st.tuples(TOKENS, st.integers(1, 3)), max_size=5), last=TOKENS, seed=st.none() | st.just(40))
def test_parts_are_joined_and_the_rest_is_asked_for_after_them(parts, last, seed):
    request = GenerationRequest(token_ids=(7, 8), max_tokens=40, seed=seed, more={"min_tokens": 3, "top_p": 0.9})
    so_far = joined(*(part(tokens, version=version) for tokens, version in parts), budget=40)
    made = [token for tokens, _ in parts for token in tokens]
    rest = request.after(so_far)
    assert so_far.finish_reason == "abort" and rest.token_ids == (7, 8, *made) and rest.max_tokens == 40 - len(made)
    assert rest.more == {"min_tokens": max(0, 3 - len(made)), "top_p": 0.9}
    assert rest.seed == (None if seed is None else seed + len(made))  # else it would repeat the first draws
    whole = so_far.extended(part(last, reason="stop", version=9), 40)
    versions = [version for tokens, version in parts for _ in tokens] + [9] * len(last)
    assert whole.finish_reason == "stop" and whole.token_ids == (*made, *last) and whole.token_versions() == versions
    assert whole.logprobs == tuple(-0.1 * token for token in (*made, *last))
    spans = whole.weight_versions
    assert all(one.end == two.start and one.version != two.version for one, two in itertools.pairwise(spans))


def test_a_budget_that_is_used_up_ends_it_by_length():
    assert joined(part([1]), part([2, 3]), budget=3).finish_reason == "length"


@pytest.mark.parametrize(
    "prompt", [[1.0], ["a"], [[1, 2]], [True], [-1], [2**70], torch.tensor([0.5]), "text", [None], []]
)
def test_what_is_no_list_of_token_ids_is_refused_with_its_place(prompt):
    with pytest.raises(ConfigError, match=r"prompt 3 (is not a list of token ids|has no token)"):
        checked_prompt(prompt, 3)


def test_a_version_without_a_number_is_unknown():
    assert [version_number(label) for label in ("12", "default", "", "main-abc", "9" * 5000)] == [12, 0, -1, -1, -1]
    assert Generation(token_ids=(1, 2)).token_versions() == [-1, -1]
