"""`RemoteLLMPolicy` against a real server, key by key beside TorchRL's own wrapper on the same model."""

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import Tokens

import torchrl_ext as tx
from tests.control import sockets
from tests.control.requests.inputs import TEMPLATE, leaves, prompts
from tests.models import tiny_model, tiny_tokenizer
from torchrl_ext.base.errors import ConfigError
from torchrl_ext.rl.policy import RemoteLLMPolicy
from torchrl_ext.rl.versions import TokenVersions

GREEDY = {"max_new_tokens": 6, "do_sample": False}
OURS = {("token_versions", "response"), ("token_versions", "full"), "response_truncated"}
MORE = {("log_probs", "full"), ("masks", "all_assistant_mask")}  # of TorchRL's wrappers only vLLM's gives them


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def remote(server, tokenizer, mode="tokens", **settings):
    settings = {"generate_kwargs": GREEDY, **TEMPLATE[mode], **settings}
    return tx.RemoteLLMPolicy(server.url, tokenizer=tokenizer, input_mode=mode, **settings)


@pytest.mark.parametrize("samples", [None, 2])
@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_entries_equal_those_of_torchrls_wrapper(server, tokenizer, mode, samples):
    settings = {"tokenizer": tokenizer, "input_mode": mode, "num_samples": samples, **TEMPLATE[mode]}
    if samples is None:
        settings["generate_kwargs"] = GREEDY
    else:
        settings["generate_kwargs"] = {"max_new_tokens": 6, "do_sample": True, "temperature": 1.0}
    theirs = TransformersWrapper(tiny_model(0), **settings)(prompts(mode, tokenizer))
    given = prompts(mode, tokenizer)
    policy = tx.RemoteLLMPolicy(server.url, run="first", **settings)
    ours = policy(given)
    assert (ours is given) == (samples is None)
    assert type(ours) is type(theirs) and ours.batch_size == theirs.batch_size
    assert set(ours.keys()) == set(theirs.keys()) | {"token_versions", "response_truncated"} == set(policy.out_keys)
    expected, found = leaves(theirs), leaves(ours)
    assert set(found) == set(expected) | OURS | MORE
    for key, rows in expected.items():
        for mine, wanted in zip(found[key], rows, strict=True):
            assert mine.dtype == wanted.dtype
            if key == ("tokens", "prompt") or (samples is None and key != ("log_probs", "response")):
                assert torch.equal(mine, wanted), key
            elif samples is None:  # TransformersWrapper says 0 for the first token
                torch.testing.assert_close(mine[1:], wanted[1:], atol=1e-4, rtol=0)
    for name in ("tokens", "masks", "log_probs"):
        assert type(ours.get(name)) is type(theirs.get(name))
    if mode != "tokens" and samples is None:
        assert [row["text"].full for row in ours.unbind(0)] == [row["text"].full for row in theirs.unbind(0)]
    for row in ours.reshape(-1).unbind(0):
        versions, said = row["token_versions"], row["masks", "all_assistant_mask"]
        assert isinstance(versions, TokenVersions) and versions.run == "first"
        assert versions.full.shape == row["tokens", "full"].shape and (said == (versions.full == 0)).all()
        assert (versions.full[~said] == -1).all() and row["log_probs", "full"].isnan().equal(~said)


