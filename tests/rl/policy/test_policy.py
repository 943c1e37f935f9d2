"""`RemoteLLMPolicy` against a real server, key by key beside TorchRL's own wrapper on the same model."""

import copy
import pickle
import threading

import httpx
import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack
from torchrl.modules.llm import TransformersWrapper

import torchrl_ext as tx
from tests.control.requests.inputs import PROMPTS, TEMPLATE, leaves, prompts
from tests.engines.embedded import EmbeddedServer
from tests.models import tiny_checkpoint, tiny_model, tiny_tokenizer
from tests.processes import WAIT_S
from torchrl_ext.base.errors import ConfigError
from torchrl_ext.rl.policy.records import read_prompts
from torchrl_ext.rl.policy.settings import WrapperSettings

GREEDY = {"max_new_tokens": 6, "do_sample": False}
MODES = ["history", "text", "tokens"]
OURS = {("token_versions", "response"), ("token_versions", "full"), "response_truncated"}
MORE = {("log_probs", "full"), ("masks", "all_assistant_mask")}  # which of TorchRL's only vLLMWrapper gives


@pytest.fixture(scope="module")
def model():
    return tiny_model(0)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def remote(server, tokenizer, mode="tokens", **settings):
    settings = {"generate_kwargs": GREEDY, **TEMPLATE[mode], **settings}
    return tx.RemoteLLMPolicy(server.url, tokenizer=tokenizer, input_mode=mode, **settings)


@pytest.mark.parametrize("padded", [False, True], ids=["ragged", "padded"])
@pytest.mark.parametrize("mode", MODES)
def test_each_entry_is_that_of_torchrls_wrapper(server, model, tokenizer, mode, padded):
    theirs = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode=mode, pad_output=padded, generate_kwargs=GREEDY, **TEMPLATE[mode]
    )(prompts(mode, tokenizer, padded=padded))
    ours = remote(server, tokenizer, mode, pad_output=padded)(prompts(mode, tokenizer, padded=padded))
    assert type(ours) is type(theirs) and ours.batch_size == theirs.batch_size
    assert set(ours.keys()) == set(theirs.keys()) | {"token_versions", "response_truncated"}
    expected, found = leaves(theirs), leaves(ours)
    assert set(found) == set(expected) | OURS | MORE
    for key, rows in expected.items():
        for mine, wanted in zip(found[key], rows, strict=True):
            assert (mine.dtype, mine.shape) == (wanted.dtype, wanted.shape), key
            if key == ("log_probs", "response"):  # TransformersWrapper says 0 for the first token
                torch.testing.assert_close(mine[1:], wanted[1:], atol=1e-4, rtol=0)
            else:
                assert torch.equal(mine, wanted), key
    for name in ("tokens", "masks", "log_probs"):
        assert type(ours.get(name)) is type(theirs.get(name))
        assert ours.get(name).padded == theirs.get(name).padded == padded


@pytest.mark.parametrize("padded", [False, True], ids=["ragged", "padded"])
@pytest.mark.parametrize("mode", MODES)
def test_num_samples_is_a_second_dimension_as_in_torchrl(server, model, tokenizer, mode, padded):
    """Several samples are a second batch dimension, as in TorchRL's own wrapper."""
    drawn = {"max_new_tokens": 6, "do_sample": True, "temperature": 1.0}
    settings = {"tokenizer": tokenizer, "input_mode": mode, "pad_output": padded, "num_samples": 3, **TEMPLATE[mode]}
    theirs = TransformersWrapper(model, generate_kwargs=drawn, **settings)(prompts(mode, tokenizer, padded=padded))
    ours = tx.RemoteLLMPolicy(server.url, generate_kwargs={**drawn, "ignore_eos": True}, **settings)(
        prompts(mode, tokenizer, padded=padded)
    )
    assert type(ours) is type(theirs) and ours.batch_size == theirs.batch_size == (2, 3)
    expected, found = leaves(theirs), leaves(ours)
    assert set(found) == set(expected) | OURS | MORE
    for key in expected:
        assert [rows.dtype for rows in found[key]] == [rows.dtype for rows in expected[key]]
    assert [ids.tolist() for ids in found["tokens", "prompt"]] == [ids.tolist() for ids in expected["tokens", "prompt"]]
    assert len({tuple(ids.tolist()) for ids in found["tokens", "response"]}) > 2  # else samples were copies


