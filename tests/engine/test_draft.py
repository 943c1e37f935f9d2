"""Updates of a speculative engine's draft model, beside those of the base, in real vLLM servers.

The draft is an EAGLE head without embeddings or an output head of its own: vLLM has it use the base's. By its ``fc`` it
hands on the embedding of the last token, in the base's own frame, so that it proposes what a `decided` base prefers.
"""

import json
import logging
import re

import pytest
import torch
from safetensors.torch import save_file

import torchrl_ext as tx
from tests.engine.conftest import starting
from tests.engine.served import ServedVLLM
from tests.models import PROMPT, SIZES, greedy, tiny_model, tiny_tokenizer
from torchrl_ext.errors import UpdateError

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]
WIDTH = SIZES["hidden_size"]
PROMPTS = [[(token + shift) % 500 + 5 for token in PROMPT] for shift in range(0, 500, 60)]
FLIPS = torch.where(torch.rand(WIDTH, generator=torch.Generator().manual_seed(7)) < 0.5, -1.0, 1.0)


def base(seed, flips=None):
    """A base; with ``flips`` its hidden states are mirrored before its head, which says the same for it."""
    model = tiny_model(seed, decided=True)
    if flips is not None:
        with torch.no_grad():
            model.model.norm.weight.mul_(flips)
            model.lm_head.weight.mul_(flips)
    return model


def head(flips=None):
    """An EAGLE head for `base`, by the names of its checkpoint."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]})
    config._attn_implementation = "eager"
    module = torch.nn.Module()
    module.fc = torch.nn.Linear(2 * WIDTH, WIDTH, bias=False)
    module.layers = torch.nn.ModuleList([LlamaDecoderLayer(config, 0)])
    del module.layers[0].input_layernorm  # EAGLE has none
    with torch.no_grad():
        frame = torch.ones(WIDTH) if flips is None else flips
        module.fc.weight.copy_(torch.cat([torch.diag(frame), torch.zeros(WIDTH, WIDTH)], dim=1))
        module.fc.weight.add_(torch.randn(WIDTH, 2 * WIDTH, generator=torch.Generator().manual_seed(1)), alpha=1e-4)
        for name, parameter in module.layers.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 1e-3, generator=torch.Generator().manual_seed(2))
    return module, config


def checkpoints(folder, model, draft, config):
    """Save a base and its draft; return their folders."""
    for path, part in {"base": model, "draft": config}.items():
        part.save_pretrained(folder / path)
        tiny_tokenizer().save_pretrained(folder / path)
    save_file(draft.state_dict(), folder / "draft" / "model.safetensors", metadata={"format": "pt"})
    return folder / "base", folder / "draft"


def speculating(folders, checkpoint, draft, method="eagle"):
    config = {"method": method, "model": str(draft), "num_speculative_tokens": 2}
    return starting(ServedVLLM, checkpoint, folders, extra_args=["--speculative-config", json.dumps(config)])


def counted(served):
    text = served.http.call("GET", "/metrics").text
    names = ("num_accepted_tokens_total", "num_draft_tokens_total")
    return [sum(map(float, re.findall(rf"^vllm:spec_decode_{name}\S* (\S+)", text, re.MULTILINE))) for name in names]


def accepted(served):
    """The part of the draft's tokens that the base accepts, and what it says."""
    before = counted(served)
    said = [served.generate(24, prompt)["token_ids"] for prompt in PROMPTS]
    accepted, drafted = (now - then for now, then in zip(counted(served), before, strict=True))
    return accepted / drafted, said


def test_acceptance_falls_with_the_base_alone_and_rises_with_the_draft_to_that_of_a_cold_start(
    tmp_path, tmp_path_factory, caplog
):
    first, (draft, config) = base(0), head()
    trained, (followed, _) = base(5, FLIPS), head(FLIPS)
    with speculating(tmp_path_factory, *checkpoints(tmp_path / "cold", trained, followed, config)) as cold:
        reached, said = accepted(cold)
    assert reached > 0.5 and said == [greedy(trained, prompt, 24) for prompt in PROMPTS]
    with speculating(tmp_path_factory, *checkpoints(tmp_path / "start", first, draft, config)) as served:
        assert accepted(served)[0] > 0.5
        engine = tx.make_engine("vllm", url=served.url)
        with tx.WeightSender(tx.DiskTransport(tmp_path / "base"), engine) as sender, caplog.at_level(logging.WARNING):
            report = sender.update_weights(trained)
            assert "keeps the weights of its draft model (eagle)" in caplog.text and "client.draft()" in caplog.text
            fallen, answers = accepted(served)
            assert answers == said and fallen < reached / 4
            to_draft = tx.WeightSender(tx.make_transport("delta", root=tmp_path / "draft"), engine.draft())
            with to_draft:
                assert_the_base_is_not_written(to_draft, served, followed, said)
                found = to_draft.update_weights(followed)
                assert found.verified and found.proof in ("in place", "rehearsed")
                risen, answers = accepted(served)
                assert answers == said and risen == pytest.approx(reached, abs=0.02)
                assert served.version() == str(report.version)  # the base's label stays

                # each keeps its connection, and changes alone arrive
                caplog.clear()
                again = sender.update_weights(first), to_draft.update_weights(draft)
                assert not any("connect" in one.spans for one in again) and "keeps the weights" not in caplog.text
                assert again[1].bytes < found.model_bytes
                assert accepted(served)[0] > 0.5 and served.says(first)


def assert_the_base_is_not_written(sender, served, draft, said):
    """What the draft shares with the base is refused by name, before anything changes."""
    tensors = {**draft.state_dict(), "embed_tokens.weight": torch.zeros(SIZES["vocab_size"], WIDTH)}
    with pytest.raises(UpdateError, match=r"shares 'embed_tokens.weight' with the base model"):
        sender.update_weights(tensors)
    assert accepted(served)[1] == said
