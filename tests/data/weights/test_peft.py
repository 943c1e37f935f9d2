"""LoRA modules are merged on the way out and stay as they are."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from tests.data.transports.chains import same
from tests.models import converted_model, tiny_model
from tests.processes import python
from torchrl_ext.base.errors import ConfigError
from torchrl_ext.data.weights.derived import PeftSource, as_source
from torchrl_ext.data.weights.source import checked
from torchrl_ext.testing import same_bits

peft = pytest.importorskip("peft")


def adapted(base=tiny_model, how=None, **settings):
    """A model with a LoRA adapter whose matrices are not zero; ``how`` the model is made."""
    settings = {"target_modules": ["q_proj", "down_proj"], "r": 4, "lora_alpha": 16} | settings
    model = peft.get_peft_model(base(**(how or {})), peft.LoraConfig(**settings))
    stir(model)
    return model


@torch.no_grad()
def stir(model):
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def assert_merged(model):
    """The source equals `merge_and_unload` of a copy bit for bit, and the live module does not change."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objects = {name: id(tensor) for name, tensor in model.named_parameters()}
    found = {meta.name: tensor for meta, tensor in checked(as_source(model))}
    assert same(found, dict(as_source(copy.deepcopy(model).merge_and_unload())))
    assert {name: id(tensor) for name, tensor in model.named_parameters()} == objects
    assert same(model.state_dict(), before)
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"how": {"dtype": torch.bfloat16}},
        {"target_modules": ["embed_tokens", "o_proj"], "use_rslora": True},
        {"how": {"tie_word_embeddings": True}},
        {"base": partial(converted_model, "mixtral"), "target_modules": ["q_proj"]},
    ],
    ids=["bfloat16", "embedding", "tied", "converted"],
)
def test_layers_of_every_kind_are_merged(settings):
    assert_merged(adapted(**settings))


def test_layers_to_save_are_sent_as_trained():
    model = adapted(modules_to_save=["lm_head"])
    found, base = assert_merged(model), model.get_base_model()
    assert same_bits(found["lm_head.weight"], base.lm_head.modules_to_save["default"].weight.detach())
    layer = base.model.layers[0].self_attn.q_proj
    assert not torch.equal(found["model.layers.0.self_attn.q_proj.weight"], layer.base_layer.weight)
    assert {f"policy.{name}" for name in found} == set(dict(as_source(nn.ModuleDict({"policy": model}))))
    assert set(as_source(model).files()) >= {"config.json"}


def test_active_adapters_add_up_and_each_is_added_once():
    model, name = adapted(), "model.layers.1.self_attn.q_proj.weight"
    expected = dict(as_source(model))
    with model.disable_adapter():
        assert same_bits(dict(as_source(model))[name], tiny_model().state_dict()[name])
    model.merge_adapter()
    assert same(dict(as_source(model)), expected)
    model.unmerge_adapter()
    model.add_adapter("second", peft.LoraConfig(target_modules=["q_proj"], r=2, lora_alpha=64))
    stir(model)
    model.base_model.set_adapter(["default", "second"])
    both = assert_merged(model)
    model.set_adapter("second")
    assert not torch.equal(both[name], assert_merged(model)[name])


def test_other_tuners_are_refused():
    with pytest.raises(ConfigError, match=r"Dora.* at '.*q_proj'"):
        PeftSource(adapted(use_dora=True))
    base = nn.ModuleDict({"q_proj": nn.Linear(4, 4)})
    base.forward = lambda x: base["q_proj"](x)
    biased = peft.LoraConfig(target_modules=["q_proj"], bias="none", lora_bias=True)
    with pytest.raises(ConfigError, match=r"LoRA with a bias.* at '.*q_proj'"):
        PeftSource(peft.get_peft_model(base, biased))
    for config in (
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
    ):
        with pytest.raises(ConfigError, match="cannot be merged"):
            as_source(peft.get_peft_model(tiny_model(), config))


def test_asking_does_not_import_peft():
    python(
        "import sys, torch; from torchrl_ext.data.weights.derived import as_source\n"
        "as_source(torch.nn.Linear(2, 2)).params(); assert 'peft' not in sys.modules",
        fresh=True,
    )
