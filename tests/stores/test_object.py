"""What every store does; and object stores: a real S3-compatible server, and fsspec's memory filesystem."""

from __future__ import annotations

import uuid

import pytest
import torch
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

import torchrl_ext as tx
from tests.processes import WAIT_S
from tests.transports.test_contract import free_port
from torchrl_ext.errors import ConfigError, StoreError
from torchrl_ext.stores import open_store
from torchrl_ext.stores.chain import Chain
from torchrl_ext.testing import same_bits

ANYWHERE = pytest.mark.parametrize("place", ["s3", "memory", "local"], indirect=True)


@pytest.fixture(params=["s3", "memory"])
def place(request):
    """A root's URL and the options for it."""
    if request.param == "local":
        return request.getfixturevalue("tmp_path"), None
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/root", {}
    return f"s3://bucket/{uuid.uuid4().hex}", request.getfixturevalue("s3")


@pytest.fixture
def store(place):
    return open_store(place[0], place[1])


@ANYWHERE
def test_values_come_back_are_listed_and_go(store):
    assert store.list() == [] and store.list("a") == []
    store.put("a/one", b"1")
    store.put("a/.hidden", b"2")
    store.put("a/b/deep", b"")
    assert (store.get("a/b/deep"), store.sizes("a/b")) == (b"", {"deep": 0})
    store.put("b", b"3")
    store.put("a/one", b"4")
    assert store.get("a/one") == b"4"
    assert (store.list(), store.list("a")) == (["a", "b"], ["b", "one"])
    assert (store.sizes("a"), store.sizes("c")) == ({"one": 1}, {})
    store.delete("a")
    store.delete("a")
    assert store.list() == ["b"]
    with pytest.raises(FileNotFoundError):
        store.get("a/one")
    with pytest.raises(StoreError, match=r"\.\."):
        store.get("../b")
    store.put("a/b", bytes(range(100)))
    assert store.ranges("a/b", [(3, 2), (98, 10)]) == [b"\3\4", b"bc"]
    assert store.ranges("a/b", []) == []
    with pytest.raises(FileNotFoundError):
        store.ranges("a/c", [(0, 1)])


@ANYWHERE
def test_a_draft_is_there_as_a_whole_or_not_at_all_and_other_processes_add_to_it(place):
    store, other = open_store(*place), open_store(*place)
    with pytest.raises(ValueError, match="half-way"), store.draft("weight_v000001") as draft:
        draft.write("one", b"1")
        other.add(draft.place, "delta/two", b"2")
        place = draft.place
        raise ValueError("half-way")
    assert store.list() == store.list("weight_v000001") == []
    for there in (place, "weight_v000001", ".."):
        with pytest.raises(StoreError):
            other.add(there, "late", b"4")
    with store.draft("weight_v000001") as draft:  # another attempt under the same number
        with pytest.raises(StoreError):
            other.add(place, "late", b"4")
        other.add(draft.place, "delta/two", b"2")
        draft.write("manifest.json", b"{}")
        place = draft.place
    with pytest.raises(StoreError):
        other.add(place, "late", b"4")
    assert store.list("weight_v000001") == ["delta", "manifest.json"]
    assert store.get("weight_v000001/delta/two") == b"2"
    with pytest.raises(StoreError, match="exists already"), store.draft("weight_v000001"):
        raise AssertionError("the block ran")


def test_pieces_of_a_draft_are_one_value_or_nothing(store):
    with pytest.raises(ValueError, match="half-way"), store.draft("folder") as draft, draft.append("two") as append:
        append(b"2")
        raise ValueError("half-way")
    assert store.list() == []
    with store.draft("folder") as draft:
        with draft.append("large") as append:
            append(b"2")
            append(memoryview(b"4"))
        draft.write("manifest.json", b"3")
    assert store.get("folder/large") == b"24"


@pytest.mark.parametrize(("place", "encoding"), [("s3", "auto"), ("memory", "xor")], indirect=["place"])
def test_a_chain_is_published_followed_joined_and_collected(place, encoding):
    url, options = place
    trainer, follower = (
        tx.make_transport("delta", root=url, storage_options=options, encoding=encoding, keyframe_every=3)
        for _ in range(2)
    )
    own = {"w": torch.randn(50, 60).bfloat16(), "b": torch.arange(7)}
    for version in range(1, 6):
        trainer.send_weights("policy", own)
        joined = tx.make_transport("delta", root=url, storage_options=options)
        for reader in (follower, joined):
            received = reader.receive_weights(WAIT_S)
            assert reader.received_version == version
            assert all(same_bits(received[name], tensor) for name, tensor in own.items())
        own["w"][torch.rand(50, 60) < 0.05] += 1
    assert trainer.check_connection()
    store = open_store(url, options)
    assert Chain(store).numbers() == [4, 5]


def test_a_new_run_that_got_as_far_in_an_emptied_bucket_is_followed(place):
    url, options = place
    worker = tx.make_transport("delta", root=url, storage_options=options)
    for value in (1.0, 2.0):
        trainer = tx.make_transport("delta", root=url, storage_options=options)
        trainer.send_weights("policy", {"w": torch.full((5,), value)})
        assert worker.receive_weights(0.0)["w"][0] == value
        assert worker.received_version == 1
        assert worker.receive_weights(0.0) is None
        trainer.shutdown()
        store = open_store(url, options)
        for name in store.list():
            store.delete(name)


def test_a_second_trainer_on_a_bucket_is_refused_and_harms_nothing(place):
    url, options = place
    first, second, reader = (tx.make_transport("delta", root=url, storage_options=options) for _ in range(3))
    first.send_weights("policy", {"w": torch.full((5,), 1.0)})
    with pytest.raises(StoreError, match="another trainer publishes into"):
        second.send_weights("policy", {"w": torch.full((5,), 2.0)})
    assert reader.receive_weights(WAIT_S)["w"][0] == 1
    first.shutdown()
    second.send_weights("policy", {"w": torch.full((5,), 2.0)})
    assert reader.receive_weights(WAIT_S)["w"][0] == 2
    assert reader.received_version == 2
    with pytest.raises(StoreError, match="another trainer publishes into"):
        first.send_weights("policy", {"w": torch.full((5,), 3.0)})


class Unlistable(MemoryFileSystem):
    """A bucket whose right to list leases was taken away."""

    protocol = "unlistable"

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.removeprefix("unlistable://"))

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        MemoryFileSystem.pipe_file(self, path, value, mode=mode)

    def ls(self, path, detail=True, **kwargs):
        if path.endswith("/readers"):
            raise PermissionError(path)
        return super().ls(path, detail=detail, **kwargs)


def test_what_cannot_be_collected_stays_and_fails_no_update(caplog):
    register_implementation("unlistable", Unlistable, clobber=True)
    trainer = tx.make_transport("delta", root=f"unlistable://{uuid.uuid4().hex}")
    for value in (1.0, 2.0):
        trainer.send_weights("policy", {"w": torch.full((5,), value)})
    assert "old weights versions stay" in caplog.text
    assert trainer.latest_version() == 2


def test_addresses_that_cannot_be_used_are_named(s3, tmp_path):
    dead = {**s3, "endpoint_url": f"http://127.0.0.1:{free_port()}", "config_kwargs": {"retries": {"max_attempts": 0}}}
    store = open_store("s3://bucket/x", dead)
    with pytest.raises(StoreError, match="s3://bucket/x"):
        store.put("a", b"1")
    with pytest.raises(ConfigError, match="nonsense"):
        open_store("nonsense://x")
    with pytest.raises(ConfigError, match="storage_options"):
        open_store(tmp_path, {"key": "k"})
