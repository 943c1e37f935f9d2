"""Keys and values are reused by version: what is sent with the first and with later turns of a conversation."""

from contextlib import contextmanager

from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory

import torchrl_ext as tx
from tests.control import sockets
from tests.control.requests.inputs import TEMPLATE, prompts
from tests.models import tiny_tokenizer


@contextmanager
def serving():
    def answer(asked):
        choice = {"token_ids": [5, 6, 7], "finish_reason": "length", "logprobs": {"content": [{"logprob": -1.0}] * 3}}
        return 200, {"choices": [choice]}

    with sockets.serving(answer) as server, tx.InferenceClient(server.url) as client:
        server.client = client
        yield server


def salts(server):
    found = [body.get("cache_salt") for _, _, body in server.calls]
    server.calls.clear()
    return found


def test_conversation_keeps_the_cache_version_of_its_first_turn():
    newest, tokenizer = [3], tiny_tokenizer()
    with serving() as server:
        policy = tx.RemoteLLMPolicy(
            server.client, tokenizer=tokenizer, input_mode="history", version=lambda: newest[0], **TEMPLATE["history"]
        )
        first = policy(prompts("history", tokenizer))
        assert salts(server) == ["weights-3"] * 2
        newest[0] = 4
        turn = History.from_chats([[{"role": "user", "content": "go on"}]] * 2)
        data = first.select().set(
            "history", ChatHistory(prompt=first["history"].full.extend(turn, inplace=False, dim=1), batch_size=[2])
        )
        second = policy(data)
        assert salts(server) == ["weights-3"] * 2
        newest[0] = 5
        data = first.select().set(
            "history", ChatHistory(prompt=second["history"].full.extend(turn, inplace=False, dim=1), batch_size=[2])
        )
        policy(data)
        assert salts(server) == ["weights-3"] * 2
        policy(prompts("history", tokenizer))
        assert salts(server) == ["weights-5"] * 2
        by_text = tx.RemoteLLMPolicy(server.client, tokenizer=tokenizer, input_mode="text", version=lambda: 5)
        by_text(prompts("text", tokenizer))
        assert salts(server) == ["weights-5"] * 2
