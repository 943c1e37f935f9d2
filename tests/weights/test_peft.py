"""LoRA modules are merged on the way out, and stay as they are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.models import tiny_model
from tests.processes import python
from torchrl_ext.errors import ConfigError
from torchrl_ext.testing import same_bits
from torchrl_ext.weights.peft import PeftSource, is_peft
from torchrl_ext.weights.source import as_source, checked

peft = pytest.importorskip("peft")


def adapted(dtype=torch.float32, tied=False, **settings):
    """A tiny model with a LoRA adapter whose matrices are not zero."""
    settings = {"target_modules": ["q_proj", "down_proj"], "r": 4, "lora_alpha": 16} | settings
    model = peft.get_peft_model(tiny_model(dtype=dtype, tie_word_embeddings=tied), peft.LoraConfig(**settings))
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
    expected = copy.deepcopy(model).merge_and_unload()
    found = {meta.name: tensor for meta, tensor in checked(as_source(model))}
    reference = dict(as_source(expected))
    assert set(found) == set(reference)
    for name, tensor in reference.items():
        assert same_bits(found[name], tensor), name
    assert {name: id(tensor) for name, tensor in model.named_parameters()} == objects
    assert all(same_bits(before[name], tensor) for name, tensor in model.state_dict().items())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_layers_are_merged(dtype):
    model = adapted(dtype)
    found = assert_merged(model)
    assert set(found) == set(tiny_model().state_dict())
    base = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
    assert not torch.equal(found["model.layers.0.self_attn.q_proj.weight"], base)


def test_embeddings_and_rank_stabilised_scaling_are_merged():
    assert_merged(adapted(target_modules=["embed_tokens", "o_proj"], use_rslora=True))


def test_modules_to_save_are_sent_as_trained():
    model = adapted(modules_to_save=["lm_head"])
    found = assert_merged(model)
    assert same_bits(found["lm_head.weight"], model.get_base_model().lm_head.modules_to_save["default"].weight.detach())


def test_several_active_adapters_add_up():
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(target_modules=["q_proj"], r=2, lora_alpha=64))
    stir(model)
    model.base_model.set_adapter(["default", "second"])
    both = assert_merged(model)
    model.set_adapter("second")
    second = assert_merged(model)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert not torch.equal(both[name], second[name])


def test_a_disabled_adapter_is_left_out():
    model, name = adapted(), "model.layers.0.self_attn.q_proj.weight"
    with model.disable_adapter():
        assert same_bits(dict(as_source(model))[name], tiny_model().state_dict()[name])


def test_an_adapter_that_is_merged_already_is_not_added_twice():
    model = adapted()
    expected = dict(as_source(model))
    model.merge_adapter()
    found = dict(as_source(model))
    assert all(same_bits(found[name], expected[name]) for name in expected)


def test_tied_weights_travel_once():
    assert "lm_head.weight" not in assert_merged(adapted(tied=True))


def test_a_module_that_contains_an_adapted_one_is_merged_too():
    found = dict(as_source(nn.ModuleDict({"policy": adapted()})))
    assert set(found) == {f"policy.{name}" for name in tiny_model().state_dict()}


def test_the_files_are_those_of_the_base_model():
    assert set(as_source(adapted()).files()) >= {"config.json"}


@pytest.mark.parametrize(
    ("settings", "kind"), [({"use_dora": True}, "Dora"), ({"bias": "none", "lora_bias": True}, "LoRA with a bias")]
)
def test_adapters_that_are_no_plain_lora_are_refused_by_layer(settings, kind):
    if "lora_bias" in settings:
        base = nn.ModuleDict({"q_proj": nn.Linear(4, 4)})
        base.forward = lambda x: base["q_proj"](x)
        model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], **settings))
    else:
        model = adapted(**settings)
    with pytest.raises(ConfigError, match=rf"{kind}.* at '.*q_proj'"):
        PeftSource(model)


def test_other_tuners_are_refused():
    model = peft.get_peft_model(tiny_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ConfigError, match="cannot be merged"):
        as_source(model)
    model = peft.get_peft_model(tiny_model(), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(ConfigError, match="cannot be merged"):
        as_source(model)


def test_a_plain_module_is_none():
    assert not is_peft(nn.Linear(2, 2))


def test_asking_does_not_import_peft():
    python(
        "import sys, torch; from torchrl_ext.weights.source import as_source\n"
        "as_source(torch.nn.Linear(2, 2)).params(); assert 'peft' not in sys.modules",
        fresh=True,
    )
