"""What every transport inherits that works alone: weights of any form, and where they land."""

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from torch import nn
from torchrl.weight_update.weight_sync_schemes import WeightStrategy

import torchrl_ext as tx
from torchrl_ext.data.weights.source import MappingSource
from torchrl_ext.testing import Ends, assert_arrived, assert_held


@pytest.fixture
def ends(tmp_path):
    made = Ends(*(tx.MemoryTransport(channel=str(tmp_path)) for _ in range(2)))
    yield made
    made.worker.shutdown()
    made.trainer.shutdown()


def layers():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def nested():
    return TensorDict.from_module(layers()).data.clone()


def tied():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    return model


FORMS = {
    "module": layers,
    "tied module": tied,
    "nested TensorDict": nested,
    "TensorDictParams": lambda: TensorDictParams(nested()),
    "nested mapping": lambda: {"a": {"b": torch.randn(2)}, ("c", "d"): torch.randn(3), "e.f": torch.randn(1)},
    "source": lambda: MappingSource({"x": torch.randn(5)}),
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_may_come_in_every_form(ends, form):
    weights = FORMS[form]()
    received = ends.exchange("policy", weights)
    assert_arrived(received, weights)
    assert form != "tied module" or set(received.keys()) == {"0.weight"}


@pytest.mark.parametrize("into", ["weights", "model"])
def test_a_module_takes_the_weights_in_place(ends, into):
    sent, held = layers(), layers()
    before = held[0].weight
    assert_arrived(ends.exchange("policy", sent, **{into: held}), sent)
    assert_held(held, sent)
    assert held[0].weight is before


@pytest.mark.parametrize("extract_as", ["tensordict", "state_dict"])
@pytest.mark.filterwarnings("ignore:state_dict strategy")
def test_a_torchrl_strategy_applies_them_to_a_nested_model(ends, extract_as):
    sent, held = layers(), layers()
    ends.exchange("policy", sent, model=held, strategy=WeightStrategy(extract_as))
    assert_held(dict(held.named_parameters()), dict(sent.named_parameters()))
