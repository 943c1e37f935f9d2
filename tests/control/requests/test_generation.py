"""What a prompt may be, and what an aborted generation takes with it to the next engine."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.control.requests.generation import (
    Generation,
    GenerationRequest,
    VersionSpan,
    checked_prompt,
    version_number,
)

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


@pytest.mark.parametrize("prompt", [[1.0], ["a"], [[1, 2]], [True], [-1], [2**70], torch.tensor([0.5]), "text", [None]])
def test_what_is_no_list_of_token_ids_is_refused_with_its_place(prompt):
    with pytest.raises(ConfigError, match="prompt 3 is not a list of token ids"):
        checked_prompt(prompt, 3)


def test_a_version_without_a_number_is_unknown():
    assert [version_number(label) for label in ("12", "default", "", "main-abc", "9" * 5000)] == [12, 0, -1, -1, -1]
    assert Generation(token_ids=(1, 2)).token_versions() == [-1, -1]
