"""How weights land in modules, TensorDicts and mappings."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from tests.models import tiny_model
from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.landing.loader import TensorsLoader, as_loader
from torchrl_ext.testing import same_bits
from torchrl_ext.weights.digests import tensor_digest
from torchrl_ext.weights.source import as_source


def land(sent, target):
    loader, source = as_loader(target), as_source(sent)
    loader.check(source.params())
    loader.start()
    loader.load(source)
    loader.finish()
    digests = loader.digests()
    assert all(digests[name] == tensor_digest(tensor) for name, tensor in source)


@pytest.mark.parametrize("make", [lambda m: m, TensorDict.from_module, lambda m: m.state_dict()])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_takes_another_in_every_form_in_place(make, tied):
    sent, held = tiny_model(seed=1, tie_word_embeddings=tied), tiny_model(seed=2, tie_word_embeddings=tied)
    parameters = [id(parameter) for parameter in held.parameters()]
    land(make(sent), held)
    assert [id(parameter) for parameter in held.parameters()] == parameters
    for left, right in zip(sent.parameters(), held.parameters(), strict=True):
        assert same_bits(left.detach(), right.detach())


def test_a_tied_tensor_may_come_under_any_of_its_names():
    held = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    held["head"].weight = held["embed"].weight
    for name in ("embed.weight", "head.weight"):
        sent = torch.randn(5, 3)
        land({name: sent}, held)
        assert same_bits(held["embed"].weight.detach(), sent)


def test_a_mapping_and_a_nested_tensordict_are_filled_in_place():
    sent = {"a": {"b": torch.randn(3)}, "c": torch.randn(2, 2)}
    for held in (
        {"a.b": torch.zeros(3), "c": torch.zeros(2, 2).t()},
        TensorDict({"a": {"b": torch.zeros(3)}, "c": torch.zeros(2, 2)}, []),
    ):
        land(sent, held)
        assert same_bits(held["c"], sent["c"])


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"weight": torch.zeros(3, 2)}, "missing from the update, first 'bias'"),
        ({"weight": torch.zeros(3, 2), "bias": torch.zeros(3), "x": torch.zeros(1)}, "no parameter 'x'"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(3)}, r"'weight' arrives as weight float32\[2, 3\]"),
        (
            {"weight": torch.zeros(3, 2), "bias": torch.zeros(3).half()},
            "'bias' arrives as bias float16.*WeightSender dtype=torch.float32, .* --dtype float32",
        ),
    ],
)
def test_what_cannot_land_is_named_before_anything_is_touched(params, said):
    with pytest.raises(ManifestError, match=said):
        as_loader(nn.Linear(2, 3)).check(as_source(params).params())


def test_a_partial_update_is_taken_where_it_is_allowed():
    held = nn.Linear(2, 3)
    sent = {"bias": torch.randn(3)}
    loader = TensorsLoader(held, partial=True)
    loader.check(as_source(sent).params())
    loader.load(as_source(sent))
    assert same_bits(held.bias.detach(), sent["bias"])


def test_a_loader_stays_as_it_is_and_other_things_are_refused():
    loader = TensorsLoader({})
    assert as_loader(loader) is loader
    with pytest.raises(ConfigError, match="cannot land in a list"):
        as_loader([])
