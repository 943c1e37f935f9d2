"""What a source makes of modules, TensorDicts and mappings."""

import itertools

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictParams
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import torchrl_ext as tx
from torchrl_ext.base.errors import ConfigError, ManifestError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.update_source import UpdateSource
from torchrl_ext.data.weights.derived import MappedSource, as_source
from torchrl_ext.data.weights.digests import byte_view, position_digest
from torchrl_ext.data.weights.source import MappingSource, WeightSource, checked


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


def test_tied_tensors_travel_once_under_the_modules_name():
    shared = torch.randn(6)
    assert names({"a": shared, "b": shared[:], "c": shared[:3], "d": shared.view(2, 3)}) == ["a", "c", "d"]
    assert names({"a": torch.empty(0), "b": torch.empty(0), "c": torch.empty(0, 3)}) == ["a", "b", "c"]
    model = nn.ModuleDict({"z_embed": nn.Embedding(5, 3), "a_head": nn.Linear(3, 5, bias=False)})
    model["a_head"].weight = model["z_embed"].weight
    assert names(TensorDict.from_module(model)) == names(model) == ["z_embed.weight"]
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert names(TensorDict.from_module(model)) == sorted(names(model))
    assert names(TensorDictParams(TensorDict.from_module(model).data.clone())) == sorted(names(model))


def test_a_lazy_negative_is_not_tied_to_its_original():
    real, pairs = torch.randn(4), torch.randn(4, dtype=torch.complex64)
    negative, conjugate = torch._neg_view(real), pairs.conj()
    weights = {"a": pairs, "b": conjugate, "c": conjugate.imag, "d": real, "e": negative}
    assert names(weights) == sorted(weights) and MappingSource(weights).tied() == {}
    assert names({"a": negative, "b": negative.view(4)}) == ["a"]


class Raw(WeightSource):
    """Yields tensors as they are, as a source of somebody else may."""

    def __init__(self, weights):
        self.weights = weights

    def params(self):
        return tuple(itertools.starmap(ParamMeta.of, self.weights.items()))

    def __iter__(self):
        return iter(self.weights.items())


def test_lazy_negatives_of_a_foreign_source_arrive_as_changes(tmp_path):
    weights = {name: torch._neg_view(torch.randn(size)) for name, size in (("small", 4), ("large", 1 << 15))}
    held = {name: torch.zeros(tensor.shape) for name, tensor in weights.items()}
    with tx.WeightSender(tx.DeltaTransport(tmp_path), tx.make_engine("inprocess", engine=held)) as sender:
        for _ in range(2):
            assert sender.update_weights(Raw(weights)).verified
            assert all(torch.equal(held[name], tensor) for name, tensor in weights.items())
            for tensor in weights.values():
                tensor += 1


@pytest.mark.parametrize("lazy", [torch._neg_view, torch.conj])
def test_bytes_are_those_of_the_values(lazy):
    tensor = lazy(torch.randn(5, dtype=torch.complex64))
    assert torch.equal(byte_view(tensor), byte_view(tensor.resolve_neg().resolve_conj().clone()))
    assert position_digest(tensor).hex() == position_digest(tensor.resolve_neg().resolve_conj()).hex()


def placeholder():
    """A parameter as DeepSpeed's ZeRO-3 leaves it on a rank."""
    parameter = nn.Parameter(torch.empty(0))
    parameter.ds_id, parameter.ds_numel, parameter.ds_shape = 0, 6, (2, 3)
    return parameter


@pytest.mark.filterwarnings("ignore")  # most of these are betas, or on their way out
@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse_coo.*dense"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr.*dense"),
        (lambda: torch.eye(3).to_mkldnn(), "mkldnn.*dense"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "make it dense"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "jagged.*dense"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "qint8.*dense"),
        (lambda: TwoTensor(torch.ones(3), torch.ones(3)), "TwoTensor.*plain tensors"),
        (nn.UninitializedParameter, "lazy parameter.*run its module"),
        (placeholder, "ZeRO-3.*GatheredParameters"),
        (lambda: torch.ones(3, dtype=torch.complex128), "complex128.*view_as_real"),
        (lambda: torch.ones(3, device="meta"), "meta device.*load"),
    ],
)
def test_what_no_memory_holds_is_refused_by_name(made, said):
    module = nn.ModuleDict({"net": nn.Module()})
    module["net"].register_buffer("weight", made())
    for weights in ({"net": {"weight": made()}}, module):
        with pytest.raises(ManifestError, match=rf"'net\.weight'.*{said}"):
            dict(as_source(weights))
        with pytest.raises(ManifestError, match=r"net\.weight"):
            UpdateSource(as_source(weights))


def test_a_tensordict_has_one_order_whatever_its_own():
    tensors = {"b": torch.zeros(1), "a": {"y": torch.zeros(2), "x": torch.zeros(3)}}
    backwards = {"a": {"x": torch.zeros(3), "y": torch.zeros(2)}, "b": torch.zeros(1)}
    assert names(TensorDict(tensors, [])) == names(TensorDict(backwards, [])) == names(tensors) == ["a.x", "a.y", "b"]
    stack = LazyStackedTensorDict(*(TensorDict({"net": {"weight": torch.zeros(2)}}, []) for _ in range(2)))
    assert names(stack) == ["net.weight"]


@pytest.mark.parametrize(
    ("weights", "error", "word"),
    [
        ({"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)}, ManifestError, r"'a\.b'"),
        ({"a": {"b": 3}}, ManifestError, r"'a\.b' is a int"),
        (TensorDict({"a": torch.zeros(2), "b": "text"}, []), ManifestError, "'b'"),
        *((weights, ConfigError, "no weights") for weights in (None, 3, [torch.zeros(1)], torch.zeros(1))),
    ],
)
def test_other_things_are_no_weights(weights, error, word):
    with pytest.raises(error, match=word):
        names(weights)


def test_names_lose_prefixes_of_compile_and_checkpoint_wrappers():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = nn.Sequential(nn.Linear(2, 2))
    assert names(torch.compile(inner)) == ["0.weight", "0.bias"]
    assert names(nn.Sequential(torch.compile(nn.Linear(2, 2)))) == ["0.weight", "0.bias"]
    assert names(nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))) == ["0.weight", "0.bias"]


def test_casts_and_names_that_cannot_be_are_refused():
    source = MappingSource({"a": torch.zeros(1), "b": torch.zeros(2)})
    with pytest.raises(ManifestError, match="'a' and 'b' both"):
        MappedSource(source, rename=lambda name: "same").params()
    with pytest.raises(ConfigError, match="cannot cast"):
        MappedSource(source, dtype=torch.int8)


@pytest.mark.parametrize(
    ("yielded", "words"),
    [
        ({"b": torch.zeros(2), "a": torch.zeros(2)}, "parameter 0 .*'?b.*a float32"),
        ({"a": torch.zeros(2), "b": torch.zeros(2, 1)}, "parameter 1 .*b float32"),
        ({"a": torch.zeros(2), "b": torch.zeros(2).half()}, "parameter 1 .*b float16"),
        ({"a": torch.zeros(2)}, "parameter 1, .*b float32"),
        ({"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}, "'c'"),
    ],
)
def test_first_parameter_that_differs_from_the_manifest_is_named(yielded, words):
    class Claims(Raw):
        def __iter__(self):
            return iter(yielded.items())

    with pytest.raises(ManifestError, match=words):
        list(checked(Claims({"a": torch.zeros(2), "b": torch.zeros(2)})))
