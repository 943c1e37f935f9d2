"""An engine whose output head is its embedding, and a trainer in which they have come apart: it serves on unchanged."""

import pytest
import torch
from torch import nn

from tests.models import PROMPT, tiny_checkpoint, tiny_model
from tests.real_engines.served import ServedSGLang, ServedVLLM, sending, serving
from torchrl_ext.base.errors import UpdateError
from torchrl_ext.sync.outputs import score

pytestmark = pytest.mark.engine

NATS = 1e-4  # far above what float32 differs by, and far below what a wrong head makes of it
TRANSPORTS = ["delta", "disk", "collective", "ipc"]


@pytest.fixture(scope="module", params=[ServedVLLM, ServedSGLang], ids=["vllm", "sglang"])
def served(request, tmp_path_factory):
    start = tiny_checkpoint(tmp_path_factory.mktemp("model") / "start", tie_word_embeddings=True)
    settings = {"max_model_len": 256, "dtype": "float32", "log_path": start.parent / "log"}
    with serving(request.param, start, **settings) as found:
        yield found


@torch.no_grad()
def train(parameters):
    for parameter in parameters:
        parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)) * 0.05)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tied_head_refuses_two_values_and_serves_equal_ones(served, transport, tmp_path):
    def assert_says(expected):
        assert sender.engine.logprobs([PROMPT])[0] == pytest.approx(expected, abs=NATS)
        assert not served.paused()

    with sending(transport, tmp_path, served) as sender:  # whatever the test before this one left there
        assert sender.update_weights(tiny_model(3, tie_word_embeddings=True)).verified
    model = tiny_model(TRANSPORTS.index(transport) + 10, tie_word_embeddings=True)
    embedding = model.model.embed_tokens.weight
    model.lm_head.weight = head = nn.Parameter(embedding.detach().clone())  # the trainer has a head of its own
    with sending(transport, tmp_path / "anew", served) as sender:
        for changed in ([*model.parameters(), head], [embedding], [head]):
            (before,) = sender.engine.logprobs([PROMPT])
            train(changed)
            with pytest.raises(UpdateError):
                sender.update_weights(model)
            assert_says(before)
            head.data.copy_(embedding)
            assert sender.update_weights(model).verified
            assert_says(score(model, [PROMPT])[0])
