"""Placements of loaders that do what engines' loaders do."""

import pytest
import torch

from torchrl_ext.errors import ManifestError
from torchrl_ext.landing.placement import keeps_values, record
from torchrl_ext.types import ParamMeta


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def replay(placement, tensors, targets):
    """Apply a placement by strides alone, as a reader of it would."""
    for name, landings in placement.landings.items():
        for landing in landings:
            assert landing.exact
            source = landing.source.of(tensors[name])
            target = targets[landing.param]
            landing.target.of(target).copy_(source)


class Fused:
    """Query and key stacked in one parameter, rank 1 of 2; an embedding padded with zeros; a transposed one."""

    def __init__(self, make):
        self.params = {"qk": make(8, 6), "embed": make(5, 6), "turned": make(6, 3)}

    def load_weights(self, pairs):
        for name, tensor in pairs:
            if name in ("q", "k"):
                at = 0 if name == "q" else 4
                self.params["qk"].data[at : at + 4].copy_(tensor.narrow(0, 4, 4))
            elif name == "embed":
                self.params["embed"][:3].data.copy_(tensor)
                self.params["embed"][3:].data.fill_(0)
            elif name == "turned":
                self.params["turned"].data.copy_(tensor.t())
            else:
                raise KeyError(name)


PARAMS = [
    ParamMeta("q", torch.float32, (8, 6)),
    ParamMeta("k", torch.float32, (8, 6)),
    ParamMeta("embed", torch.float32, (3, 6)),
    ParamMeta("turned", torch.float32, (3, 6)),
]


def test_a_replayed_placement_equals_the_loaders_own_work():
    on_meta = Fused(meta)
    placement = record(on_meta.load_weights, PARAMS, on_meta.params)
    tensors = {param.name: torch.randn(param.shape) for param in PARAMS}
    loaded, replayed = Fused(torch.zeros), Fused(torch.zeros)
    loaded.load_weights(tensors.items())
    replay(placement, tensors, replayed.params)
    for name, tensor in loaded.params.items():
        assert torch.equal(tensor, replayed.params[name])


def test_every_written_element_is_counted_fills_included():
    model = Fused(meta)
    placement = record(model.load_weights, PARAMS, model.params)
    assert placement.written == {"qk": 48, "embed": 30, "turned": 18}
    assert placement.sources("qk") == ("q", "k")
    assert placement.nowhere() == ()


def test_a_missing_source_leaves_elements_unwritten():
    model = Fused(meta)
    assert record(model.load_weights, PARAMS[:1], model.params).written["qk"] == 24


def test_an_unknown_name_is_refused_with_the_loaders_words():
    model = Fused(meta)
    with pytest.raises(ManifestError, match=r"stranger float32.*KeyError"):
        record(model.load_weights, [ParamMeta("stranger", torch.float32, (1,))], model.params)


def test_another_shape_is_refused_also_where_it_would_broadcast():
    model = Fused(meta)
    with pytest.raises(ManifestError, match="another shape"):
        record(model.load_weights, [ParamMeta("embed", torch.float32, (1, 6))], model.params)


def test_a_name_that_the_loader_ignores_lands_nowhere():
    placement = record(lambda pairs: list(pairs), PARAMS, {"p": meta(2)})
    assert placement.nowhere() == ("q", "k", "embed", "turned")


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


def test_a_cast_on_the_way_is_lossy_only_where_values_are_lost():
    target = {"p": meta(4, dtype=torch.bfloat16)}

    def load(pairs):
        for _, tensor in pairs:
            target["p"].copy_(tensor)

    lossy = record(load, [ParamMeta("w", torch.float32, (4,))], target).lossy()
    assert [(param.name, landing.param) for param, landing in lossy] == [("w", "p")]
    assert not list(record(load, [ParamMeta("w", torch.bfloat16, (4,))], target).lossy())


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
def test_widening_within_a_kind_keeps_values(source, target, kept):
    assert keeps_values(source, target) is kept


def test_a_live_copy_that_a_layer_derives_keeps_its_values():
    """As SGLang's latent attention, which computes with a part of a weight that it copies after loading."""
    weight, derived = meta(4, 6), torch.ones(2, 6)

    def load(pairs):
        for _, tensor in pairs:
            weight.copy_(tensor)
        derived.copy_(weight[:2] * 2)

    placement = record(load, [ParamMeta("w", torch.float32, (4, 6))], {"weight": weight})
    assert [landing.param for landing in placement.landings["w"]] == ["weight"]
    assert torch.equal(derived, torch.ones(2, 6))


@pytest.mark.parametrize("spread", [lambda tensor: tensor.expand(4, 3), lambda tensor: tensor.unfold(0, 2, 1)])
def test_a_copy_that_lands_an_element_in_several_places_is_no_exact_one(spread):
    source = ParamMeta("scale", torch.float32, (3,))
    target = meta(*spread(torch.empty(3)).shape)
    placement = record(lambda pairs: [target.copy_(spread(tensor)) for _, tensor in pairs], [source], {"own": target})
    (landing,) = placement.landings["scale"]
    assert not landing.exact and landing.param == "own" and placement.written["own"] == target.numel()
