"""How weights land in modules, TensorDicts and mappings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.landing.loader import TensorsLoader, as_loader
from torchrl_ext.weights.source import as_source


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


def test_a_loader_stays_as_it_is_and_other_things_are_refused():
    loader = TensorsLoader({})
    assert as_loader(loader) is loader
    with pytest.raises(ConfigError, match="cannot land in a list"):
        as_loader([])
