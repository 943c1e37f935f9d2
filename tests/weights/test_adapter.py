"""An adapter's weights are those that PEFT itself would save."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.adapters import lora_policy, randomise
from tests.models import tiny_model
from torchrl_ext.errors import ConfigError
from torchrl_ext.weights.peft import ADAPTER_CONFIG, AdapterFolder, AdapterSource, as_adapter
from torchrl_ext.weights.source import checked


@pytest.fixture(scope="module")
def policy():
    return lora_policy(0)


@pytest.mark.parametrize("wrap", [lambda model: model, torch.nn.Sequential], ids=["itself", "inside a module"])
def test_names_values_and_config_are_those_of_save_pretrained(policy, tmp_path, wrap):
    policy.save_pretrained(tmp_path)
    source = AdapterSource(wrap(policy))
    found = {meta.name: tensor for meta, tensor in checked(source)}
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in saved)
    ours, peft = json.loads(source.files()[ADAPTER_CONFIG]), json.loads((tmp_path / ADAPTER_CONFIG).read_text())
    peft["target_modules"].sort()  # a set, which PEFT writes in any order
    peft["auto_mapping"] = None  # where AutoPeftModel, which has no task type here, would find the base's class
    assert ours == peft


def test_each_pass_has_the_values_of_its_moment(policy):
    source = AdapterSource(policy)
    before = {name: tensor.clone() for name, tensor in source}
    randomise(policy, 5)
    after = dict(source)
    assert not any(torch.equal(before[name], after[name]) for name in before)


def test_a_folder_of_peft_is_a_source_too(policy, tmp_path):
    policy.save_pretrained(tmp_path)
    folder, module = as_adapter(tmp_path), as_adapter(policy)
    assert isinstance(folder, AdapterFolder)
    assert all(torch.equal(tensor, dict(module)[meta.name]) for meta, tensor in checked(folder))
    assert json.loads(folder.files()[ADAPTER_CONFIG])["r"] == 4


def test_one_of_several_adapters_is_named(policy):
    from peft import LoraConfig

    model = lora_policy(0)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    assert len(AdapterSource(model).params()) > len(AdapterSource(model, "other").params()) > 0
    assert not any("other" in meta.name for meta in AdapterSource(model, "other").params())
    with pytest.raises(ConfigError, match="no adapter 'third'"):
        AdapterSource(model, "third")


def test_what_cannot_be_sent_says_why(policy, tmp_path):
    from peft import IA3Config, LoraConfig, get_peft_model, inject_adapter_in_model

    with pytest.raises(ConfigError, match=r"holds no LoRA adapter.*get_peft_model"):
        as_adapter(tiny_model(0))
    ia3 = get_peft_model(tiny_model(0), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(ConfigError, match="'IA3'"):
        as_adapter(ia3)
    with pytest.raises(ConfigError, match=r"pissa.*base weights that it has changed"):
        as_adapter(lora_policy(0, init_lora_weights="pissa"))
    injected = inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), tiny_model(0))
    with pytest.raises(ConfigError, match="no PEFT config"):
        as_adapter(injected)
    with pytest.raises(ConfigError, match=r"adapter_config\.json is not there"):
        as_adapter(tmp_path)
    (tmp_path / ADAPTER_CONFIG).write_text("{")
    with pytest.raises(ConfigError, match="is no JSON"):
        as_adapter(tmp_path)
