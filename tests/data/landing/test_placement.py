"""Placements of loaders that do what engines' loaders do."""

import pytest
import torch

from tests.data.landing.test_patcher import SIZES, Engine
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.landing.placement import record


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


METAS = [ParamMeta(name, torch.float32, shape) for name, shape in SIZES.items()]


def test_every_written_element_is_counted_fills_included():
    model = Engine(lambda shape: meta(*shape), 1, 2)
    placement = record(model.load_weights, METAS, model.params)
    assert placement.written == {name: one.numel() for name, one in model.params.items()}
    assert placement.sources("qkv") == ("q", "k", "v") and placement.nowhere() == ()
    assert record(model.load_weights, METAS[:1], model.params).written["qkv"] == 24
    assert record(lambda pairs: list(pairs), METAS[:2], {"p": meta(2)}).nowhere() == ("q", "k")


def test_computed_values_are_attributed_and_marked():
    target = {"stack": meta(2, 3), "scale": meta(1)}

    def load(pairs):
        held = dict(pairs)
        target["stack"].copy_(torch.stack([held["a"], held["b"] * 2]))
        target["scale"].fill_(held["s"].item())

    params = [ParamMeta(name, torch.float32, (3,)) for name in "ab"] + [ParamMeta("s", torch.float32, ())]
    placement = record(load, params, target)
    assert [landing.exact for name in "abs" for landing in placement.landings[name]] == [False] * 3
    assert placement.sources("stack") == ("a", "b") and placement.sources("scale") == ("s",)


@pytest.mark.parametrize(
    ("source", "target", "kept"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float16, torch.float32, True),
        (torch.float32, torch.bfloat16, False),
        (torch.float16, torch.bfloat16, False),
        (torch.bfloat16, torch.float16, False),
        (torch.int8, torch.float32, False),
        (torch.int8, torch.int32, True),
        (torch.bool, torch.int8, False),
        (torch.float8_e4m3fn, torch.float8_e4m3fn, True),
    ],
)
def test_a_cast_is_lossy_only_where_values_are_lost(source, target, kept):
    own = {"p": meta(4, dtype=target)}
    placement = record(
        lambda pairs: [own["p"].copy_(tensor) for _, tensor in pairs], [ParamMeta("w", source, (4,))], own
    )
    lossy = [] if kept else [("w", "p")]
    assert [(param.name, landing.param) for param, landing in placement.lossy()] == lossy


@pytest.mark.parametrize("spread", [lambda tensor: tensor.expand(4, 3), lambda tensor: tensor.unfold(0, 2, 1)])
def test_copy_to_several_places_is_not_an_exact_landing(spread):
    source = ParamMeta("scale", torch.float32, (3,))
    target = meta(*spread(torch.empty(3)).shape)
    placement = record(lambda pairs: [target.copy_(spread(tensor)) for _, tensor in pairs], [source], {"own": target})
    (landing,) = placement.landings["scale"]
    assert not landing.exact and landing.param == "own" and placement.written["own"] == target.numel()
