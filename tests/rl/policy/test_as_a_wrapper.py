"""`RemoteLLMPolicy` where a program has TorchRL's `vLLMWrapper`: the same calls, attributes, keys, kinds of errors."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, LogProbs, Masks, Text, Tokens

import torchrl_ext as tx
from tests.control.requests.inputs import TEMPLATE, prompts
from tests.models import tiny_tokenizer
from tests.processes import WAIT_S

KINDS = {"text": Text, "masks": Masks, "tokens": Tokens, "log_probs": LogProbs, "history": ChatHistory}
KEYS = {
    "history": ["text", "masks", "tokens", "log_probs", "history"],
    "text": ["text", "masks", "tokens", "log_probs"],
    "tokens": ["masks", "tokens", "log_probs"],
}


@pytest.fixture(scope="module")
def client(server):
    made = tx.InferenceClient.connect(server.url)
    yield made
    made.close()


@pytest.fixture(scope="module")
def wrapper(client):
    def make(mode="text", **settings):
        settings = {"tokenizer": tiny_tokenizer(), "input_mode": mode, **TEMPLATE[mode], **settings}
        return tx.RemoteLLMPolicy(client, **settings)

    return make


@pytest.mark.parametrize("scored", [True, False], ids=["log_probs", "no_log_probs"])
@pytest.mark.parametrize("mode", KEYS)
def test_wrapper_out_keys_follow_torchrl_order(wrapper, mode, scored):
    """The out_keys are in TorchRL's order, and the attributes return_* tell which of them are present."""
    policy = wrapper(mode, return_log_probs=scored, prefer_tokens=True)
    expected = [key for key in KEYS[mode] if scored or key != "log_probs"]
    assert policy.out_keys == expected and policy.in_keys == [(mode, "prompt")]
    told = {name: getattr(policy, f"return_{name}") for name in KINDS}
    assert told == {name: name in expected for name in KINDS}
    assert policy.prefer_tokens and policy.generate and not policy.batching
    for given in (prompts(mode, policy.tokenizer), prompts(mode, policy.tokenizer)[0]):
        size = given.batch_size
        out = policy(given)
        assert out.batch_size == size
        rows = out.unbind(0) if size else [out]
        assert all(type(row[key]) is KINDS[key] for row in rows for key in expected)
        assert not set(KEYS["history"]) & set(out.keys()) - set(expected)


def test_its_sampling_settings_are_said_under_vllms_names(wrapper):
    both = {"max_tokens": 20, "max_new_tokens": 10, "n": 2, "num_return_sequences": 1, "temperature": 0.7}
    found = wrapper(generate_kwargs=both).sampling_params
    assert (found.max_tokens, found.n, found.temperature) == (20, 2, 0.7)
    found = wrapper(generate_kwargs={"max_new_tokens": 4, "do_sample": False}).sampling_params
    assert (found.max_tokens, found.n, found.temperature) == (4, 1, 0.0)


def test_batching_is_left_to_the_server(wrapper):
    policy = wrapper()
    assert policy.get_batching_state() == {"batching_enabled": False}
    batches = [TensorDict(text=Text(prompt=["the trainer"] * size), batch_size=(size,)) for size in (1, 3, 2)]
    with ThreadPoolExecutor(3) as pool:
        found = [one.result(WAIT_S) for one in [pool.submit(policy, batch) for batch in batches]]
    assert [len(out["text"].prompt) for out in found] == [1, 3, 2]
    policy.cleanup_batching()


def test_wrapper_errors_match_torchrl_types_and_messages(wrapper):
    for settings, words in (
        ({"input_mode": "songs"}, "input_mode must be one of"),
        ({"generate": False, "return_log_probs": False}, "return_log_probs must be True"),
        ({"generate_kwargs": {"temperature": -0.1}}, "Temperature must be non-negative"),
        ({"generate_kwargs": {"top_p": 1.5}}, "top_p must be between 0 and 1"),
        ({"generate_kwargs": {"do_sample": False, "temperature": 0.7}}, "temperature must be 0"),
    ):
        with pytest.raises(ValueError, match=words):
            wrapper(**settings)
    with pytest.raises(ValueError, match="Expected 'history' key"):
        wrapper("history", input_key="history")(TensorDict(batch_size=(2,)))
    with pytest.raises(TypeError, match="Expected History object"):
        wrapper("history")(TensorDict(history=ChatHistory(prompt="no history"), batch_size=(2,)))


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "unpadded"])
def test_wrapper_accepts_one_turn_histories_and_custom_keys(wrapper, padded):
    chats = History.from_chats([[{"role": "user", "content": text}] for text in ("a version", "the engine")])
    out = wrapper("history", pad_output=padded)(
        TensorDict(history=ChatHistory(prompt=chats[:, 0], batch_size=(2,)), batch_size=(2,))
    )
    assert len(out["tokens"].get("response", as_list=True)) == 2
    given = TensorDict(mine=ChatHistory(prompt=chats), batch_size=(2,))
    out = wrapper("history", pad_output=padded, input_key=("mine", "prompt"), num_samples=2)(given)
    assert out.batch_size == (2, 2)
    assert all(isinstance(row, torch.Tensor) for row in out[0]["tokens"].get("response", as_list=True))