def test_only_padding_on_the_left_is_dropped(tokenizer):
    """Where the token that ends a turn pads, too, it stays within a prompt and at its end."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = None
    end = tokenizer.eos_token_id
    policy = RemoteLLMPolicy(tx.InferenceClient("127.0.0.1:9"), tokenizer=tokenizer, input_mode="tokens")
    rows = [[end, end, 5, 6, end, 7], [5, end, end, 7, 8], [5, 6, end], [end] * 5]
    given = lazy_stack([TensorDict({"tokens": {"prompt": torch.tensor(row)}}) for row in rows])
    assert [ids.tolist() for ids in policy._prompts(given).tokens] == [[5, 6, end, 7], *rows[1:3], []]
    masks = [torch.tensor([False] + [True] * (len(row) - 1)) for row in rows]
    for row, mask in zip(given.unbind(0), masks, strict=True):
        row["masks", "all_attention_mask"] = mask
    assert [ids.tolist() for ids in policy._prompts(given).tokens] == [row[1:] for row in rows]


def test_padded_prompts_are_answered_like_ragged_ones(server, tokenizer):
    policy = remote(server, tokenizer)
    ragged, padded = (policy(prompts("tokens", tokenizer, padded=wide)) for wide in (False, True))
    for key, rows in leaves(ragged).items():
        torch.testing.assert_close(leaves(padded)[key], rows, equal_nan=True)


def test_a_stop_token_ends_the_response_not_the_message(server, tokenizer):
    found = remote(server, tokenizer, "history")(prompts("history", tokenizer))
    assert found["response_truncated"].tolist() == [True, True]
    settings = {**GREEDY, "stop_token_ids": [found[0]["tokens", "response"][3].item()]}
    out = remote(server, tokenizer, "history", generate_kwargs=settings)(prompts("history", tokenizer))[0]
    response = out["tokens", "response"]
    assert out["text"].response == tokenizer.decode(response) and not out["response_truncated"]
    assert out["history"].response[0].content == tokenizer.decode(response[:-1])


@pytest.mark.parametrize("shape", [(), (2, 1), (1, 2)])
def test_any_batch_size_is_answered_in_its_own_shape(server, tokenizer, shape):
    flat = prompts("text", tokenizer)
    given = flat[0] if shape == () else flat.reshape(*shape)
    out = remote(server, tokenizer, "text")(given)
    assert out.batch_size == shape
    assert len(leaves(out)["tokens", "response"]) == given.numel()


def test_a_seed_repeats_the_life_of_a_policy(server, tokenizer):
    """Also in another process, which a pickled policy reaches with its settings."""
    policy = remote(server, tokenizer, generate_kwargs={"max_new_tokens": 8, "ignore_eos": True}, seed=5, run="first")
    lives = []
    for life in (policy, pickle.loads(pickle.dumps(policy))):
        lives.append([life(prompts("tokens", tokenizer))[0] for _ in range(2)])
    (first, second), again = ([row["tokens", "response"].tolist() for row in life] for life in lives)
    assert [first, second] == again and first != second
    assert lives[1][0]["token_versions"].run == "first"
    assert life(prompts("tokens", tokenizer), max_tokens=2)[0]["tokens", "response"].numel() == 2


def test_each_token_carries_the_version_that_sampled_it():
    """Also where an update lands in the middle of a response, and where the engine names no version."""
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 3}]
    choice = {"token_ids": [5, 6, 7, 8], "finish_reason": "length", "weight_versions": spans}
    choice["logprobs"] = {"content": [{"logprob": -1.0}] * 4}
    given = TensorDict({"tokens": Tokens(prompt=torch.tensor([[1, 2]]), batch_size=1)}, batch_size=1)
    with sockets.serving(lambda asked: (200, {"choices": [choice]})) as server:
        client = tx.InferenceClient(server.url, kind="embedded")
        (row,) = tx.RemoteLLMPolicy(client, input_mode="tokens")(given).unbind(0)
    assert row["token_versions", "response"].tolist() == [0, 7, 7, -1]
    assert row["token_versions", "full"].tolist() == [-1, -1, 0, 7, 7, -1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"input_mode": "songs"}, "input_mode must be one of"),
        ({"input_mode": "text", "tokenizer": None}, "needs a tokenizer"),
        ({"generate_kwargs": {"stop_sequences": ["."]}}, "stop_token_ids"),
        ({"generate_kwargs": {"n": 3}}, "num_samples="),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(tokenizer, settings, words):
    client = tx.InferenceClient("127.0.0.1:9")
    with pytest.raises(ConfigError, match=words):
        tx.RemoteLLMPolicy(client, **{"tokenizer": tokenizer, "input_mode": "tokens", **settings})


def test_an_input_without_prompts_is_answered_with_its_keys(server, tokenizer):
    with pytest.raises(ConfigError, match=r"no \('tokens', 'prompt'\).*query"):
        remote(server, tokenizer)(TensorDict({"query": torch.zeros(1)}, batch_size=[1]))
    with pytest.raises(ConfigError, match=r"has a NonTensorData.*History"):
        remote(server, tokenizer, "history")(TensorDict(history={"prompt": "no history"}, batch_size=[2]))
