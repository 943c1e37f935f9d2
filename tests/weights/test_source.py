"""What a source makes of modules, TensorDicts and mappings."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from torch import nn

from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.testing import same_bits
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.derived import MappedSource, as_mapper
from torchrl_ext.weights.source import MappingSource, ModuleSource, WeightSource, as_source, checked


def names(weights):
    return [meta.name for meta in as_source(weights).params()]


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))


def test_a_module_gives_parameters_then_persistent_buffers():
    model = nn.Sequential(Buffered(), nn.Linear(2, 2))
    assert names(model) == ["0.weight", "1.weight", "1.bias", "0.kept"]
    assert set(names(model)) == set(model.state_dict())


def test_values_are_those_of_the_moment_and_carry_no_gradient():
    model = nn.Linear(2, 2)
    source = as_source(model)
    dict(source)
    with torch.no_grad():
        model.weight.fill_(7)
    found = dict(source)["weight"]
    assert not found.requires_grad
    assert bool((found == 7).all())


def test_tensors_tied_by_memory_alone_travel_once():
    shared = torch.randn(6)
    assert names({"a": shared, "b": shared[:], "c": shared[:3], "d": shared.view(2, 3)}) == ["a", "c", "d"]
    embed, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight.data = embed.weight.data
    assert names(nn.Sequential(embed, head)) == ["0.weight"]


def test_empty_tensors_are_never_taken_for_tied():
    assert names({"a": torch.empty(0), "b": torch.empty(0), "c": torch.empty(0, 3)}) == ["a", "b", "c"]


def test_a_tensordict_has_one_order_whatever_its_own():
    tensors = {"b": torch.zeros(1), "a": {"y": torch.zeros(2), "x": torch.zeros(3)}}
    backwards = {"a": {"x": torch.zeros(3), "y": torch.zeros(2)}, "b": torch.zeros(1)}
    assert names(TensorDict(tensors, [])) == names(TensorDict(backwards, [])) == names(tensors) == ["a.x", "a.y", "b"]


def test_a_tensordict_of_a_module_has_the_modules_names():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert names(TensorDict.from_module(model)) == sorted(names(model))
    assert names(TensorDictParams(TensorDict.from_module(model).data.clone())) == sorted(names(model))


def test_data_that_is_no_tensor_in_a_tensordict_is_no_weight():
    assert names(TensorDict({"a": torch.zeros(2), "text": "hello"}, [])) == ["a"]


def test_two_keys_that_join_to_one_name_are_refused():
    with pytest.raises(ManifestError, match=r"two tensors are called 'a\.b'"):
        names({"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)})


def test_a_leaf_that_is_no_tensor_is_named():
    with pytest.raises(ManifestError, match=r"'a\.b' is a int"):
        names({"a": {"b": 3}})


def test_names_lose_what_compile_and_checkpointing_wrap_around_them():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = nn.Sequential(nn.Linear(2, 2))
    assert names(torch.compile(inner)) == ["0.weight", "0.bias"]
    assert names(nn.Sequential(torch.compile(nn.Linear(2, 2)))) == ["0.weight", "0.bias"]
    assert names(nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))) == ["0.weight", "0.bias"]


def test_a_source_holds_a_module_only_while_it_is_held():
    model = nn.Linear(2, 2)
    source, reference = as_source(model), weakref.ref(model)
    dict(source)
    del source, model
    gc.collect()
    assert reference() is None


def test_a_source_stays_as_it_is_and_a_path_is_a_checkpoint(tmp_path):
    source = MappingSource({})
    assert as_source(source) is source
    with pytest.raises(ConfigError, match="no checkpoint directory"):
        as_source(tmp_path / "nowhere")
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert isinstance(as_source(str(tmp_path)), CheckpointSource)


@pytest.mark.parametrize("weights", [None, 3, [torch.zeros(1)], torch.zeros(1)])
def test_what_holds_no_weights_is_refused(weights):
    with pytest.raises(ConfigError, match="holds no weights"):
        as_source(weights)


class TestCast:
    def test_floating_point_tensors_are_cast_and_others_stay(self):
        weights = {"f": torch.randn(3), "h": torch.randn(3).half(), "i": torch.arange(3), "b": torch.ones(3).bool()}
        source = MappedSource(MappingSource(weights), dtype=torch.bfloat16)
        found = {meta.name: meta.dtype for meta in source.params()}
        assert found == {"f": torch.bfloat16, "h": torch.bfloat16, "i": torch.int64, "b": torch.bool}
        for meta, tensor in checked(source):
            assert same_bits(tensor, weights[meta.name].to(meta.dtype))

    def test_a_cast_to_integers_is_refused(self):
        with pytest.raises(ConfigError, match="cannot cast weights"):
            MappedSource(MappingSource({}), dtype=torch.int8)

    def test_tensors_that_need_no_cast_stay_held(self):
        source = MappingSource({"a": torch.ones(3), "b": torch.ones(3, dtype=torch.int64)})
        assert set(MappedSource(source, dtype=torch.bfloat16).held()) == {"b"}
        assert set(MappedSource(source, dtype=torch.float32).held()) == {"a", "b"}
        assert set(MappedSource(source, rename=lambda name: "x." + name).held()) == {"x.a", "x.b"}


class TestRenamed:
    def test_megatron_names_become_checkpoint_names(self):
        mapper = as_mapper(
            {
                r"module\.module\.embedding\.word_embeddings\.weight": r"model.embed_tokens.weight",
                r"module\.module\.decoder\.layers\.(\d+)\.self_attention\.linear_proj\.(weight|bias)": (
                    r"model.layers.\1.self_attn.o_proj.\2"
                ),
                r"module\.module\.decoder\.layers\.(\d+)\.mlp\.linear_fc2\.weight": (
                    r"model.layers.\1.mlp.down_proj.weight"
                ),
                r"module\.module\.decoder\.final_layernorm\.weight": "model.norm.weight",
                r"module\.module\.output_layer\.weight": "lm_head.weight",
            }
        )
        megatron = {
            "module.module.embedding.word_embeddings.weight": "model.embed_tokens.weight",
            "module.module.decoder.layers.0.self_attention.linear_proj.bias": "model.layers.0.self_attn.o_proj.bias",
            "module.module.decoder.layers.11.mlp.linear_fc2.weight": "model.layers.11.mlp.down_proj.weight",
            "module.module.decoder.final_layernorm.weight": "model.norm.weight",
            "module.module.output_layer.weight": "lm_head.weight",
            "module.module.output_layer.weight_scale": "module.module.output_layer.weight_scale",
        }
        tensors = {name: torch.full((2,), float(i)) for i, name in enumerate(megatron)}
        source = MappedSource(MappingSource(tensors), rename=mapper)
        found = {meta.name: tensor for meta, tensor in checked(source)}
        assert set(found) == set(megatron.values())
        for name, mapped in megatron.items():
            assert same_bits(found[mapped], tensors[name])

    def test_two_names_that_meet_are_refused(self):
        source = MappedSource(MappingSource({"a": torch.zeros(1), "b": torch.zeros(2)}), rename=lambda name: "same")
        with pytest.raises(ManifestError, match="'a' and 'b' both map to 'same'"):
            source.params()

    def test_a_pattern_that_is_none_is_refused(self):
        with pytest.raises(ConfigError, match="is no regular expression"):
            as_mapper({"(": "x"})

    def test_the_first_pattern_that_matches_the_whole_name_wins(self):
        mapper = as_mapper({"a": "1", "a.*": "2", ".*": "3"})
        assert [mapper(name) for name in ("a", "ab", "ba")] == ["1", "2", "3"]


class Claims(WeightSource):
    """Says one thing and yields another."""

    def __init__(self, said, yielded):
        self.said, self.yielded = said, yielded

    def params(self):
        return tuple(ParamMeta.of(name, tensor) for name, tensor in self.said)

    def __iter__(self):
        return iter(self.yielded)


A, B, C = ("a", torch.zeros(2)), ("b", torch.zeros(3)), ("c", torch.zeros(4))


@pytest.mark.parametrize(
    ("yielded", "said"),
    [
        ([A, C, B], r"parameter 1 of the source is c .*Expected: b"),
        ([A, ("b", torch.zeros(3, 1)), C], r"parameter 1 of the source is b float32\[3, 1\].*Expected: b float32\[3\]"),
        ([A, ("b", torch.zeros(3).half()), C], r"b float16\[3\]"),
        ([A, B], r"ended before parameter 2, 'c'"),
        ([A, B, C, ("d", torch.zeros(1))], r"yields 'd' after its last"),
    ],
    ids=["order", "shape", "dtype", "missing", "extra"],
)
def test_the_first_parameter_that_differs_from_the_manifest_is_named(yielded, said):
    with pytest.raises(ManifestError, match=said):
        list(checked(Claims([A, B, C], yielded)))


def test_an_honest_source_passes():
    assert [meta.name for meta, _ in checked(Claims([A, B, C], [A, B, C]))] == ["a", "b", "c"]
    assert list(checked(ModuleSource(nn.Identity()))) == []


def test_a_tensordict_of_a_module_sends_tied_tensors_under_the_modules_name():
    model = nn.ModuleDict({"z_embed": nn.Embedding(5, 3), "a_head": nn.Linear(3, 5, bias=False)})
    model["a_head"].weight = model["z_embed"].weight
    assert names(TensorDict.from_module(model)) == names(model) == ["z_embed.weight"]
