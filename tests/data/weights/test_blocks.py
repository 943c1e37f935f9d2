"""Which shards sources without other ranks yield, and which shards are refused."""

from __future__ import annotations

import pytest
import torch

from tests.models import converted_model
from torchrl_ext.base.errors import ManifestError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.weights.blocks import Block, Shard, checked_shards
from torchrl_ext.data.weights.derived import ConvertedSource, as_source
from torchrl_ext.data.weights.hf_names import SameWeights
from torchrl_ext.data.weights.source import MappingSource, WeightSource
from torchrl_ext.data.weights.view import View
from torchrl_ext.sync.update_source import UpdateSource
from torchrl_ext.testing import same_bits


def test_plain_and_expert_tensors_are_views_of_live_memory():
    model = converted_model("qwen3_moe")
    live = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    expected = dict(as_source(model))
    for shard in as_source(model).shards():
        taken = shard.take()
        assert same_bits(taken, expected.pop(shard.meta.name))
        assert taken.untyped_storage().data_ptr() in live
        assert shard.block == Block.whole(taken.shape) and not shard.gathers
    assert not expected


def test_group_of_copied_tensors_is_made_once_at_the_first_take():
    made = []

    def revert(tensors):
        made.append(tensors)
        return torch.cat([*tensors.values()]), torch.cat([*tensors.values()][::-1])

    view, source = View((4,), (1,)), View((2,), (1,))
    group = SameWeights(
        sources={"in.a": source, "in.b": source}, results={"x": view, "y": view}, copied=True, revert=revert
    )
    live = {"in.a": torch.zeros(2), "in.b": torch.ones(2), "kept": torch.ones(3)}
    shards = list(UpdateSource(ConvertedSource(MappingSource(live), [group])).shards())
    assert [(shard.meta.name, shard.gathers) for shard in shards] == [("x", True), ("y", True), ("kept", False)]
    assert "combines several blocks" in shards[0].why
    assert not made
    live["in.a"].fill_(5)
    assert [shard.take().tolist() for shard in shards] == [[5, 5, 1, 1], [1, 1, 5, 5], [1, 1, 1]]
    assert len(made) == 1
    _, second, _ = UpdateSource(ConvertedSource(MappingSource(live), [group])).shards()
    with pytest.raises(ManifestError, match="'y' was taken out of order"):  # and does not give the values of x
        second.take()


class Made(WeightSource):
    def __init__(self):
        self.passes = 0

    def params(self):
        return (ParamMeta("a", torch.float32, (2,)), ParamMeta("b", torch.float32, (0,)))

    def __iter__(self):
        self.passes += 1
        yield "a", torch.ones(2)
        yield "b", torch.ones(0)


def test_custom_source_gives_whole_tensors_in_one_pass():
    source = Made()
    shards = list(UpdateSource(source).shards())
    assert [shard.gathers for shard in shards] == [True, True]
    assert [shard.take().numel() for shard in shards] == [2, 0]
    assert source.passes == 1
    _, second = source.shards()
    with pytest.raises(ManifestError, match=r"b.* out of order"):  # and does not give another tensor
        second.take()


META = ParamMeta("w", torch.float32, (4, 6))
NEXT = ParamMeta("x", torch.float32, ())


def shard(start, stop, meta=META, **how):
    return Shard(meta, Block(start, stop), lambda: torch.zeros(()), **how)


@pytest.mark.parametrize(
    ("shards", "what"),
    [
        ([shard((0, 0), (2, 6)), shard((1, 5), (4, 6))], "share elements: [0:2, 0:6] and [1:4, 5:6]"),
        ([shard((), (), NEXT), shard((), (), NEXT)], "share elements: [] and []"),
        ([shard((0, 0), (5, 6))], "[0:5, 0:6]"),
        ([shard((-1, 0), (2, 6))], "[-1:2, 0:6]"),
        ([shard((0,), (4,))], "[0:4]"),
        ([shard((3, 0), (1, 6))], "empty"),
        ([shard((), (), NEXT), shard((0, 0), (4, 6))], "out of order"),
        ([shard((0, 0), (4, 6), ParamMeta("w", torch.bfloat16, (4, 6)))], "out of order"),
    ],
)
def test_shards_that_are_not_sound_are_refused_by_name(shards, what):
    several, scalar = (shard((2, 0), (4, 3)), shard((0, 3), (4, 6)), shard((0, 0), (2, 3))), shard((), (), NEXT)
    assert list(checked_shards([*several, scalar], [META, NEXT])) == [(META, several), (NEXT, (scalar,))]
    with pytest.raises(ManifestError) as caught:
        list(checked_shards(shards, [META, NEXT]))
    assert what in str(caught.value) and shards[-1].meta.name in str(caught.value)
