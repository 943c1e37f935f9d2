"""What every store does: a directory, a dictionary, fsspec's memory filesystem, and an S3-compatible server."""

import uuid

import pytest
from s3fs import S3FileSystem

from tests.data.transports.test_contract import free_port
from torchrl_ext.base.errors import ConfigError, IntegrityError, StoreError
from torchrl_ext.data.stores.opening import open_store
from torchrl_ext.data.stores.store import MemoryStore


@pytest.fixture(params=["a directory", "a dictionary", "memory", "s3"])
def store(request):
    if request.param == "a directory":
        return open_store(request.getfixturevalue("tmp_path") / "root")
    if request.param == "a dictionary":
        return MemoryStore()
    if request.param == "s3":
        request.getfixturevalue("s3")
    return open_store(f"{request.param}://bucket/{uuid.uuid4().hex}")


def test_values_come_back_are_listed_and_go(store):
    assert store.list() == [] and store.list("a") == []
    store.put("a/one", b"1")
    store.put("a/.hidden", b"2")
    store.put("a/b/deep", b"")
    assert store.get("a/b/deep") == b""
    store.put("b", b"3")
    store.put("a/one", b"4")
    assert store.get("a/one", at_most=1) == b"4"
    with pytest.raises(IntegrityError, match="at most 0"):
        store.get("a/one", at_most=0)
    assert (store.list(), store.list("a")) == (["a", "b"], ["b", "one"])
    store.delete("a")
    store.delete("a")
    assert store.list() == ["b"] and store.available()
    with pytest.raises(FileNotFoundError):
        store.get("a/one")


@pytest.mark.parametrize("key", ["..", "../x", "a/../../x", "/etc/passwd", "a//b", "./a", "a\\b", "a\0b"])
def test_keys_that_lead_out_of_the_store_are_refused(store, key):
    for call in (store.get, store.open, store.delete, lambda key: store.put(key, b"")):
        with pytest.raises(StoreError, match="is not a name inside a store"):
            call(key)


def test_parts_of_values_come_back(store):
    store.put("a/b", bytes(range(100)))
    assert store.ranges("a/b", [(3, 2), (98, 10)]) == [b"\3\4", b"bc"]
    assert store.ranges("a/b", []) == []
    opened, buffer = store.open("a/b"), bytearray(10)
    assert opened.nbytes == 100
    for offset, expected in ((0, 10), (5, 10), (97, 3), (90, 10), (100, 0), (3, 10)):
        assert opened.read_into(memoryview(buffer), offset) == expected
        assert buffer[:expected] == bytes(range(offset, offset + expected))
    opened.close()
    for read in (store.open, lambda key: store.ranges(key, [(0, 1)])):
        with pytest.raises(FileNotFoundError):
            read("a/c")


def test_a_draft_is_there_as_a_whole_or_not_at_all(store):
    def write(draft):
        draft.write("one", b"1")
        draft.write("two", b"2")

    store.own()
    with pytest.raises(ValueError, match="half-way"), store.draft("weight_v000001") as draft:
        write(draft)
        raise ValueError("half-way")
    assert store.list() == store.list("weight_v000001") == []
    with store.draft("weight_v000001") as draft:  # another attempt under the same number
        write(draft)
        draft.write("manifest.json", b"{}")
    assert store.list("weight_v000001") == ["manifest.json", "one", "two"]
    assert store.get("weight_v000001/two") == b"2"
    with pytest.raises(StoreError, match="exists already"), store.draft("weight_v000001"):
        raise AssertionError("the block ran")
    store.disown()


@pytest.mark.parametrize("store", ["a directory", "memory", "s3"], indirect=True)
def test_files_in_a_drafts_directory_belong_to_it(store):
    store.own()
    with pytest.raises(ValueError, match="half-way"), store.draft("folder") as draft:
        (draft.path / "large").write_bytes(b"24")
        draft.write("config.json", b"{}")
        raise ValueError("half-way")
    assert store.list() == []
    with store.draft("folder") as draft:
        (draft.path / "large").write_bytes(b"24")
        draft.write("manifest.json", b"3")
    assert store.list("folder") == ["large", "manifest.json"] and store.get("folder/large") == b"24"
    store.disown()


def test_addresses_that_cannot_be_used_are_named(monkeypatch):
    monkeypatch.setattr(S3FileSystem, "cachable", False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    store = open_store(f"s3://bucket/{uuid.uuid4().hex}")
    with pytest.raises(StoreError, match="s3://bucket/"):
        store.put("a", b"1")
    assert not store.available()
    with pytest.raises(ConfigError, match="nonsense"):
        open_store("nonsense://x")
