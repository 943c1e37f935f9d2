"""What every source of weights keeps: passes, parts, held tensors, ties and shards are those of what it declares."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from tests.data.weights.ranks import Passing, Policy
from tests.models import converted_model, tiny_model
from torchrl_ext.base.errors import ManifestError
from torchrl_ext.data.weights.blocks import Block, checked_shards
from torchrl_ext.data.weights.derived import MappedSource, as_source
from torchrl_ext.data.weights.source import MappingSource, checked
from torchrl_ext.testing import same_bits


def adapted():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "embed_tokens"], r=2, init_lora_weights=False)
    return peft.get_peft_model(tiny_model(tie_word_embeddings=True), config)


def lazily():
    real, pairs = torch.randn(4), torch.randn(4, dtype=torch.complex64)
    return {"pairs": pairs, "conjugate": pairs.conj(), "a": {"real": real, "negative": torch._neg_view(real)}}


MODULES = {
    "module": Policy,
    "inside": lambda: nn.ModuleDict({"policy": converted_model("mixtral"), "value": nn.Linear(2, 1)}),
    "parts": lambda: converted_model("qwen3_moe"),
    "copies": lambda: converted_model("hrm_text"),
    "renamed": lambda: converted_model("qwen2_5_vl", tie_word_embeddings=True),
    "adapted": adapted,
}
OTHERS = {
    "mapping": lambda folder: MappingSource(lazily()),
    "tensordict": lambda folder: as_source(TensorDict.from_module(Policy())),
    "cast": lambda folder: MappedSource(as_source(Policy()), rename=lambda name: f"p.{name}", dtype=torch.bfloat16),
    "passing": lambda folder: Passing(MappingSource(lazily())),
    "checkpoint": lambda folder: tiny_model().save_pretrained(folder, max_shard_size="200KB") or as_source(folder),
}


@pytest.fixture(params=[*MODULES, *OTHERS])
def source(request, tmp_path):
    made = MODULES.get(request.param)
    return OTHERS[request.param](tmp_path) if made is None else as_source(made())


def passed(source):
    return {meta.name: tensor.clone() for meta, tensor in checked(source)}


def same(found, expected):
    """True; an assertion names what differs."""
    assert [*found] == [*expected]
    assert all(same_bits(found[name], expected[name]) for name in expected)
    return True


def test_each_pass_gives_what_is_declared(source):
    first = passed(source)
    for _, tensor in source:
        assert type(tensor) is torch.Tensor and not tensor.requires_grad
    next(iter(source))  # a pass that stops early leaves nothing behind
    assert same(passed(source), first) and [*first] == [meta.name for meta in source.params()]


def test_a_part_has_its_names_in_order(source):
    whole = passed(source)
    for names in ([*whole][::2], [*whole][-1:], []):
        expected = {name: tensor for name, tensor in whole.items() if name in names}
        assert same(dict(source.pairs(frozenset(names))), expected)


def test_held_tensors_are_what_a_pass_gives_in_one_memory(source):
    whole, held = passed(source), source.held()
    assert held.keys() <= whole.keys()
    assert same(dict(held), {name: whole[name] for name in held})
    again = source.held()
    assert all(again[name].data_ptr() == tensor.data_ptr() for name, tensor in held.items())


def test_shards_that_are_taken_in_order_are_a_pass(source):
    whole = passed(source)
    shards = [shard for _, own in checked_shards(source.shards(), source.params()) for shard in own]
    assert all(shard.block == Block.whole(shard.meta.shape) and bool(shard.why) == shard.gathers for shard in shards)
    found = {shard.meta.name: shard.take().to(shard.meta.dtype) for shard in shards}
    assert same(found, {name: tensor for name, tensor in whole.items() if tensor.numel() or name in found})


def test_shard_taken_out_of_order_gives_no_other_tensor():
    source = Passing(MappingSource({"a": torch.zeros(2), "b": torch.ones(0)}))
    _, second = source.shards()
    with pytest.raises(ManifestError, match=r"b.* out of order"):
        second.take()
    assert [shard.take().numel() for shard in source.shards()] == [2, 0]


def test_tied_names_are_not_sent_and_name_what_is(source):
    names, tied = {meta.name for meta in source.params()}, source.tied()
    assert not tied.keys() & names and {*tied.values()} <= names


@pytest.mark.parametrize("kind", MODULES)
def test_values_are_those_of_now_and_held_ones_live_memory(kind):
    model = MODULES[kind]()
    source, shards = as_source(model), [*as_source(model).shards()]
    live = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    held, before = source.held(), passed(source)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-2)
    after = passed(source)
    assert not any(torch.equal(after[name], before[name]) for name in after if before[name].abs().sum() > 3)
    assert same(dict(held), {name: after[name] for name in held})
    for tensor in (*held.values(), *(shard.take() for shard in shards if not shard.gathers)):
        assert not tensor.numel() or tensor.untyped_storage().data_ptr() in live


def test_which_tensors_only_a_copy_makes():
    assert not any(as_source(MODULES["parts"]()).held().keys() ^ dict(as_source(MODULES["parts"]())).keys())
    source = as_source(MODULES["copies"]())
    left = {meta.name for meta in source.params()} - set(source.held())
    assert left and all("gqkv" in name or "gate_up" in name for name in left)
    assert left == {shard.meta.name for shard in source.shards() if shard.gathers and "combines several" in shard.why}
