"""Checkpoints that go into a bucket while their tensors come, with no disk and with a bounded number of bytes."""

from __future__ import annotations

import json
import time
import uuid
import weakref
from contextlib import contextmanager

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_ext.errors import StoreError
from torchrl_ext.stores.object import ObjectStore
from torchrl_ext.testing import any_bits, same_bits
from torchrl_ext.types import ParamMeta
from torchrl_ext.versions import checkpoint_writer
from torchrl_ext.versions.checkpoint_reader import PublishedVersion
from torchrl_ext.versions.checkpoint_writer import FullWriter
from torchrl_ext.versions.tensor_writer import append_shards, plan_appended
from torchrl_ext.weights.source import MappingSource

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.int64)
MODELS = st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from([0, 1, 3, 50, 999])), max_size=20)


@settings(deadline=None)
@given(MODELS, st.sampled_from([1, 500, 100_000]), st.sampled_from([1, 3]), st.sampled_from([1, 200]))
def test_any_model_comes_back_from_files_that_the_reference_library_reads(model, shard_bytes, lanes, part_bytes):
    own = {f"t{n}": any_bits(dtype, size, seed=n) for n, (dtype, size) in enumerate(model)}
    params = [ParamMeta.of(name, tensor) for name, tensor in own.items()]
    shards = plan_appended(params, shard_bytes, lanes, part_bytes)
    for shard in shards:
        assert len(shard.params) <= 1 or sum(meta.nbytes for meta in shard.params) <= shard_bytes
    store, found = ObjectStore(f"memory://{uuid.uuid4().hex}"), {}
    with store.draft("v") as draft:
        pairs = iter([(meta, own[meta.name]) for meta in params])
        append_shards(draft, shards, pairs, lanes=lanes, in_flight_bytes=100)
    assert store.sizes("v") == {shard.name: shard.nbytes for shard in shards}
    for shard in shards:
        found |= safetensors.torch.load(store.get(f"v/{shard.name}"))
    assert found.keys() == own.keys() and all(same_bits(found[name], own[name]) for name in own)


class Slow(ObjectStore):
    """A bucket into which bytes go more slowly than a source yields them, or at some point not at all."""

    left = 1 << 60

    @contextmanager
    def append(self, key):
        with super().append(key) as append:

            def slowly(data):
                self.left -= len(data)
                if self.left < 0:
                    raise StoreError("the connection was reset")
                time.sleep(0.001)
                append(data)

            yield slowly


class Live(MappingSource):
    """Counts the bytes of the tensors that it yielded and that still exist."""

    live = most = 0

    def __iter__(self):
        for name, tensor in super().__iter__():
            fresh = tensor.clone()
            self.live += fresh.nbytes
            self.most = max(self.most, self.live)
            weakref.finalize(fresh, self._gone, fresh.nbytes)
            yield name, fresh
            del fresh

    def _gone(self, nbytes):
        self.live -= nbytes


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "PART_BYTES", 10_000)
    monkeypatch.setattr(checkpoint_writer, "_LANES", 3)
    return Slow(f"memory://{uuid.uuid4().hex}/root")


def test_a_trainer_holds_a_bounded_number_of_bytes_that_were_not_uploaded(slow):
    own = {f"t{n}": any_bits(torch.bfloat16, 2000, seed=n) for n in range(100)}
    source = Live(own)
    with slow.draft("weight_v000001") as draft:
        manifest = FullWriter(1 << 30).write(draft, source, 1, "r")
    assert source.most <= 3 * 10_000 + 2 * 4000 < sum(tensor.nbytes for tensor in own.values()) / 5
    index = json.loads(slow.get("weight_v000001/model.safetensors.index.json"))
    assert index["weight_map"] == {placed.meta.name: placed.file for placed in manifest.params}
    assert len(set(index["weight_map"].values())) == 3
    found = dict(PublishedVersion(slow, 1).pairs({}))
    assert all(same_bits(found[name], own[name]) for name in own)


@pytest.mark.parametrize("left", [0, 1000, 50_000, 119_000])
def test_an_upload_that_fails_leaves_nothing_and_the_next_one_succeeds(slow, left):
    source = MappingSource({f"t{n}": any_bits(torch.bfloat16, 2000, seed=n) for n in range(30)})
    slow.left = left
    with pytest.raises(StoreError, match="the connection was reset"), slow.draft("weight_v000001") as draft:
        FullWriter(1 << 30).write(draft, source, 1, "r")
    assert slow.list() == []
    slow.left = 1 << 60
    with slow.draft("weight_v000001") as draft:
        FullWriter(1 << 30).write(draft, source, 1, "r")
    PublishedVersion(slow, 1).verify()
