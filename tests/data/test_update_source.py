"""The digests of an update, which each end takes once; and values that are not finite, which refuse it."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import torchrl_ext as tx
from tests.data.deltas.data import random_bits
from tests.data.weights.ranks import Passing
from tests.lag.device import waits
from torchrl_ext.base.errors import ManifestError, UpdateError
from torchrl_ext.base.registry import encodings
from torchrl_ext.data.landing.loader import TensorsLoader
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.local import LocalStore
from torchrl_ext.data.update_source import UpdateSource
from torchrl_ext.data.versions.full import FullWriter
from torchrl_ext.data.versions.owned import Owned
from torchrl_ext.data.versions.reader import ChainReader
from torchrl_ext.data.versions.writer import ChainWriter
from torchrl_ext.data.weights.blocks import Block, Shard
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.data.weights.digests import digests_of
from torchrl_ext.data.weights.source import FiniteCheck, MappingSource, checked
from torchrl_ext.sync.local.inprocess import InProcessEngine


def tensors():
    generator, dtypes = torch.Generator().manual_seed(0), (torch.float32, torch.bfloat16, torch.uint8)
    made = [random_bits(40 * (n + 1), dtypes[n % 3], generator).reshape(4, -1) for n in range(12)]
    return {f"w{number:02}": tensor for number, tensor in enumerate(made)}


def digests(own):
    return {name: one.hex() for name, one in digests_of(own).items()}


@pytest.mark.parametrize("make", [as_source, lambda held: Passing(as_source(held))], ids=["held", "gathered"])
def test_digests_of_an_update_are_waited_for_once(make, lag):
    own = tensors()
    expected = digests(make(own))
    with torch.Stream(lag):
        held = {name: tensor.to(lag) for name, tensor in own.items()}
        source = UpdateSource(make(held))
        digests_of(held)  # takes the keys to the device
        source.digest(True)
        before = waits()
        for _ in source:
            pass
        assert waits() == before
        assert source.digests == expected
        assert waits() == before + 1
    assert set(expected) == set(own)


def test_what_is_held_is_digested_before_it_is_sent():
    own = tensors()
    source = UpdateSource(as_source(own))
    source.digest(True)
    assert source.digests == digests(own)
    source.digest(False)
    assert not source.digests
    source = UpdateSource(Passing(as_source(own)))
    source.digest(True)
    assert not source.digests


def test_a_model_on_a_device_is_read_back_with_one_wait(lag):
    own = tensors()
    with torch.Stream(lag):
        loader = TensorsLoader({name: tensor.to(lag) for name, tensor in own.items()})
        for _ in range(2):  # the first time keys go to the device
            before = waits()
            assert loader.digests() == digests(own)
        assert waits() == before + 1


def test_a_keyframe_from_a_device_is_waited_for_twice(tmp_path, lag):
    """Once for the copies, once for the digests, however many tensors it has."""
    for count in (4, 16):
        own = {f"w{number:02}": torch.full((1024 // count,), float(number)) for number in range(count)}
        with torch.Stream(lag):
            held = MappingSource({name: tensor.to(lag) for name, tensor in own.items()})
            for run in "ab":  # the first time keys go to the device
                (tmp_path / f"{count}{run}").mkdir()
                store = LocalStore(tmp_path / f"{count}{run}")
                owner = Owned(encodings.make("ulp"), FullWriter(1 << 20))
                settings = {"keyframe_every": 0, "base": None, "keep_files": True}
                writer, before = ChainWriter(Chain(store, run), owner, **settings), waits()
                writer.publish(held, 1)
                taken = waits() - before
        reader = ChainReader(Chain(store))
        assert all(torch.equal(tensor, own[name]) for name, tensor in reader.tensors(reader.open(1), {}))
        assert [bytes(one).hex() for one in owner.digests.astype(">u8")] == [*digests(own).values()]
        assert taken == 2


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
