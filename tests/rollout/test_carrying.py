"""What an aborted generation takes with it to the next engine."""

import pytest
import torch

from torchrl_ext.compat.skyrl.completions import ChatContinuation, TextContinuation
from torchrl_ext.rollout.generation import Carried, Generation, GenerationRequest, VersionSpan, checked_prompt


def part(*tokens, reason="abort", version="1"):
    return Generation(
        token_ids=tokens,
        logprobs=tuple(-0.1 * token for token in tokens),
        finish_reason=reason,
        weight_versions=(VersionSpan(version=version, start=0, end=len(tokens)),),
    )


REQUEST = GenerationRequest(token_ids=(7, 8), max_tokens=6, seed=40, more={"min_tokens": 3, "top_p": 0.9})


def test_the_rest_is_asked_for_after_what_was_made():
    asked = Carried(request=REQUEST).extended(part(1, 2)).remaining()
    assert asked.token_ids == (7, 8, 1, 2)
    assert (asked.max_tokens, asked.seed, asked.more) == (4, 42, {"min_tokens": 1, "top_p": 0.9})


def test_tokens_log_probabilities_and_versions_are_joined():
    found = (
        Carried(request=REQUEST).extended(part(1, 2)).extended(part(3)).extended(part(4, 5, reason="stop", version="2"))
    )
    assert found.done and found.parts == 3
    assert found.made.token_ids == (1, 2, 3, 4, 5)
    assert found.made.logprobs == pytest.approx((-0.1, -0.2, -0.3, -0.4, -0.5))
    assert found.made.finish_reason == "stop"
    assert found.made.token_versions() == [1, 1, 1, 2, 2]
    assert [(span.version, span.start, span.end) for span in found.made.weight_versions] == [("1", 0, 3), ("2", 3, 5)]


def test_a_budget_that_is_used_up_ends_it_by_length():
    found = Carried(request=REQUEST).extended(part(1, 2, 3, 4, 5, 6))
    assert found.done and found.made.finish_reason == "length"


def test_an_abort_without_a_token_leaves_everything_to_ask_for():
    found = Carried(request=REQUEST).extended(Generation(token_ids=(), finish_reason="abort"))
    assert not found.done and found.remaining() == REQUEST


LETTERS = dict(enumerate("abcdefgh"))


def texts(seams):
    return ["".join(LETTERS[token] for token in ids) for _, ids in seams]


@pytest.mark.parametrize(
    ("stop", "kept"), [("cd", (0, 1, 2, 3)), (["xx", "bcde"], (0, 1, 2, 3, 4)), ("fg", (0, 1, 2, 3, 4, 5, 6))]
)
def test_a_stop_string_that_began_before_the_abort_ends_it_after(stop, kept):
    request = GenerationRequest(token_ids=(9,), max_tokens=20, more={"stop": stop})
    found = Carried(request=request).extended(part(0, 1, 2)).extended(part(3, 4, 5, 6, 7, reason="length"))
    assert found.may_straddle
    cut = found.stopped(found.seams(), texts(found.seams())).made
    assert cut.token_ids == kept and cut.finish_reason == "stop"
    assert len(cut.logprobs) == len(cut.token_versions()) == len(kept)


def test_without_such_a_stop_string_nothing_is_cut():
    request = GenerationRequest(token_ids=(9,), max_tokens=20, more={"stop": "ba"})
    found = Carried(request=request).extended(part(0, 1, 2)).extended(part(3, 4, reason="length"))
    assert found.stopped(found.seams(), texts(found.seams())) == found
    assert not Carried(request=REQUEST).extended(part(1)).extended(part(2)).may_straddle


def chat(content, reason, tokens):
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": reason}
    choice["logprobs"] = {"content": [{"token": letter, "logprob": -1.0} for letter in content]}
    return {
        "id": "1",
        "choices": [choice],
        "usage": {"prompt_tokens": 5 if tokens == 2 else 7, "completion_tokens": tokens},
    }


def test_an_aborted_chat_is_the_message_to_be_continued():
    body = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 5, "seed": 1}
    request = ChatContinuation(body)
    assert request.carries and request.body() == body
    assert request.take(chat("ab", "abort", 2)) is None
    asked = request.body()
    assert asked["messages"][-1] == {"role": "assistant", "content": "ab"}
    assert asked["continue_final_message"] and not asked["add_generation_prompt"]
    assert (asked["max_completion_tokens"], asked["seed"]) == (3, 3)
    whole = request.take(chat("cd", "stop", 2) | {"usage": {"prompt_tokens": 7, "completion_tokens": 2}})
    (choice,) = whole["choices"]
    assert choice["message"]["content"] == "abcd" and choice["finish_reason"] == "stop"
    assert [row["token"] for row in choice["logprobs"]["content"]] == list("abcd")
    assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    assert len(body["messages"]) == 1


def test_an_aborted_completion_goes_on_after_its_text_or_its_tokens():
    for prompt, rest in (("once", "once upon"), ([1, 2], [1, 2, 3])):
        request = TextContinuation({"prompt": prompt, "max_tokens": 4})
        row = {"index": 0, "text": " upon", "token_ids": [3], "finish_reason": "abort"}
        assert request.take({"choices": [row], "usage": {"completion_tokens": 1}}) is None
        assert request.body()["prompt"] == rest and request.body()["max_tokens"] == 3
        last = {"index": 0, "text": " a time", "token_ids": [4], "finish_reason": "stop"}
        (choice,) = request.take({"choices": [last], "usage": {"completion_tokens": 1}})["choices"]
        assert (choice["text"], choice["token_ids"]) == (" upon a time", [3, 4])


