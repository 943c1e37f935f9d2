"""Keys and values are reused by version: what is sent with the first and with later turns of a conversation."""

from tensordict import set_list_to_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory

import torchrl_ext as tx
from tests.control import sockets
from tests.control.requests.inputs import TEMPLATE, prompts
from tests.models import tiny_tokenizer


def answer(asked):
    choice = {"token_ids": [5, 6, 7], "finish_reason": "length", "logprobs": {"content": [{"logprob": -1.0}] * 3}}
    return 200, {"choices": [choice]}


def test_conversation_keeps_the_cache_version_of_its_first_turn():
    newest, tokenizer = [3], tiny_tokenizer()
    turn = History.from_chats([[{"role": "user", "content": "go on"}]] * 2)

    def policy(mode):
        settings = {"tokenizer": tokenizer, "input_mode": mode, "version": lambda: newest[0], **TEMPLATE[mode]}
        return tx.RemoteLLMPolicy(client, **settings)

    def salts(policy, data):
        """What a policy sends with a turn, and what it returns."""
        data = policy(data)
        found = [body.get("cache_salt") for _, _, body in server.calls]
        server.calls.clear()
        return found, data

    with set_list_to_stack(True), sockets.serving(answer) as server:
        client = tx.InferenceClient(server.url, kind="vllm")
        chatting = policy("history")
        found, data = salts(chatting, prompts("history", tokenizer))
        assert found == ["weights-3"] * 2
        for newest[0] in (4, 5):
            longer = data["history"].full.extend(turn, inplace=False, dim=1)
            found, data = salts(chatting, data.select().set("history", ChatHistory(prompt=longer, batch_size=[2])))
            assert found == ["weights-3"] * 2
        assert salts(chatting, prompts("history", tokenizer))[0] == ["weights-5"] * 2
        assert salts(policy("text"), prompts("text", tokenizer))[0] == ["weights-5"] * 2
