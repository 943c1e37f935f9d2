from __future__ import annotations

import os

import pytest

from tests.processes import running_python
from torchrl_ext.errors import StoreError
from torchrl_ext.stores import LocalStore


@pytest.fixture
def store(tmp_path):
    store = LocalStore(tmp_path / "store")
    store.own()
    yield store
    store.disown()


def names(store):
    return sorted(os.listdir(store.root))


def test_what_was_put_can_be_got_listed_and_deleted(store):
    store.put("a/b/one", b"1")
    store.put("a/two", b"2")
    store.put("three", b"")
    assert (store.get("a/b/one"), store.get("a/two"), store.get("three")) == (b"1", b"2", b"")
    assert store.list() == ["a", "three"]
    assert store.list("a") == ["b", "two"]
    assert (store.sizes("a"), store.sizes("a/b"), store.sizes("c")) == ({"two": 1}, {"one": 1}, {})
    store.delete("a")
    assert store.list() == ["three"]
    store.delete("a")
    store.delete("three")
    assert names(store) == []


def test_a_put_replaces_the_value_and_leaves_no_temporary(store):
    for value in (b"old", b"new and longer", b"x"):
        store.put("key", value)
        assert store.get("key") == value
    assert names(store) == ["key"]


def test_readers_never_see_half_a_value(store):
    script = """
import sys
from torchrl_ext.stores import LocalStore
store = LocalStore(sys.argv[1])
print("ready", flush=True)
for i in range(10**9):
    store.put("key", bytes([i % 256]) * 100_000)
"""
    store.put("key", bytes(100_000))
    with running_python(script, store.root) as child:
        assert child.stdout.readline() == "ready\n"
        seen = set()
        while len(seen) < 20:
            value = store.get("key")
            assert len(value) == 100_000
            assert len(set(value)) == 1
            seen.add(value[0])


def test_a_missing_key_is_a_file_not_found_error(store):
    with pytest.raises(FileNotFoundError):
        store.get("nothing")
    assert store.list("nothing") == []


@pytest.mark.parametrize("key", ["", "..", "../x", "a/../../x", "/etc/passwd", "a//b", "./a", "a\\b", "a\0b"])
def test_keys_that_lead_out_of_the_store_are_refused(store, key):
    for call in (store.get, store.delete, lambda key: store.put(key, b"")):
        with pytest.raises(StoreError, match="is not a name inside a store"):
            call(key)


def test_a_draft_appears_as_a_whole_at_its_end(store):
    with store.draft("folder") as draft:
        draft.write("one", b"1")
        (draft.path / "two").write_bytes(b"2")
        assert store.list() == []
    assert store.list("folder") == ["one", "two"]


def test_a_draft_that_fails_leaves_nothing(store):
    with pytest.raises(KeyError), store.draft("folder") as draft:
        draft.write("one", b"1")
        raise KeyError
    assert names(store) == []


def test_a_name_that_is_taken_is_refused_and_kept(store):
    store.put("folder/one", b"1")
    with pytest.raises(StoreError, match="exists already"), store.draft("folder"):
        raise AssertionError("the block ran")
    assert store.get("folder/one") == b"1"


def test_a_draft_that_cannot_fit_is_refused_before_it_is_written(store):
    with pytest.raises(StoreError, match=f"{1 << 60:,} bytes free"), store.draft("folder", needed_bytes=1 << 60):
        raise AssertionError("the block ran")
    assert names(store) == []


def test_the_root_has_one_writer_at_a_time(store):
    other = LocalStore(store.root)
    with pytest.raises(StoreError, match="another trainer"):
        other.own()
    assert not other.owned
    store.disown()
    other.own()
    assert other.owned
    other.disown()
    other.disown()


def test_the_lock_ends_with_its_process(store):
    store.disown()
    script = """
import sys
from torchrl_ext.stores import LocalStore
store = LocalStore(sys.argv[1])
store.own()
print("owned", flush=True)
sys.stdin.read()
"""
    with running_python(script, store.root) as child:
        assert child.stdout.readline() == "owned\n"
        with pytest.raises(StoreError):
            store.own()
    store.own()


def test_a_new_writer_sweeps_only_temporaries(store):
    store.put("kept", b"1")
    store.disown()
    (store.root / ".kept.tmp-123").write_text("")
    (store.root / ".folder.tmp-456").mkdir()
    (store.root / ".folder.tmp-456" / "file").write_text("")
    (store.root / ".nfs0001").write_text("")
    store.own()
    assert names(store) == [".nfs0001", "kept"]


def test_a_folder_that_is_read_stays_readable_while_it_is_deleted(store):
    store.put("folder/one", b"1234")
    with open(store.path("folder/one"), "rb") as file:
        store.delete("folder")
        assert file.read() == b"1234"


def test_a_store_that_cannot_be_written_says_where(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        LocalStore(tmp_path / "file").own()