def test_several_choices_or_prompts_and_streams_are_not_continued():
    assert not ChatContinuation({"messages": [], "n": 2}).carries
    assert not ChatContinuation({"messages": [], "stream": True}).carries
    assert not TextContinuation({"prompt": ["a", "b"]}).carries


def test_an_aborted_thought_is_asked_for_again_from_the_start_and_charged_to_nobody():
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "seed": 1}
    for said in ({"content": None}, {"content": "so"}):  # in the middle of the thought, and after it
        for name in ("reasoning", "reasoning_content"):
            request = ChatContinuation(body)
            thought = {"role": "assistant", name: "let me see", **said}
            row = {"index": 0, "message": thought, "finish_reason": "abort"}
            assert request.take({"choices": [row], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}) is None
            assert request.body() == body
            whole = {"choices": [row | {"finish_reason": "stop"}], "usage": {"completion_tokens": 7}}
            assert request.take(whole) == whole


def test_an_answer_that_turns_out_to_call_a_tool_is_asked_for_again_whole():
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    request = ChatContinuation(body)
    assert request.take(chat("ab", "abort", 2)) is None
    call = chat("cd", "tool_calls", 2)
    call["choices"][0]["message"]["tool_calls"] = [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]
    assert request.take(call) is None
    assert request.body() == body


def test_a_message_that_the_caller_continues_is_continued_and_not_followed_by_another():
    parts = [{"type": "text", "text": "Once"}]
    for content, longer in (("Once", "Onceab"), (parts, [*parts, {"type": "text", "text": "ab"}])):
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
        body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        request = ChatContinuation(body)
        assert request.take(chat("ab", "abort", 2)) is None
        assert request.body() == {**body, "messages": [messages[0], {"role": "assistant", "content": longer}]}


def test_the_prompt_of_a_continued_answer_is_that_of_the_first_request():
    request = ChatContinuation({"messages": [], "return_token_ids": True})
    first = chat("ab", "abort", 2) | {"prompt_token_ids": [7, 8]}
    first["choices"][0]["token_ids"] = [1, 2]
    last = chat("cd", "stop", 2) | {"prompt_token_ids": [7, 8, 1, 2]}
    last["choices"][0]["token_ids"] = [3, 4]
    assert request.take(first) is None
    whole = request.take(last)
    assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == ([7, 8], [1, 2, 3, 4])
    request = TextContinuation({"prompt": [7, 8]})
    rows = ("ab", [1, 2], [7, 8], "abort"), ("cd", [3, 4], [7, 8, 1, 2], "stop")
    for text, ids, prompt, reason in rows:
        row = {"index": 0, "text": text, "token_ids": ids, "prompt_token_ids": prompt, "finish_reason": reason}
        row["logprobs"] = {"tokens": list(text), "text_offset": [0, 1]}
        whole = request.take({"choices": [row], "usage": {"prompt_tokens": len(prompt), "completion_tokens": 2}})
    (choice,) = whole["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"], choice["text"]) == ([7, 8], [1, 2, 3, 4], "abcd")
    assert choice["logprobs"] == {"tokens": list("abcd"), "text_offset": [0, 1, 2, 3]}
    assert whole["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}


def test_what_cannot_be_joined_is_asked_for_again_and_never_returned_as_it_is():
    def choice(text, reason="abort"):
        return {"index": 0, "text": text, "finish_reason": reason}

    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    for body, answer in (
        ({"prompt": "a", "n": 2}, {"choices": [choice("b", "stop"), choice("c")], "usage": usage}),
        ({"prompt": "a", "echo": True}, {"choices": [choice("ab")], "usage": usage}),
        ({"prompt": ["a", "b"]}, {"choices": [choice("b"), choice("c")], "usage": usage}),
        ({"prompt": "a"}, {"choices": [choice("b")]}),
        ({"prompt": "a"}, {"choices": [choice("b\ufffd")], "usage": usage}),
        ({"prompt": "a"}, {"choices": [choice("")], "usage": usage}),
        ({"prompt": "a"}, {"choices": [choice("b") | {"routed_experts": "AAAA"}], "usage": usage}),
    ):
        request = TextContinuation(body)
        assert request.take(answer) is None
        assert request.body() == body
        done = {"choices": [row | {"finish_reason": "stop"} for row in answer["choices"]]}
        assert request.take(done) == done


def test_a_stop_string_over_the_seam_of_two_texts_is_no_part_of_an_answer():
    body = {"prompt": "a", "stop": ["END"]}
    request = TextContinuation(body)
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    assert request.take({"choices": [{"text": "so E", "finish_reason": "abort"}], "usage": usage}) is None
    assert request.take({"choices": [{"text": "ND of it", "finish_reason": "length"}], "usage": usage}) is None
    assert request.body() == body


def test_the_tokens_of_a_prompt_on_a_device_are_read_at_once(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "__iter__", lambda self: pytest.fail("one token after the other"))
    assert checked_prompt(torch.tensor([3, 4]), 0) == (3, 4)
