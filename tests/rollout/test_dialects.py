"""Requests and answers, word by word, as each engine's own documentation has them."""

from torchrl_ext.rollout.dialects import SGLangDialect, VLLMDialect, dialects
from torchrl_ext.rollout.generation import Generation, GenerationRequest, VersionSpan, version_number

REQUEST = GenerationRequest(
    token_ids=(1, 2), n=2, max_tokens=3, temperature=0.5, seed=7, stop_token_ids=(9,), more={"min_tokens": 1}
)


def test_vllm_makes_all_continuations_of_a_prompt_in_one_request():
    assert VLLMDialect().body(REQUEST) == {
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
    }


def test_sglang_gets_a_batch_in_which_each_continuation_has_its_seed():
    sampling = {"max_new_tokens": 3, "temperature": 0.5, "min_new_tokens": 1, "stop_token_ids": [9]}
    assert SGLangDialect().body(REQUEST) == {
        "input_ids": [[1, 2], [1, 2]],
        "sampling_params": [sampling | {"sampling_seed": 7}, sampling | {"sampling_seed": 8}],
        "return_logprob": True,
    }


def test_sglang_answers_are_read_with_spans_and_without():
    told = {"finish_reason": {"type": "stop", "matched": 9}, "output_token_logprobs": [[-0.5, 4, None], [-1, 9, None]]}
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 2}]
    with_spans = {"output_ids": [4, 9], "meta_info": {**told, "weight_version": "3", "weight_versions": spans}}
    without = {"output_ids": [4, 9], "meta_info": {**told, "weight_version": "3"}}
    first, second = SGLangDialect().read([with_spans, without])
    assert first.token_ids == (4, 9) and first.logprobs == (-0.5, -1) and first.finish_reason == "stop"
    assert first.token_versions() == [0, 3]
    assert second.weight_versions == (VersionSpan(version="3", start=0, end=2),)
    assert SGLangDialect().read(without) == [second]


def test_a_version_without_a_number_is_unknown():
    assert [version_number(label) for label in ("12", "default", "", "main-abc")] == [12, 0, -1, -1]
    assert Generation(token_ids=(1, 2)).token_versions() == [-1, -1]


def test_each_kind_of_engine_has_a_dialect():
    assert {"embedded", "sglang", "vllm"} == set(dialects.names())
    assert dialects.load("embedded") is VLLMDialect
