"""The digests of an update: when each end takes them, and how often it waits for a device."""

from __future__ import annotations

import pytest
import torch

from tests.data.deltas.data import random_bits
from tests.data.weights.ranks import Passing
from tests.lag.device import waits
from torchrl_ext.base.registry import encodings
from torchrl_ext.data.landing.loader import TensorsLoader
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.local import LocalStore
from torchrl_ext.data.update_source import UpdateSource
from torchrl_ext.data.versions.full import FullWriter
from torchrl_ext.data.versions.owned import Owned
from torchrl_ext.data.versions.reader import ChainReader
from torchrl_ext.data.versions.writer import ChainWriter
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.data.weights.digests import digests_of
from torchrl_ext.data.weights.source import MappingSource


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
                writer, before = ChainWriter(store, Chain(store), run, owner, **settings), waits()
                writer.publish(held, 1)
                taken = waits() - before
        reader = ChainReader(Chain(store))
        assert all(torch.equal(tensor, own[name]) for name, tensor in reader.tensors(reader.open(1), {}))
        assert [bytes(one).hex() for one in owner.digests.astype(">u8")] == [*digests(own).values()]
        assert taken == 2