def test_an_end_of_a_turn_within_a_prompt_is_no_padding(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = None  # then the end token pads
    end = tokenizer.eos_token_id
    settings = WrapperSettings(tokenizer=tokenizer, input_mode="tokens", input_key=("tokens", "prompt"))
    rows = [[end, 5, 6, end, 7], [5, end, end, 7, 8], [end] * 5]
    given = lazy_stack([TensorDict({"tokens": {"prompt": torch.tensor(row)}}) for row in rows])
    assert [ids.tolist() for ids in read_prompts(given, settings).tokens] == [[5, 6, end, 7], rows[1], []]


@pytest.mark.parametrize("padded", [False, True], ids=["ragged", "padded"])
def test_masks_say_who_spoke_and_what_is_padding(server, tokenizer, padded):
    stop = remote(server, tokenizer)(prompts("tokens", tokenizer))[0]["tokens", "response"][2].item()
    settings = {**GREEDY, "stop_token_ids": [stop]}
    out = remote(server, tokenizer, pad_output=padded, generate_kwargs=settings)(prompts("tokens", tokenizer))
    first, second = out.unbind(0)
    lengths = [len(tokenizer(text)["input_ids"]) for text in PROMPTS]
    before = max(lengths) if padded else lengths[0]
    said = first["masks", "all_assistant_mask"]
    assert said[before : before + 3].all() and said.sum() == 3
    assert first["masks", "all_attention_mask"].sum() == lengths[0] + 3
    assert second["masks", "all_attention_mask"].sum() == lengths[1] + 6
    assert (said.numel() == before + 6) is padded
    for row in (first, second):
        assert row["masks", "all_attention_mask"].shape == row["tokens", "full"].shape
        assert row["token_versions", "full"].shape == row["tokens", "full"].shape
        assert (row["token_versions", "full"][~row["masks", "all_assistant_mask"]] == -1).all()
        assert (row["token_versions", "full"][row["masks", "all_assistant_mask"]] >= 0).all()


def test_a_dialog_of_two_turns_takes_up_the_tokens_of_the_first(server, tokenizer):
    policy = remote(server, tokenizer, "history", prefer_tokens=True)
    first = policy(prompts("history", tokenizer))
    turn = TensorDict({"history": {"prompt": first["history"].full}}, batch_size=[2]).to_lazystack(0)
    for row, before in zip(turn.unbind(0), first.unbind(0), strict=True):
        row.set(("tokens", "prompt"), before["tokens", "full"])
    second = policy(turn)
    for row, before in zip(second.unbind(0), first.unbind(0), strict=True):
        assert torch.equal(row["tokens", "prompt"], before["tokens", "full"])


def test_a_token_that_ends_a_response_is_no_part_of_the_message(server, tokenizer):
    found = remote(server, tokenizer, "history")(prompts("history", tokenizer))[0]["tokens", "response"]
    settings = {**GREEDY, "stop_token_ids": [found[3].item()]}
    out = remote(server, tokenizer, "history", generate_kwargs=settings)(prompts("history", tokenizer))[0]
    response = out["tokens", "response"]
    assert out["text"].response == tokenizer.decode(response)
    assert out["history"].response[0].content == tokenizer.decode(response[:-1])


@pytest.mark.parametrize("shape", [(), (2,), (2, 1), (1, 2)])
def test_any_batch_size_is_answered_in_its_own_shape(server, tokenizer, shape):
    flat = prompts("text", tokenizer)
    given = flat[0] if shape == () else flat.reshape(*shape)
    out = remote(server, tokenizer, "text")(given)
    assert out.batch_size == shape
    assert len(leaves(out)["tokens", "response"]) == given.numel()


def test_outputs_go_where_inplace_says(server, tokenizer):
    given = prompts("text", tokenizer).set("mine", torch.arange(2))
    assert remote(server, tokenizer, "text")(given) is given and "mine" in given and "tokens" in given
    given = prompts("text", tokenizer).set("mine", torch.arange(2))
    out = remote(server, tokenizer, "text", inplace=False)(given)
    assert "tokens" not in given and "mine" not in out
    out = remote(server, tokenizer, "text", inplace="empty")(given)
    assert "tokens" not in given and "mine" not in out and "tokens" in out
    target = TensorDict({"other": torch.zeros(2)}, batch_size=[2])
    assert remote(server, tokenizer, "text")(given, tensordict_out=target) is target and "tokens" in target


def test_keys_can_be_renamed(server, tokenizer):
    policy = remote(server, tokenizer, "text", tokens_key="ids", input_key=("query", "text"))
    given = TensorDict({"query": {"text": NonTensorData("the trainer", batch_size=[1])}}, batch_size=[1])
    out = policy(given)
    assert ("ids", "full") in out.keys(True) and ("token_versions", "full") in out.keys(True) and "tokens" not in out
    assert policy.in_keys == [("query", "text")] and policy.out_keys == ["text", "masks", "ids", "log_probs"]


def test_a_seed_repeats_the_life_of_a_policy(server, tokenizer):
    settings = {"generate_kwargs": {"max_new_tokens": 8, "ignore_eos": True}, "seed": 5}
    lives = []
    for _ in range(2):
        policy = remote(server, tokenizer, **settings)
        lives.append([policy(prompts("tokens", tokenizer))[0]["tokens", "response"].tolist() for _ in range(2)])
    assert lives[0] == lives[1] and lives[0][0] != lives[0][1]


def test_sampling_settings_change_per_call_or_in_new_version(server, tokenizer):
    """Settings can change for one call, or in a new version of the policy with the same engines."""
    policy = remote(server, tokenizer)
    assert policy(prompts("tokens", tokenizer), max_new_tokens=2)[0]["tokens", "response"].numel() == 2
    assert policy(prompts("tokens", tokenizer))[0]["tokens", "response"].numel() == 6
    other = policy.get_new_version(pad_output=True, return_log_probs=False)
    assert other.model is policy.model and other.pad_output and "log_probs" not in other.out_keys
    assert "log_probs" not in other(prompts("tokens", tokenizer, padded=True))


def test_a_response_that_the_limit_ends_is_marked(server, tokenizer):
    whole = {"max_new_tokens": 150, "do_sample": False, "ignore_eos": True}
    out = remote(server, tokenizer, generate_kwargs=whole)(prompts("tokens", tokenizer))
    assert [ids.numel() for ids in leaves(out)["tokens", "response"]] == [150, 150]
    assert out["response_truncated"].tolist() == [True, True]
    stop = leaves(out)["tokens", "response"][0][3].item()
    ended = remote(server, tokenizer, generate_kwargs={**whole, "stop_token_ids": [stop]})(prompts("tokens", tokenizer))
    rows = ended.unbind(0)
    assert rows[0]["tokens", "response"].numel() <= 4 and not rows[0]["response_truncated"]


def test_a_policy_can_be_sent_to_another_process(server, tokenizer):
    policy = remote(server, tokenizer, seed=3)
    again = pickle.loads(pickle.dumps(policy))
    assert again.model.urls == (server.url,) and again.out_keys == policy.out_keys
    first, second = (one(prompts("tokens", tokenizer))["tokens", "response"] for one in (policy, again))
    assert torch.equal(first, second)


def test_each_token_carries_the_version_that_sampled_it(tmp_path, tokenizer):
    """An update lands while the engine writes: what is written before it is of version 0, the rest of version 1."""
    with EmbeddedServer(tiny_checkpoint(tmp_path), dtype="float32", threads=1) as own:
        policy = remote(own, tokenizer, generate_kwargs={"max_new_tokens": 450, "ignore_eos": True}, timeout_s=WAIT_S)
        sender = tx.WeightSender(tx.make_transport("collective"), tx.connect(own.url))
        other = tiny_model(1)
        sender.init_all_workers_group({name: (t.dtype, t.shape) for name, t in other.named_parameters()})
        out = []
        writing = threading.Thread(target=lambda: out.append(policy(prompts("tokens", tokenizer))))
        writing.start()
        while httpx.get(f"{own.url}/load", verify=False).json()["server_load"] == 0:
            assert writing.is_alive()
        sender.update_weights(other)
        writing.join(WAIT_S)
        sender.shutdown()
    for row in out[0].unbind(0):
        versions = row["token_versions", "response"]
        assert versions.unique().tolist() == [0, 1] and (versions.diff() >= 0).all()
        assert torch.equal(row["token_versions", "full"][-450:], versions)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"input_mode": "text", "tokenizer": None}, "needs a tokenizer"),
        ({"pad_output": True, "tokenizer": None}, "padding token"),
        ({"generate_kwargs": {"stop_sequences": ["."]}}, "stop_token_ids"),
        ({"generate_kwargs": {"num_beams": 4}}, "num_beams"),
        ({"num_samples": 2, "inplace": True}, "several samples"),
        ({"num_samples": 2, "generate_kwargs": {"n": 3}}, "num_samples is 2"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(tokenizer, settings, words):
    client = tx.InferenceClient("127.0.0.1:9")
    with pytest.raises(ConfigError, match=words):
        tx.RemoteLLMPolicy(client, **{"tokenizer": tokenizer, "input_mode": "tokens", **settings})


def test_an_input_without_prompts_is_answered_with_its_keys(server, tokenizer):
    with pytest.raises(ConfigError, match=r"no \('tokens', 'prompt'\).*query"):
        remote(server, tokenizer)(TensorDict({"query": torch.zeros(1)}, batch_size=[1]))
    with pytest.raises(ConfigError, match="History"):
        remote(server, tokenizer, "history", input_key=("text", "prompt"))(prompts("text", tokenizer))
