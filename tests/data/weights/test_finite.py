"""A NaN or an infinity in the weights: when an update is refused, and what is left as it is."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import torchrl_ext as tx
from tests.data.weights.ranks import Passing
from tests.lag.device import waits
from torchrl_ext.base.errors import ManifestError, UpdateError
from torchrl_ext.data.update_source import UpdateSource
from torchrl_ext.data.weights.blocks import Block, Shard
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.data.weights.source import FiniteCheck, MappingSource, checked
from torchrl_ext.sync.local.inprocess import InProcessEngine

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2]


def spoilt(value=float("nan")):
    policy = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    with torch.no_grad():
        policy[1].weight.view(-1)[-1] = value
    return policy


@pytest.mark.parametrize("gathered", [False, True])
def test_a_refusal_leaves_the_engine_as_it_is(gathered):
    served, policy, transport = spoilt(0.0), spoilt(float("-inf")), tx.MemoryTransport()
    sender = tx.WeightSender(transport, InProcessEngine(served))
    with pytest.raises(UpdateError if gathered else ManifestError, match=r"infinity in '1\.weight'"):
        sender.update_weights(Passing(as_source(policy)) if gathered else policy)
    assert served[1].weight.isfinite().all()
    assert gathered or transport.latest_version() == 0  # refused before anything began
    assert sender.update_weights(spoilt(2.0)).verified
    assert served[1].weight.view(-1)[-1] == 2.0
    assert sender.update_weights(spoilt(), only="0.weight").part  # tensors that are not sent may be anything


class Halves(MappingSource):
    """Holds one tensor, of four elements, as two blocks."""

    def shards(self):
        ((meta, tensor),) = checked(self)
        for half in (slice(0, 2), slice(2, 4)):
            yield Shard(meta, Block((half.start,), (half.stop,)), lambda half=half: tensor[half])


def checked_shards(weight, **settings):
    source = UpdateSource(Halves({"weight": weight}), **settings)
    source.only = frozenset()  # which leaves all to the passes
    source.require_finite()
    return source.shards()


def test_blocks_are_looked_at_as_they_are_cast():
    large = torch.tensor([0.0, 1.0, 2.0, 1e6])
    first, second = checked_shards(large, dtype=torch.float16)
    first.take()
    with pytest.raises(ManifestError, match="'weight'"):
        second.take()
    assert [shard.take().dtype for shard in checked_shards(large)] == [torch.float32] * 2


def test_only_values_that_are_not_finite_are_found():
    for dtype, shape in itertools.product(DTYPES, [(), (1,), (7, 11), (0, 3)]):
        most = torch.finfo(dtype).max
        for value in (most, -most, torch.nan, torch.inf, -torch.inf):
            tensor = torch.full(shape, most, dtype=dtype)
            if tensor.numel():
                tensor.view(-1)[-1] = value
            found = nullcontext() if not tensor.numel() or abs(value) == most else pytest.raises(ManifestError)
            with found:
                FiniteCheck().add("w", tensor.mT if tensor.ndim > 1 else tensor)
    check = FiniteCheck()
    check.add("integers", torch.full((3,), 7))
    check.add("fp8", torch.full((3,), 448.0).to(torch.float8_e4m3fn))
    check.add("fp4", torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))


@pytest.mark.parametrize("bad", [None, "3", "7"])
def test_a_device_is_waited_for_once_for_all_tensors(lag, bad):
    tensors = {f"{number}": torch.full((3,), 65504.0, dtype=torch.float16) for number in range(9)}
    for name in filter(None, (bad, bad and "8")):
        tensors[name][1] = torch.inf
    with torch.Stream(lag):
        check, held = FiniteCheck(), {name: tensor.to(lag).clone() for name, tensor in tensors.items()}
        before = waits()
        for name, tensor in held.items():
            check.add(name, tensor)
        assert waits() == before
        with nullcontext() if bad is None else pytest.raises(ManifestError, match=f"in '{bad}'"):
            check.settle()
        assert waits() == before + 1
