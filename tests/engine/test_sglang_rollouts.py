"""Rollouts from a stock SGLang server: the same policy, the same demonstration, another kind of engine."""

import asyncio
import json

import pytest
import torch
from tensordict import set_list_to_stack
from torchrl.modules.llm import TransformersWrapper

import torchrl_ext as tx
from tests.models import PROMPT, greedy, tiny_model, tiny_tokenizer
from tests.processes import COMMAND, finished
from tests.rollout.aborts import through_aborts
from tests.rollout.inputs import TEMPLATE, leaves, prompts
from torchrl_ext.compat.skyrl import RemoteInferenceClient

pytestmark = pytest.mark.engine

TEXT = "the trainer sends weights"


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_entries_agree_with_torchrls_wrapper_on_the_same_model(sglang, tmp_path, mode):
    own, tokenizer = tiny_model(19), tiny_tokenizer()
    sender = tx.WeightSender(tx.make_transport("disk", root=tmp_path / "updates"), tx.connect(sglang.url))
    version = sender.update_weights(own).version
    sender.shutdown()
    settings = {"tokenizer": tokenizer, "input_mode": mode, **TEMPLATE[mode]}
    settings["generate_kwargs"] = {"max_new_tokens": 12, "do_sample": False}
    with set_list_to_stack(True):
        expected = leaves(TransformersWrapper(own, **settings)(prompts(mode, tokenizer)))
        found = leaves(tx.RemoteLLMPolicy(sglang.url, **settings)(prompts(mode, tokenizer)))
    for key, rows in expected.items():
        for mine, wanted in zip(found[key], rows, strict=True):
            if key == ("log_probs", "response"):  # TransformersWrapper says 0 for the first token
                torch.testing.assert_close(mine[1:], wanted[1:], atol=1e-3, rtol=0)
            else:
                assert torch.equal(mine, wanted), key
    assert {number for rows in found["token_versions", "response"] for number in rows.tolist()} == {version}


def test_several_samples_of_a_prompt_differ(sglang):
    client = tx.InferenceClient.connect(sglang.url)
    found = client.generate([[3, 17, 42], [3, 17]], n=3, max_tokens=8, ignore_eos=True)
    assert len(found) == 6 and all(len(one.token_ids) == len(one.logprobs) == 8 for one in found)
    assert len({one.token_ids for one in found}) > 3


@pytest.fixture
def client(sglang, checkpoint):
    """Straight to the only engine: SGLang's own router has no Python to call, and vLLM's is tested with vLLM."""
    made = RemoteInferenceClient(proxy_url=sglang.url, server_urls=[sglang.url], kind="sglang", timeout_s=120)
    yield made
    made.run(made.resume())
    made.close()


def test_text_tokens_and_completions_by_the_inference_client(sglang, client):
    own, tokenizer = tiny_model(23), tiny_tokenizer()
    sender = tx.WeightSender(tx.make_transport("ipc"), client.fleet())
    version = sender.update_weights(own).version
    sender.shutdown()
    (ids,) = client.run(client.tokenize([TEXT], add_special_tokens=False))
    assert ids == tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert client.run(client.detokenize([ids])) == [TEXT]
    sampling = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    found = client.run(client.generate({"prompt_token_ids": [PROMPT, PROMPT[:4]], "sampling_params": sampling}))
    assert found["response_ids"] == [greedy(own, PROMPT, 8), greedy(own, PROMPT[:4], 8)]
    assert found["weight_versions"] == [[version] * 8] * 2 and found["stop_reasons"] == ["length"] * 2
    assert all(len(row) == 8 and max(row) <= 0 for row in found["response_logprobs"])
    answer = client.run(client.completion({"json": {"prompt": TEXT, "max_tokens": 4, "temperature": 0}}))
    assert answer["usage"]["completion_tokens"] <= 4


def test_a_generation_that_is_aborted_goes_on_where_it_was(sglang, client):
    """The pause mode of SGLang that ends running requests; what each had so far is kept."""

    engine = tx.make_engine("sglang", url=sglang.url)
    sampling = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}
    batch = {"prompt_token_ids": [[*PROMPT, i] for i in range(4)], "sampling_params": sampling}

    async def busy():
        return any(row["running"] for row in await asyncio.to_thread(engine.port.loads))

    found = client.run(through_aborts(client, lambda: client.generate(batch), busy))
    whole = client.run(client.generate(batch))
    assert found["response_ids"] == whole["response_ids"] and found["stop_reasons"] == ["length"] * 4


@pytest.mark.exhaustive
def test_the_demo_proves_itself_on_sglang(sglang, checkpoint):
    arguments = ["--json", "--steps", "2", "--transport", "disk", "--engines", sglang.url, "--model", checkpoint]
    done = finished(COMMAND, "demo", *arguments, timeout_s=600)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["verified"] and told["engine"] == "sglang" and len(told["syncs"]) == 3
