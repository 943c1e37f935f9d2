"""An engine whose output head is its embedding, and a trainer in which they have come apart: it serves on unchanged."""

import copy

import pytest
import torch
from torch import nn

from tests.models import PROMPT, tiny_checkpoint, tiny_model
from tests.real_engines.served import ServedSGLang, ServedVLLM, sending, serving
from torchrl_ext.base.errors import UpdateError
from torchrl_ext.sync.outputs import score

pytestmark = pytest.mark.engine

NATS = 1e-4  # far above what float32 differs by, and far below what a wrong head makes of it


@pytest.fixture(scope="module", params=[ServedVLLM, ServedSGLang], ids=["vllm", "sglang"])
def served(request, tmp_path_factory):
    start = tiny_checkpoint(tmp_path_factory.mktemp("model") / "start", tie_word_embeddings=True)
    settings = {"max_model_len": 256, "dtype": "float32", "log_path": start.parent / "log"}
    with serving(request.param, start, **settings) as found:
        yield found


@torch.no_grad()
def train(model, *parameters):
    for parameter in parameters or model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)) * 0.05)


@torch.no_grad()
def tie(model):
    model.lm_head.weight.copy_(model.model.embed_tokens.weight)


@pytest.mark.parametrize("transport", ["delta", "disk", "collective", "ipc"])
def test_tied_head_refuses_two_values_and_serves_equal_ones(served, transport, tmp_path):
    def assert_serves(model):
        assert sender.engine.logprobs([PROMPT])[0] == pytest.approx(score(model, [PROMPT])[0], abs=NATS)
        assert not served.paused()

    def assert_refused():
        (before,) = sender.engine.logprobs([PROMPT])
        with pytest.raises(UpdateError):
            sender.update_weights(model)
        assert sender.engine.logprobs([PROMPT])[0] == pytest.approx(before, abs=NATS)
        assert not served.paused()

    before = tiny_model(3, tie_word_embeddings=True)
    with sending(transport, tmp_path, served) as sender:
        assert sender.update_weights(before).verified  # whatever the test before this one left there
    model = tiny_model(["delta", "disk", "collective", "ipc"].index(transport) + 10, tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())  # the trainer has a head of its own
    with sending(transport, tmp_path / "anew", served) as sender:
        train(model)
        train(model, model.lm_head.weight)
        assert_refused()
        assert_serves(before)
        tie(model)
        assert sender.update_weights(model).verified
        assert_serves(model)
        tied = copy.deepcopy(model)
        for changed in (model.model.embed_tokens.weight, model.lm_head.weight):
            train(model, changed)  # one of the two alone
            assert_refused()
            assert_serves(tied)
            tie(model)
            assert sender.update_weights(model).verified
            assert_serves(model)
            tied = copy.deepcopy(model)
