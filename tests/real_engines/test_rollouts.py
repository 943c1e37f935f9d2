"""Rollouts from real servers: the policy, and the demonstration, which trains."""

import pytest
import torch
from tensordict import set_list_to_stack
from torchrl.modules.llm import TransformersWrapper

import torchrl_ext as tx
from tests.control.requests.inputs import TEMPLATE, leaves, prompts
from tests.models import tiny_model, tiny_tokenizer
from tests.real_engines.served import demo, sending

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def lists_are_stacks():
    with set_list_to_stack(True):
        yield


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_entries_agree_with_torchrls_wrapper_on_the_same_model(served, tmp_path, mode):
    own, tokenizer = tiny_model(17), tiny_tokenizer()
    with sending("disk", tmp_path, served) as sender:
        version = sender.update_weights(own).version
    settings = {"tokenizer": tokenizer, "input_mode": mode, **TEMPLATE[mode]}
    settings["generate_kwargs"] = {"max_new_tokens": 12, "do_sample": False}
    expected = leaves(TransformersWrapper(own, **settings)(prompts(mode, tokenizer)))
    found = leaves(tx.RemoteLLMPolicy(served.url, **settings)(prompts(mode, tokenizer)))
    for key, rows in expected.items():
        for mine, wanted in zip(found[key], rows, strict=True):
            if key == ("log_probs", "response"):  # TransformersWrapper says 0 for the first token
                torch.testing.assert_close(mine[1:], wanted[1:], atol=1e-3, rtol=0)
            else:
                assert torch.equal(mine, wanted), key
    assert {number for rows in found["token_versions", "response"] for number in rows.tolist()} == {version}


@pytest.mark.parametrize(
    ("kind", "transport"),
    [("vllm", "disk"), ("vllm", "collective"), pytest.param("sglang", "disk", marks=pytest.mark.exhaustive)],
)
def test_the_demo_proves_itself(request, kind, transport, checkpoint):
    served = request.getfixturevalue(kind)
    given = ["--model", checkpoint] if kind == "sglang" else []
    told = demo("--steps", 2, "--transport", transport, "--engines", served.url, *given)
    assert told["engine"] == kind and len(told["syncs"]) == 3 and not served.paused()
